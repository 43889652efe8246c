"""Grouping of curves into charts, and the data from which the page draws them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from xlstm_jax.report.curves import Curve, spread
from xlstm_jax.report.run_files import Run

MOST_POINTS = 2000
"""The maximum number of points per curve."""
MOST_POINTS_OF_ALL = 400_000
"""The maximum number of points per page, so that a page with many metrics of many runs still opens quickly."""
FEWEST_POINTS = 100
CLOCK_POINTS = 1000
OTHER = "Other metrics"
HIDDEN = {"epoch", "tokens_seen", "compile_time"}
SAME_AS = {"optimizer/lr": "lr"}
"""Duplicate metrics, hidden if the metric with the same values is present."""
TIME_STACK = "Where the time went"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A known kind of chart.

    Args:
        section: The section of the page.
        title: The title of the chart.
        pattern: A regular expression for the metrics of the chart.
        unit: The format of numbers: `number`, `count`, `percent`, `seconds` or `gib`.
        is_log: Whether the scale is logarithmic by default.
        keeps_constants: Whether the chart is drawn even if all curves are constant.
    """

    section: str
    title: str
    pattern: str
    unit: str = "number"
    is_log: bool = False
    keeps_constants: bool = True


KINDS = (
    Kind("Learning", "Loss", "loss", is_log=True),
    Kind("Learning", "Bits per byte", "bits_per_byte", is_log=True),
    Kind("Learning", "Perplexity", "perplexity", is_log=True),
    Kind("Learning", "Accuracy", "accuracy", unit="percent"),
    Kind("Optimizer", "Learning rate", "lr|optimizer/lr|learning_rate"),
    Kind("Optimizer", "Gradient norm", "grad_norm(_clipped)?", is_log=True),
    Kind("Optimizer", "Norm of parameters", "param_norm"),
    Kind("Time and memory", "Tokens per second", "tokens_per_second", unit="count"),
    Kind("Time and memory", "Model FLOPs utilization (MFU)", "mfu", unit="percent"),
    Kind("Time and memory", "MFU by six FLOPs a parameter (6N-MFU)", "mfu_6n", unit="percent"),
    Kind("Time and memory", "Goodput", "goodput", unit="percent"),
    Kind("Time and memory", TIME_STACK, "lost_.+", unit="percent"),
    Kind("Time and memory", "Step time", "step_time", unit="seconds"),
    Kind("Time and memory", "Memory of a device", "device_memory_gib", unit="gib"),
    Kind(OTHER, "Waiting for data", "data_wait_time", unit="seconds", keeps_constants=False),
    Kind(OTHER, "Time of an epoch", "epoch_time", unit="seconds", keeps_constants=False),
    Kind(OTHER, "Gradient norm by parameter", "grad_norm_.+", is_log=True, keeps_constants=False),
    Kind(OTHER, "Norm by parameter", "param_norm_.+", keeps_constants=False),
)
SECTIONS = ("Learning", "Optimizer", "Time and memory", OTHER)
_MODE_OF_LOG = re.compile(r"(.+)_(?:mean|single)")
_NAMED_SET = re.compile(r"(.+)_(loss|perplexity|bits_per_byte|accuracy)")


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve with its labels: `val/wiki_loss` is the metric `loss` of the source `val wiki`."""

    run: int
    mode: str
    metric: str
    source: str
    curve: Curve


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines drawn in one chart."""

    kind: Kind
    lines: list[Line]

    @property
    def is_worth_drawing(self) -> bool:
        """Whether a chart shows more than a single number would."""
        if self.kind.keeps_constants:
            return True
        return any(not line.curve.is_constant() for line in self.lines)


def lines_of(run: Run, index: int = 0) -> Iterator[Line]:
    """Yield all visible curves of a run with their labels."""
    for mode, curves in _in_order(run.metrics):
        names = {key: _MODE_OF_LOG.sub(r"\1", key) if mode == "train" else key for key in curves}
        for key, metric in names.items():
            is_repeated = SAME_AS.get(metric) in names.values()
            if metric in HIDDEN or is_repeated or not curves[key].finite():
                continue
            found = _NAMED_SET.fullmatch(metric) if mode != "train" else None
            source = f"{mode} {found[1]}" if found else mode
            yield Line(index, mode, found[2] if found else metric, source, curves[key])


def make_charts(runs: Sequence[Run]) -> list[Chart]:
    """Group the curves of all runs into charts, in page order; each run has its own `TIME_STACK` chart."""
    charts: dict[tuple[str, int], Chart] = {}
    for index, run in enumerate(runs):
        for line in lines_of(run, index):
            kind = _kind_of(line.metric)
            if kind.title == TIME_STACK and line.mode != "train":
                continue
            place = (kind.title, index if kind.title == TIME_STACK else 0)
            charts.setdefault(place, Chart(kind, [])).lines.append(line)
    order = [kind.title for kind in KINDS]
    known = sorted(
        (chart for chart in charts.values() if chart.kind.title in order), key=lambda c: order.index(c.kind.title)
    )
    others = sorted((chart for chart in charts.values() if chart.kind.title not in order), key=lambda c: c.kind.title)
    return [*known, *others]


def chart_data(chart: Chart, runs: Sequence[Run], most: int) -> dict[str, Any]:
    """Return the data of a chart for the page's script."""
    is_stack = chart.kind.title == TIME_STACK
    run = runs[chart.lines[0].run]
    shows_bits = chart.kind.title == "Bits per byte"
    references = {name: value for run in runs for name, value in run.references.items()} if shows_bits else {}
    return {
        "title": f"{TIME_STACK}: {run.name}" if is_stack and len(runs) > 1 else chart.kind.title,
        "unit": chart.kind.unit,
        "log": chart.kind.is_log,
        "stack": is_stack,
        "references": list(references.items()),
        "series": _stack(run, chart.lines) if is_stack else [_series(line, chart, most) for line in chart.lines],
    }


def points_per_line(charts: Sequence[Chart]) -> int:
    """Return the maximum number of points per line that keeps the page small."""
    num_lines = sum(len(chart.lines) for chart in charts)
    return max(FEWEST_POINTS, min(MOST_POINTS, MOST_POINTS_OF_ALL // max(num_lines, 1)))


def clock(run: Run) -> dict[str, list[float | int]]:
    """Return tokens and seconds at some steps, for these x-axes; empty if a run did not log them."""
    train = run.metrics.get("train", {})
    tokens = dict(train["tokens_seen"].finite()) if "tokens_seen" in train else {}
    compiling = dict(train["compile_time"].finite()) if "compile_time" in train else {}
    shares = dict(train["lost_compile"].finite()) if "lost_compile" in train else {}
    # Rows have no timestamp, so derive the time from the compile time and its share of the total time.
    seconds = {step: compiling[step] / shares[step] for step in compiling if shares.get(step, 0) > 0}
    clocks = {"tokens": {0: 0.0} | tokens if tokens else {}, "seconds": seconds}
    return {name: _thin(points) for name, points in clocks.items() if points}


def _thin(points: dict[int, float]) -> list[float | int]:
    """Downsample points to a flat list that alternates steps and values."""
    items = sorted(points.items())
    kept = [items[index] for index in spread(len(items), CLOCK_POINTS)]
    return [number for step, value in kept for number in (step, _short(value))]


def _in_order(metrics: dict[str, dict[str, Curve]]) -> list[tuple[str, dict[str, Curve]]]:
    first = {"train": 0, "val": 1, "test": 2}
    return sorted(metrics.items(), key=lambda item: (first.get(item[0], 3), item[0]))


def _kind_of(metric: str) -> Kind:
    known = (kind for kind in KINDS if re.fullmatch(kind.pattern, metric))
    return next(known, Kind(OTHER, metric, re.escape(metric), keeps_constants=False))


def _series(line: Line, chart: Chart, most: int) -> dict[str, Any]:
    metrics = {other.metric for other in chart.lines}
    sources = {other.source for other in chart.lines}
    parts = [line.source] if len(metrics) == 1 else [line.metric]
    if len(metrics) > 1 and len(sources) > 1:
        parts.insert(0, line.source)
    curve = line.curve.downsampled(most)
    return {"run": line.run, "label": " ".join(parts), **_points(curve)}


def _stack(run: Run, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the time shares at common steps, the useful share first."""
    goodput = run.metrics["train"].get("goodput")
    curves = {line.metric.removeprefix("lost_"): line.curve for line in lines}
    curves = ({} if goodput is None else {"training": goodput}) | curves
    steps = sorted(set.intersection(*(set(curve.steps) for curve in curves.values())))
    kept = [steps[index] for index in spread(len(steps), CLOCK_POINTS // 2)]
    shares = {name: dict(zip(curve.steps, curve.values, strict=True)) for name, curve in curves.items()}
    return [
        {"run": lines[0].run, "label": name, **_points(Curve(kept, [of_name[step] for step in kept]))}
        for name, of_name in shares.items()
    ]


def _points(curve: Curve) -> dict[str, list[Any]]:
    return {"x": list(curve.steps), "y": [None if value is None else _short(value) for value in curve.values]}


def _short(value: float) -> float | int:
    """Round to six digits; integers are shorter in JSON."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
