"""Report what this machine offers to JAX, and whether it works."""

import argparse
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ENVIRONMENT = re.compile(
    r"(XLA|JAX|PJRT|LIBTPU|TPU|NCCL|COORDINATOR)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|MASTER_(ADDR|PORT)"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|STEP_NODELIST|NTASKS|NODEID|PROCID|LOCALID)"
)
"""Variables that change what JAX does, or which processes it joins."""


class Package(NamedTuple):
    """A package that is asked for, and the version that is there."""

    required: Requirement
    installed: str | None

    @property
    def healthy(self) -> bool:
        """Whether it is there in a version that was asked for."""
        return self.installed is not None and self.required.specifier.contains(self.installed, prereleases=True)

    @property
    def wanted(self) -> str:
        """What was asked for, as pip takes it."""
        return f"{self.required.name}{self.required.specifier}"


def packages(distribution: str, extra: str = "") -> Iterator[Package]:
    """The packages that a distribution needs or, with `extra`, those that this extra adds."""
    lines = metadata.requires(distribution) if _installed(distribution) else None
    for required in map(Requirement, lines or []):
        if _applies(required, extra) and not (extra and _applies(required, "")):
            yield Package(required, _installed(required.name))
            for inner in sorted(required.extras):
                yield from packages(required.name, inner)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _applies(required: Requirement, extra: str) -> bool:
    return required.marker is None or required.marker.evaluate({"extra": extra})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command; it takes no arguments."""
    parser.epilog = "Exits with 0 if the core packages and every device of this process work, with 1 otherwise."


def run(_: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    console = Console(highlight=False)
    problems = []
    # The environment comes before the devices: JAX sets variables of its own when it starts.
    for report in (_report_packages, _report_environment, _report_devices, _report_extras):
        problems += report(console)
        console.print()
    for problem in problems:
        console.print(f"[red]✗[/] {escape(problem)}")
    if not problems:
        console.print("[green]✓[/] Everything that was checked works.")
    return 1 if problems else 0


def _report_packages(console: Console) -> list[str]:
    ourselves = Package(Requirement("xlstm_jax"), _installed("xlstm_jax"))
    jaxlib = (package for package in packages("jax") if package.required.name == "jaxlib")
    core = [ourselves, *packages("xlstm_jax"), *jaxlib]
    table = _table("Software", "package", "version", "needs")
    table.add_row("Python", platform.python_version())
    table.add_row("platform", platform.platform())
    for required, installed in core:
        table.add_row(required.name, installed or "-", str(required.specifier))
    console.print(table)
    unhealthy = [package for package in core if not package.healthy]
    return [f"{package.wanted} is needed; found: {package.installed or 'none'}" for package in unhealthy]


def _report_devices(console: Console) -> list[str]:
    table = _table("Devices", "device", "kind", "memory", "64 × 64 matmul, compiled and run")
    try:
        import jax

        devices = jax.local_devices()
    except Exception as error:
        return [f"JAX does not start: {type(error).__name__} {error}"]
    problems = []
    for device in devices:
        try:
            result = f"{_check_matmul(device):.2f} s"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
            problems.append(f"{device}: {result}")
        table.add_row(escape(str(device)), device.device_kind, _memory(device), escape(result))
    console.print(table)
    if shutil.which("nvidia-smi") and all(device.platform == "cpu" for device in devices):
        console.print("An NVIDIA driver is here, but JAX sees no GPU: install the extra cuda12 or cuda13.")
    return problems


def _check_matmul(device: Any) -> float:
    """Multiply two matrices of small integers, which is exact in any precision; return the seconds it took."""
    import jax

    left, right = np.arange(2 * 64 * 64).reshape(2, 64, 64) % 3.0
    start = time.perf_counter()
    product = jax.jit(lambda a, b: a @ b)(*jax.device_put((left, right), device))
    if not np.array_equal(product, left @ right):
        raise ArithmeticError("the product is wrong")
    return time.perf_counter() - start


def _memory(device: Any) -> str:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return f"{stats.get('bytes_in_use', 0) / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB used"
    if device.platform == "cpu":
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB, the host's"
    return "-"


def _report_environment(console: Console) -> list[str]:
    table = _table("Environment", "variable", "value")
    for name in sorted(filter(ENVIRONMENT.fullmatch, os.environ)):
        table.add_row(name, escape(os.environ[name]))
    console.print(table if table.row_count else "No environment variable of JAX, XLA or SLURM is set.")
    return []


def _report_extras(console: Console) -> list[str]:
    table = _table("Extras", "extra", "state")
    extras = metadata.metadata("xlstm_jax").get_all("Provides-Extra") if _installed("xlstm_jax") else None
    for extra in extras or []:
        missing = sorted(package.wanted for package in packages("xlstm_jax", extra) if not package.healthy)
        table.add_row(extra, escape("needs " + ", ".join(missing)) if missing else "[green]installed[/]")
    console.print(table)
    return []


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table
