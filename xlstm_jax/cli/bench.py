"""Run benchmarks and save their output as dated Markdown pages."""

import argparse
import ast
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

import xlstm_jax
from xlstm_jax.cli.shared.screen import as_typed, describe_error, print_error, print_out
from xlstm_jax.configs import nearest

PACKAGE = Path(xlstm_jax.__file__).parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
"""The root of the source checkout; `None` if the package is installed from a wheel."""
SCRIPTS = (CHECKOUT or PACKAGE) / "benchmarks"
RESULTS = SCRIPTS / "results" if CHECKOUT else Path("benchmark-results")
RESULTS_VARIABLE = "BENCHMARK_RESULTS"
"""The environment variable that passes the results folder to a script, for extra files or a page that the script
writes itself: `<date>-<name>.md`."""

DESCRIBE = """import json; from xlstm_jax.report.environment import describe_environment
print(json.dumps(describe_environment()))"""
SECONDS_TO_STOP = 10.0


class Outcome(NamedTuple):
    """The output, exit code and duration of a script."""

    output: str
    errors: str
    exit_code: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "xlstm-jax bench [-h] [--list] [--output DIR] [NAME ...] [-- OPTION ...]"
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run; without a name, list all")
    parser.add_argument("--list", action="store_true", help="list all benchmarks")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="the folder for results")
    parser.epilog = (
        "Options after -- are passed to every named benchmark. Exits with 0 if all succeed, with 1 if one fails, and "
        "with 2 if a name is unknown."
    )


def run(args: argparse.Namespace) -> int:
    """Run the requested benchmarks and return the exit code."""
    names, options = _split(args.names)
    known = {path.stem: path for path in sorted(SCRIPTS.glob("*.py"))}
    if args.list or not names:
        print_out(_listing(known))
        return 0
    for name in names:
        if name not in known:
            print_error(f"There is no benchmark {name!r}.{nearest(name, known)} `xlstm-jax bench --list` lists all.")
            return 2
    try:
        machine = _describe_machine()
        successes = [_run_and_keep(name, known[name], options, machine, args.output) for name in names]
    except KeyboardInterrupt:
        print_error("Stopped; the running benchmark wrote no results.")
        return 130
    except OSError as error:
        print_error(describe_error(error))
        return 1
    return 0 if all(successes) else 1


def _run_and_keep(name: str, script: Path, options: list[str], machine: dict[str, str], folder: Path) -> bool:
    """Run a benchmark, write its results, and return whether it succeeded."""
    print_out(f"== {name}")
    own, started = folder / f"{datetime.date.today().isoformat()}-{name}.md", time.time()
    outcome = _run_script(script, options, folder)
    if own.is_file() and own.stat().st_mtime >= started and not outcome.exit_code:  # The script wrote its own page.
        file = own
    else:
        file = write_dated(folder, name, _page(name, script, options, machine, outcome))
    (print_error if outcome.exit_code else print_out)(
        f"{name}: {_verdict(outcome)}; written to {as_typed(file.resolve())}"
    )
    return outcome.exit_code == 0


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """Split names from options: argparse drops the `--` between them, but no name starts with a dash."""
    count = next((index for index, text in enumerate(given) if text.startswith("-")), len(given))
    return given[:count], given[count:]


def _summary(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _listing(scripts: dict[str, Path]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, script in scripts.items():
        table.add_row(name, _summary(script))
    return table


def _run_script(script: Path, options: list[str], folder: Path) -> Outcome:
    """Run a script in a subprocess and stream its output."""
    output, errors, start = [], [], time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(script), *options],
        env=_environment() | {RESULTS_VARIABLE: str(folder.resolve())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # so that the processes it starts can be terminated with it
    ) as child:
        reader = threading.Thread(target=_pass_on, args=(child.stderr, sys.stderr, errors.append), daemon=True)
        reader.start()
        try:
            _pass_on(child.stdout, sys.stdout, output.append)
            exit_code = child.wait()
        finally:
            _end(child)
            reader.join(SECONDS_TO_STOP)
    return Outcome("".join(output), "".join(errors), exit_code, time.perf_counter() - start)


def _pass_on(source: Any, target: Any, keep: Callable[[str], None]) -> None:
    for line in source:
        keep(line)
        target.write(line)
        target.flush()


def _end(child: subprocess.Popen) -> None:
    """Terminate a process and its children: first with SIGINT, then with SIGKILL."""
    if child.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_STOP)
            return


def _describe_machine() -> dict[str, str]:
    """Describe what results depend on. A subprocess queries the devices, as some serve only one process at a time."""
    child = subprocess.run(
        [sys.executable, "-c", DESCRIBE], env=_environment(), cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    cpu = f"{_cpu_model()}, {_num_cores()} cores"
    if child.returncode:
        versions = f"xlstm_jax {xlstm_jax.__version__}, Python {platform.python_version()}"
        return {"Versions": versions, "Devices": "JAX does not start", "CPU": cpu}
    found = json.loads(child.stdout.splitlines()[-1])
    versions = [f"{name} {found['packages'].get(name)}" for name in ("xlstm_jax", "jax", "jaxlib")]
    facts = {
        "Versions": ", ".join([*versions, f"Python {found['python']}"]),
        "Devices": f"{found['devices']['count']} × {found['devices']['kind']}",
        "CPU": cpu,
    }
    if CHECKOUT and found["git"]:
        facts["Commit"] = found["git"]["commit"][:12] + (", with changes" if found["git"]["dirty"] else "")
    return facts


def _environment() -> dict[str, str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if CHECKOUT:  # The checkout may not be installed.
        paths = (str(CHECKOUT), os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _page(name: str, script: Path, options: list[str], machine: dict[str, str], outcome: Outcome) -> str:
    command = shlex.join(["xlstm-jax", "bench", name, *(["--", *options] if options else [])])
    facts = {"Command": f"`{command}`", **machine, "Result": _verdict(outcome)}
    failed = "FAILED: " if outcome.exit_code else ""
    parts = [
        f"# {failed}{name}, {datetime.date.today().isoformat()}",
        _summary(script),
        "\n".join(f"- {what}: {value}" for what, value in facts.items()),
        _as_markdown(outcome.output),
    ]
    if outcome.exit_code and outcome.errors.strip():
        parts += ["Output on stderr:", _block(outcome.errors)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(outcome: Outcome) -> str:
    state = f"failed with exit code {outcome.exit_code}" if outcome.exit_code else "done"
    return f"{state} after {outcome.seconds:.0f} s"


def _as_markdown(output: str) -> str:
    """Keep output that has Markdown tables or headings; put any other output into a code block."""
    has_markup = re.search(r"^(\|[-:| ]*-[-:| ]*\|\s*|#+ .*)$", output, re.MULTILINE)
    return output.strip("\n") if has_markup or not output.strip() else _block(output)


def _block(text: str) -> str:
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall(r"^`{3,}", text, re.MULTILINE))])
    return f"{fence}\n{text.strip(chr(10))}\n{fence}"


def write_dated(folder: Path, name: str, text: str) -> Path:
    """Write `<folder>/<date>-<name>.md`, with a suffix -2, -3, ... if that file exists; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, count = f"{datetime.date.today().isoformat()}-{name}", 1
    while True:
        file = folder / (f"{stem}.md" if count == 1 else f"{stem}-{count}.md")
        try:
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
            return file
        except FileExistsError:
            count += 1
