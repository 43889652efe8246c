"""A table of the results of all runs of a sweep."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from xlstm_jax.cli.shared.screen import as_typed

STATUSES = {0: "done", 1: "failed", 2: "wrong setting", 3: "bad step", 4: "skipped too many steps"}
"""The status of a run by its exit code; larger codes stand for signals."""
NOT_KNOWN = "–"
RESULTS = (("val", "loss"), ("val", "bits_per_byte"), ("train", "loss"))
"""The modes and metrics whose last values are shown, if any run has them."""
HEADER = ("run", "settings", "step", *(" ".join(result) for result in RESULTS), "status")


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """A finished run of a sweep."""

    folder: Path
    overrides: Sequence[str]
    """The overrides of the run, in Hydra's syntax."""
    exit_code: int


def describe_sweep(runs: Sequence[SweepRun]) -> str:
    """Return a table with one unwrapped line per run: the settings that differ and the last results."""
    rows = [_row(run, settings) for run, settings in zip(runs, _differing(runs), strict=True)]
    columns = [column for column in zip(HEADER, *rows, strict=True) if set(column[1:]) != {NOT_KNOWN}]
    widths = [max(map(len, column)) for column in columns]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    )
    return "\n".join(line.rstrip() for line in lines)


def _row(run: SweepRun, settings: str) -> tuple[str, ...]:
    from xlstm_jax.report.run_files import has_metrics, read_run

    read = read_run(run.folder) if has_metrics(run.folder) else None
    results = [read and read.metrics.get(mode, {}).get(metric) for mode, metric in RESULTS]
    last = [curve.last() if curve else None for curve in results]
    return (
        as_typed(run.folder),
        settings or NOT_KNOWN,
        str(read.last_step) if read else NOT_KNOWN,
        *(f"{point[1]:.4g}" if point else NOT_KNOWN for point in last),
        STATUSES.get(run.exit_code, f"stopped ({run.exit_code})"),
    )


def _differing(runs: Sequence[SweepRun]) -> list[str]:
    """Return the overrides of each run that not all runs share."""
    plain = [[word.lstrip("+") for word in run.overrides] for run in runs]
    common = set.intersection(*map(set, plain)) if len(plain) > 1 else set()
    return [" ".join(word for word in words if word not in common) for words in plain]
