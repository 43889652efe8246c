"""Write a self-contained HTML report of one run, or a comparison of several."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from xlstm_jax.cli.shared.run_folders import RUN_HELP, add_outputs, find_run
from xlstm_jax.cli.shared.screen import describe_error, print_error, print_out
from xlstm_jax.configs import ConfigError
from xlstm_jax.report.page import write_report
from xlstm_jax.report.run_files import has_metrics, read_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page to write; by default report.html, in the folder of a single run or, for several, in the current "
        "folder",
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page and return the exit code."""
    try:
        runs = read_runs(list(_find_runs(args.runs, args.outputs)))
        folder = runs[0].folder if len(runs) == 1 else Path()
        output = folder / "report.html" if args.output is None else args.output
        write_report(runs, output)
    except ConfigError as error:
        print_error(str(error))
        return 2
    except (OSError, ValueError) as error:
        print_error(describe_error(error))
        return 1
    print_out(str(output))
    return 0


def _find_runs(names: Sequence[str], outputs: Path) -> Iterator[Path]:
    """Yield the folders of runs; warn about names that are not runs, or raise an error if none is a run."""
    problems, num_found = [], 0
    for name in names:
        try:
            folder = Path(name) if has_metrics(Path(name)) else find_run(name, outputs)
            if not has_metrics(folder):
                raise ConfigError(f"{folder} has no file_logs/metrics_<mode>.jsonl: the run has not logged anything.")
        except ConfigError as error:
            problems.append(str(error))
        else:
            num_found += 1
            yield folder
    if not num_found:
        raise ConfigError("\n".join(problems))
    for problem in problems:
        print_error(f"Skipped: {problem}")
