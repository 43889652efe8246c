"""Show one run, or several side by side, in a page that needs nothing but a browser."""

import argparse
from pathlib import Path

from xlstm_jax.cli.screen import complain, show
from xlstm_jax.trainer.report.page import write_report
from xlstm_jax.trainer.report.run_files import read_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page to write; by default report.html, in the folder of a single run or else in the current one",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and return the exit code."""
    try:
        runs = read_runs(args.runs)
        folder = runs[0].folder if len(runs) == 1 else Path()
        output = folder / "report.html" if args.output is None else args.output
        write_report(runs, output)
    except (OSError, ValueError) as error:
        complain(f"{type(error).__name__}: {error}")
        return 1
    show(str(output))
    return 0
