"""Read the files in the folder of a run, also while the run writes them.

Only the metrics are required. Files that are missing, incomplete or in another format read as empty.
"""

import ast
import dataclasses
import json
import logging
import re
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from xlstm_jax.report.curves import Curve, finite_or_none, spread

LOGGER = logging.getLogger(__name__)

METRIC_FILES = "*/metrics_*.jsonl"
FACT_MODES = ("dataset", "model", "parallel", "startup")
"""Modes whose rows hold facts about a run instead of metrics."""
CONFIG_FILES = ("config.yaml", "file_logs/config.json", "file_logs/config.yaml")
ENVIRONMENT_FILE, PARAMETERS_FILE = "environment.json", "parameters.json"
MOST_SAMPLES = 200
"""The maximum number of steps for which samples are shown, evenly spaced."""
LONGEST_SAMPLE = 4000
STATUSES = {
    "success": "finished",
    "interrupted": "interrupted",
    "nan": "diverged",
    "skipped": "diverged",
    "error": "failed",
}


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of a step: prompts and their continuations."""

    step: int
    texts: list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The recorded data of a run.

    Args:
        name: The name of the run in the report.
        folder: The folder of the run.
        metrics: Curves by mode and metric.
        facts: Sizes of data, model and mesh.
        configs: Configs by file.
        samples: Samples in the order of steps.
        environment: The starts of the run and `references`, as `environment.record_start` writes them.
        parameters: Name, shape, dtype, spec and size of each parameter.
        heartbeat: The time and the step of the last sign of life.
        status: `finished`, `interrupted`, `diverged`, `failed` or `running`.
    """

    name: str
    folder: Path
    metrics: dict[str, dict[str, Curve]]
    facts: dict[str, Any]
    configs: dict[str, dict[str, Any]]
    samples: list[Samples]
    environment: dict[str, Any]
    parameters: list[dict[str, Any]]
    heartbeat: dict[str, Any]
    status: str

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The records of the run's starts."""
        starts = self.environment.get("starts")
        return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []

    @property
    def references(self) -> dict[str, float]:
        """Bits per byte to compare with, by name."""
        references = self.environment.get("references")
        items = references.items() if isinstance(references, dict) else ()
        return {str(name): float(value) for name, value in items if isinstance(value, int | float)}

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        steps = [curve.steps[-1] for curves in self.metrics.values() for curve in curves.values() if curve.steps]
        beat = self.heartbeat.get("step")
        return max([*steps, beat if isinstance(beat, int) else 0])


def has_metrics(folder: Path) -> bool:
    """Return whether a folder belongs to a run that has logged metrics."""
    return any(folder.glob(METRIC_FILES))


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read the folder of a run.

    Args:
        folder: The folder.
        name: The name of the run; by default, the name in its config and that of its folder.

    Returns:
        The run.

    Raises:
        ValueError: The folder holds no metrics.
    """
    paths = sorted(folder.glob(METRIC_FILES))
    if not paths:
        raise ValueError(f"{folder} is not the folder of a run: it has no file_logs/metrics_<mode>.jsonl.")
    metrics, facts = {}, {}
    for path in paths:
        mode = urllib.parse.unquote(path.stem.removeprefix("metrics_"))
        rows = read_rows(path)
        if mode in FACT_MODES:
            facts |= {key: value for _, row in rows for key, value in row.items()}
        else:
            metrics[mode] = _to_curves(rows)
    environment = _read_mapping(folder / ENVIRONMENT_FILE)
    titles = [_read_mapping(folder / CONFIG_FILES[0]).get("name"), folder.resolve().name]
    return Run(
        name=" ".join(title for title in titles if isinstance(title, str)) if name is None else name,
        folder=folder,
        metrics=metrics,
        facts=facts,
        configs={file: config for file in CONFIG_FILES if (config := _read_mapping(folder / file))},
        samples=read_samples(folder / "samples"),
        environment=environment,
        parameters=[entry for entry in _read_list(folder / PARAMETERS_FILE) if isinstance(entry, dict)],
        heartbeat=_read_mapping(folder / "heartbeat.json"),
        status=_read_status(folder, environment),
    )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read several runs, each named after its folder, with as many parent folders as needed to make names unique.

    Args:
        folders: The folders; duplicates are read once.

    Returns:
        The runs, in the order of the folders.
    """
    paths = list({folder.resolve(): folder for folder in folders}.values())
    return [read_run(path, name) for path, name in zip(paths, _distinct_names(paths), strict=True)]


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the step and the metrics of each row; log a warning about invalid lines and skip them.

    The first two entries of a row are its step and its epoch, under any names. A last line without a newline is still
    being written and is skipped silently if it is incomplete.
    """
    rows, wrong = [], []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                (_, step), _, *metrics = json.loads(line).items()
                rows.append((int(step), dict(metrics)))
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                wrong += [number] * line.endswith("\n")
    if wrong:
        LOGGER.warning(
            "Left out what is no row of metrics in %s: %d lines, the first is %d.", path, len(wrong), wrong[0]
        )
    return rows


def read_samples(folder: Path) -> list[Samples]:
    """Return the samples of each step, in order."""
    paths = {int(found[1]): path for path in folder.glob("step_*.txt") if (found := _STEP.fullmatch(path.name))}
    steps = sorted(paths)
    return [Samples(steps[index], parse_samples(_read_text(paths[steps[index]]))) for index in _kept(steps)]


def parse_samples(content: str) -> list[tuple[str, str]]:
    """Return prompts and continuations from a file written by `callbacks.text_samples`."""
    _, *parts = _PROMPT.split(content)
    prompts, texts = parts[::2], parts[1::2]
    # A text ends with a newline, and an empty line separates it from the next.
    texts = [text.removesuffix("\n") for text in (*(text.removesuffix("\n") for text in texts[:-1]), *texts[-1:])]
    return [(_evaluated(prompt), _shortened(text)) for prompt, text in zip(prompts, texts, strict=True)]


_STEP = re.compile(r"step_(\d+)\.txt")
_PROMPT = re.compile(r"^--- ('.*'|\".*\")\n", re.MULTILINE)
_END = re.compile(r"The run ended with status (\w+)\.")
_BEGINNING = re.compile(r"Starting epoch \d+ at step")


def _kept(steps: list[int]) -> list[int]:
    return spread(len(steps), MOST_SAMPLES)


def _evaluated(prompt: str) -> str:
    try:
        return str(ast.literal_eval(prompt))
    except (ValueError, SyntaxError):
        return prompt


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]} …"


def _to_curves(rows: list[tuple[int, dict[str, Any]]]) -> dict[str, Curve]:
    points: dict[str, dict[int, float | None]] = {}
    for step, row in rows:
        for key, value in row.items():
            if value is None or isinstance(value, bool | int | float):
                points.setdefault(key, {})[step] = None if value is None else finite_or_none(value)
    return {key: Curve.from_points(of_key) for key, of_key in points.items()}


def _read_status(folder: Path, environment: dict[str, Any]) -> str:
    """Return the status from the record of the last start or, without one, from the log."""
    starts = environment.get("starts")
    if isinstance(starts, list) and starts and isinstance(starts[-1], dict):
        return STATUSES.get(starts[-1].get("status") or "", "running")
    for line in reversed(_read_text(folder / "output.log").splitlines()):
        if found := _END.search(line):
            return STATUSES.get(found[1], "failed")
        if _BEGINNING.search(line):
            break
    return "running"


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    names = ["/".join(path[-1:]) for path in parts]
    for depth in range(2, max(map(len, parts), default=1) + 1):
        names = [
            "/".join(path[-depth:]).replace("//", "/") if names.count(name) > 1 else name
            for name, path in zip(names, parts, strict=True)
        ]
    return names


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_any(path: Path) -> Any:
    try:
        text = _read_text(path)
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _read_mapping(path: Path) -> dict[str, Any]:
    content = _read_any(path)
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _read_list(path: Path) -> list[Any]:
    content = _read_any(path)
    return content if isinstance(content, list) else []
