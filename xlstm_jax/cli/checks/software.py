"""List installed and missing packages, and the environment variables that JAX reads."""

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement

from xlstm_jax.cli.checks.section import Section

ENVIRONMENT = re.compile(
    r"(XLA|JAX|PJRT|LIBTPU|TPU|NCCL|COORDINATOR)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|MASTER_(ADDR|PORT)"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|STEP_NODELIST|NTASKS|NODEID|PROCID|LOCALID)"
)
"""Variables that configure JAX or determine which processes it joins."""


class Package(NamedTuple):
    """A required package and its installed version."""

    required: Requirement
    installed: str | None

    @property
    def healthy(self) -> bool:
        """Whether the package is installed in a version that meets the requirement."""
        return self.installed is not None and self.required.specifier.contains(self.installed, prereleases=True)

    @property
    def wanted(self) -> str:
        """The requirement, as an argument of pip."""
        return f"{self.required.name}{self.required.specifier}"


def packages(distribution: str, extra: str = "") -> Iterator[Package]:
    """Yield the packages that a distribution requires or, with `extra`, those that the extra adds."""
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


def check_packages(title: str) -> Section:
    """Compare the required packages with the installed ones."""
    ourselves = Package(Requirement("xlstm_jax"), _installed("xlstm_jax"))
    jaxlib = (package for package in packages("jax") if package.required.name == "jaxlib")
    core = [ourselves, *packages("xlstm_jax"), *jaxlib]
    section = Section(title, ("package", "version", "needs"))
    section.add("Python", platform.python_version())
    section.add("platform", platform.platform())
    for package in core:
        section.add(package.required.name, package.installed or "-", str(package.required.specifier))
        if not package.healthy:
            section.problems.append(f"{package.wanted} is required; installed: {package.installed or 'none'}")
    return section


def check_environment(title: str) -> Section:
    """List the environment variables that JAX, XLA and SLURM read or set."""
    section = Section(title, ("variable", "value"))
    for name in sorted(filter(ENVIRONMENT.fullmatch, os.environ)):
        section.add(name, os.environ[name])
    if not section.rows:
        section.notes.append("No environment variable of JAX, XLA or SLURM is set.")
    return section


def check_extras(title: str) -> Section:
    """List the extras and their missing packages; all extras are optional."""
    section = Section(title, ("extra", "state"))
    extras = metadata.metadata("xlstm_jax").get_all("Provides-Extra") if _installed("xlstm_jax") else None
    for extra in extras or []:
        missing = sorted(package.wanted for package in packages("xlstm_jax", extra) if not package.healthy)
        section.add(extra, f"needs {', '.join(missing)}" if missing else "installed")
    return section
