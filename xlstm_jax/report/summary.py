"""The key numbers of a run."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from xlstm_jax.configs import flat_config
from xlstm_jax.report.charts import Line, clock, lines_of
from xlstm_jax.report.curves import Curve
from xlstm_jax.report.run_files import CONFIG_FILES, Run

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
LEARNT = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}


@dataclasses.dataclass(frozen=True)
class KeyNumber:
    """A number by which runs are compared.

    Args:
        label: The label.
        text: The formatted number.
        note: A note below the number.
        value: The number itself, if lower is better.
    """

    label: str
    text: str
    note: str = ""
    value: float | None = None


def key_numbers(run: Run) -> list[KeyNumber]:
    """Return the key numbers of a run that were recorded, the most important first."""
    lines = list(lines_of(run))
    numbers = [*_learnt(lines, "train"), *_learnt(lines, "val", run.references), *_learnt(lines, "test")]
    return [*numbers, *_progress(run), *_speed(run), *_size(run)]


def config_differences(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return the settings that differ between runs, with the value in each run; `None` if a run does not have it."""
    flat = _comparable_configs(runs)
    keys = list(dict.fromkeys(key for config in flat for key in config))
    values = {key: [str(config[key]) if key in config else None for config in flat] for key in keys}
    return {key: of_key for key, of_key in values.items() if len(set(of_key)) > 1}


def compact(number: float | int) -> str:
    """Format a number with three or four digits and a suffix for its scale, as in 1.31B."""
    if number == 0:
        return "0"
    for scale, letter in _SCALES:
        if abs(number) >= 0.9995 * scale:
            return f"{_digits(number / scale)}{letter}"
    return _digits(number)


def duration(seconds: float | int) -> str:
    """Format a duration, as in 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def elapsed_seconds(run: Run) -> float | None:
    """Return the total duration of the run so far, over all starts."""
    seconds = clock(run).get("seconds")
    return float(seconds[-1]) if seconds else None


def _digits(number: float | int) -> str:
    text = f"{number:.3g}" if abs(number) < 1e-3 or abs(number) >= 1000 else f"{number:.4g}"
    return f"{number:.0f}" if "e+" in text else text


def _learnt(lines: Sequence[Line], mode: str, references: Mapping[str, float] | None = None) -> list[KeyNumber]:
    named = {"train": "Training", "val": "Validation", "test": "Test"}[mode]
    metrics = ["loss"] if mode == "train" else LEARNT
    return [
        _lowest(f"{named} {LEARNT[line.metric]}", line, references if line.metric == "bits_per_byte" else None)
        for metric in metrics
        for line in [next((line for line in lines if (line.mode, line.metric) == (mode, metric)), None)]
        if line is not None
    ]


def _lowest(label: str, line: Line, references: Mapping[str, float] | None) -> KeyNumber:
    """Return the last value for training, which is noisy, and the lowest value for evaluations."""
    last, best = line.curve.last(), line.curve.lowest()
    assert last is not None
    assert best is not None
    if line.mode == "train":
        return KeyNumber(label, f"{last[1]:#.4g}", "last", last[1])
    place = "best and last" if best == last else f"best, at step {best[0]:,}; last {last[1]:#.4g}"
    compared = [f"{name}\N{NO-BREAK SPACE}{value:.4g}" for name, value in (references or {}).items()]
    return KeyNumber(label, f"{best[1]:#.4g}", " · ".join([place, *compared]), best[1])


def _progress(run: Run) -> list[KeyNumber]:
    tokens = _last(run, "tokens_seen")
    seconds = elapsed_seconds(run)
    numbers = []
    if tokens is not None:
        parameters = _number(run.facts.get("num_params"))
        note = f"{tokens / parameters:.3g} per parameter" if parameters else ""
        numbers.append(KeyNumber("Tokens seen", compact(tokens), note))
    if seconds is not None:
        starts = f"{len(run.starts)} starts" if len(run.starts) > 1 else ""
        numbers.append(KeyNumber("Time", duration(seconds), starts))
    return numbers


def _speed(run: Run) -> list[KeyNumber]:
    numbers = []
    if (speed := _median(run, "tokens_per_second")) is not None:
        shares = {"MFU": _median(run, "mfu"), "6N-MFU": _median(run, "mfu_6n")}
        notes = [f"{name} {share:.1%}" for name, share in shares.items() if share is not None]
        numbers.append(KeyNumber("Tokens per second", compact(speed), ", ".join(notes)))
    if (goodput := _last(run, "goodput")) is not None:
        losses = {key.removeprefix("lost_"): _last(run, key) or 0.0 for key in _train(run) if key.startswith("lost_")}
        most = max(losses, key=lambda name: losses[name], default=None)
        note = f"{most} took {losses[most]:.1%}" if most is not None and losses[most] > 0 else ""
        numbers.append(KeyNumber("Goodput", f"{goodput:.1%}", note))
    return numbers


def _size(run: Run) -> list[KeyNumber]:
    numbers = []
    parameters = _number(run.facts.get("num_params")) or sum(
        _number(entry.get("size")) or 0 for entry in run.parameters
    )
    if parameters:
        note = f"in {len(run.parameters)} array{'s' * (len(run.parameters) > 1)}" if run.parameters else ""
        numbers.append(KeyNumber("Parameters", compact(parameters), note))
    start = run.starts[-1] if run.starts else {}
    described = start.get("devices")
    devices: dict[str, Any] = described if isinstance(described, dict) else {}
    count = _number(run.facts.get("num_devices")) or _number(devices.get("count"))
    if count:
        numbers.append(KeyNumber("Devices", f"{count:.0f}", str(devices.get("kind", ""))))
    return numbers


def _train(run: Run) -> dict[str, Curve]:
    return run.metrics.get("train", {})


def _last(run: Run, metric: str) -> float | None:
    point = _train(run)[metric].last() if metric in _train(run) else None
    return None if point is None else point[1]


def _median(run: Run, metric: str) -> float | None:
    values = [value for _, value in _train(run)[metric].finite()] if metric in _train(run) else []
    return statistics.median(values) if values else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _comparable_configs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the flat configs of runs from the first file that all of them have; empty if there is none."""
    shared = next((file for file in CONFIG_FILES if all(file in run.configs for run in runs)), None)
    return [] if shared is None else [dict(flat_config(run.configs[shared])) for run in runs]
