"""List the checkpoints of a run: steps, sizes, metrics, and whether they are valid."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from xlstm_jax.cli.shared.run_folders import RUN_HELP, add_outputs, find_run
from xlstm_jax.cli.shared.screen import as_typed, print_error, print_out
from xlstm_jax.configs import ConfigError

if TYPE_CHECKING:
    from xlstm_jax.checkpoint.store import CheckpointStore

SHOWN_METRICS = 4
MEBIBYTE = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_folder", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--verify", action="store_true", help="read all files and verify their checksums")
    add_outputs(parser)
    parser.epilog = "Exits with 1 if the run has no checkpoint or a corrupt one."


def run(args: argparse.Namespace) -> int:
    """Print the table and return the exit code."""
    try:
        folder = find_run(args.run_folder, args.outputs)
    except ConfigError as error:
        print_error(str(error))
        return 2
    from xlstm_jax.checkpoint.files import checkpoint_folder
    from xlstm_jax.checkpoint.store import CheckpointStore

    with contextlib.closing(CheckpointStore(checkpoint_folder(folder), read_only=True)) as store:
        if not store.has_any():
            print_error(f"There is no checkpoint in {as_typed(Path(store.folder))}.")
            return 1
        rows, problems = _rows(store, verify=args.verify)
    table = Table(box=None, pad_edge=False)
    for column in ("step", "saved", "MiB", "metrics", "state"):
        table.add_column(column, justify="right" if column in ("step", "MiB") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_out(table)
    for problem in problems:
        print_error(problem)
    return 1 if problems else 0


def _rows(store: "CheckpointStore", *, verify: bool) -> tuple[list[list[str]], list[str]]:
    """Return the table rows, one per checkpoint, and a one-line message per corrupt checkpoint."""
    from xlstm_jax.checkpoint.checksums import CHECKSUMS_FILE
    from xlstm_jax.checkpoint.files import quarantined

    latest, best = store.latest(), store.best()
    rows, problems = [], []
    for step in store.steps():
        problem = store.problem(step, None if verify else ())
        state = [name for name, found in (("latest", latest), ("best", best)) if found == step]
        if problem is not None:
            state.append("corrupt")
            problems.append(f"{store.path(step).name} is corrupt: {problem}.")
        elif not (store.path(step) / CHECKSUMS_FILE).exists():
            state.append("no checksums")
        elif verify:
            state.append("valid")
        metadata = {} if problem else store.read_metadata(step)
        metrics = {} if problem else store.read_document(step, "metrics")
        saved = str(metadata.get("saved_at", ""))[:16].replace("T", " ")
        rows.append([str(step), saved, _mebibytes(store.path(step)), _describe(metrics), ", ".join(state)])
    rows += [["", "", _mebibytes(path), "", f"corrupt, kept as {path.name}"] for path in quarantined(store.folder)]
    return rows, problems


def _mebibytes(checkpoint: Any) -> str:
    return f"{sum(file.stat().st_size for file in Path(checkpoint).rglob('*') if file.is_file()) / MEBIBYTE:,.1f}"


def _describe(metrics: dict[str, Any]) -> str:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    shown = [f"{name} {value:.4g}" for name, value in list(numbers.items())[:SHOWN_METRICS]]
    return ", ".join(shown) + (", ..." if len(numbers) > SHOWN_METRICS else "")
