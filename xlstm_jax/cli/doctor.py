"""Check this machine for JAX: versions, devices, kernels, disk."""

import argparse
import functools
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xlstm_jax.cli.checks import software
from xlstm_jax.cli.checks.disk import check_disk
from xlstm_jax.cli.checks.section import FAILED, PASSED, WARNING, Section, first_line
from xlstm_jax.cli.shared.screen import Screen

Check = Callable[[str], Section]

STYLES = {PASSED: "green", FAILED: "red", WARNING: "yellow", "installed": "green"}
"""The colour of a cell, by its first word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--quick", action="store_true", help="skip the kernel self-tests and the disk benchmark")
    parser.add_argument(
        "--path",
        dest="paths",
        action="append",
        type=Path,
        metavar="DIR",
        help="the folder to check instead of the current one; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.epilog = "Exits with 0 if all checks pass, with 1 otherwise."


def run(args: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    console = Screen(highlight=False)
    sections = []
    for section in _sections(console, args):
        _show(console, section)
        sections.append(section)
    problems = [problem for section in sections for problem in section.problems]
    if args.json is not None:
        found = {"healthy": not problems, "sections": [section.as_dict() for section in sections]}
        try:
            args.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            problems.append(f"The results cannot be written: {first_line(error)}")
    for problem in problems:
        console.print(f"[red]{FAILED}[/] {escape(problem)}", soft_wrap=True)
    if not problems:
        console.print(f"[green]{PASSED}[/] Everything that was checked works.")
    return 1 if problems else 0


def _sections(console: Console, args: argparse.Namespace) -> Iterator[Section]:
    """Yield the result of one check after the other; checks that need JAX are skipped if JAX does not start."""

    def examine(title: str, check: Check) -> Section:
        with console.status(f"{title} ..."):
            try:
                return check(title)
            except Exception as error:
                return Section(title, problems=[f"{title}: {first_line(error)}"])

    # List the environment before starting the devices, as JAX sets variables itself when it starts.
    yield examine("Software", software.check_packages)
    yield examine("Environment", software.check_environment)
    devices = examine("Devices", _from("devices", "check_devices"))
    yield devices
    if devices.rows:
        yield examine("Kernels", _from("kernels", "check_kernels"))
        if not args.quick:
            yield examine("Self-tests of kernels", _from("self_tests", "check_numbers"))
        yield examine("Collectives", _from("devices", "check_collectives"))
    folders = args.paths or [Path()]
    yield examine("Disk", functools.partial(check_disk, folders=folders, with_speed=not args.quick))
    yield examine("Extras", software.check_extras)


def _from(module: str, name: str) -> Check:
    """Import a check only when it runs, so that a failing import of JAX is reported as a problem."""
    return lambda title: getattr(importlib.import_module(f"xlstm_jax.cli.checks.{module}"), name)(title)


def _show(console: Screen, section: Section) -> None:
    table = Table(title=section.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in section.columns:
        table.add_column(column, header_style="dim", overflow="fold")
    for row in section.rows:
        table.add_row(*(_styled(cell) for cell in row))
    if section.rows:
        console.print_whole(table)
    elif section.notes:
        console.print(f"[bold italic]{section.title}[/]")
    for note in section.notes:
        console.print(escape(note), soft_wrap=True)
    if section.rows or section.notes:
        console.print()


def _styled(cell: str) -> str:
    word, separator, rest = cell.partition(" ")
    return f"[{STYLES[word]}]{word}[/]{separator}{escape(rest)}" if word in STYLES else escape(cell)
