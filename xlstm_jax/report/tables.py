"""The tables of a report: key numbers, settings, parameters, environment."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xlstm_jax.configs import flat_config
from xlstm_jax.report.charts import Chart
from xlstm_jax.report.markup import Markup, joined, tag
from xlstm_jax.report.run_files import Run
from xlstm_jax.report.summary import KeyNumber, compact, config_differences, key_numbers


def comparison(runs: Sequence[Run]) -> Markup:
    """Build a comparison of the key numbers of runs; where lower is better, the lowest is bold."""
    numbers = [{number.label: number for number in key_numbers(run)} for run in runs]
    labels = list(dict.fromkeys(label for of_run in numbers for label in of_run))
    rows = [["status", *(run.status for run in runs)], ["steps", *(f"{run.last_step:,}" for run in runs)]]
    for label in labels:
        found = [of_run.get(label) for of_run in numbers]
        values = [number.value for number in found if number is not None and number.value is not None]
        best = min(values) if len(values) > 1 else None
        rows.append([label, *(_compared(number, best) for number in found)])
    return table(["", *(swatch(index, run.name) for index, run in enumerate(runs))], rows, class_="compare")


def differences(runs: Sequence[Run]) -> Markup:
    """Build a table of the settings in which runs differ."""
    rows = [
        [tag("code", key), *("–" if value is None else tag("code", value) for value in values)]
        for key, values in config_differences(runs).items()
    ]
    if not rows:
        return tag("p", "All settings are the same, or the runs kept no config of the same kind.", class_="note")
    return table(["setting", *(swatch(index, run.name) for index, run in enumerate(runs))], rows, class_="compare")


def configs(run: Run) -> Markup:
    """Build the tables of a run's configs, one per group."""
    parts = [fold(file, *map(_config_group, _groups(config)), opened=False) for file, config in run.configs.items()]
    return joined(*parts) if parts else tag("p", "This run kept no config.", class_="note")


def parameters(run: Run) -> Markup | None:
    """Build the table of all parameters."""
    entries = run.parameters
    if not entries:
        return None
    sizes = [entry["size"] if isinstance(entry.get("size"), int) else 0 for entry in entries]
    total = sum(sizes)
    rows = [
        [
            tag("code", str(entry.get("name", ""))),
            " × ".join(map(str, entry.get("shape") or [])) or "scalar",
            _number_cell(size, f"{size:,}"),
            _number_cell(size, f"{size / total:.1%}" if total else ""),
            str(entry.get("dtype", "")),
            _spec(entry.get("spec")),
        ]
        for entry, size in zip(entries, sizes, strict=True)
    ]
    columns = ["parameter", "shape", "elements", "share", "dtype", "split over"]
    caption = f"{compact(total)} parameters in {len(entries)} arrays"
    return fold(caption, table(columns, rows, class_="sortable"), opened=len(entries) <= 40)


def environment(run: Run) -> Markup | None:
    """Build the list of a run's starts, the latest first."""
    starts = run.starts
    if not starts:
        return None
    parts = [
        fold(
            f"Start {number} at step {start.get('step', '?')}, {readable_time(start.get('time'))}",
            pairs(_describe_start(start)),
            opened=number == len(starts),
        )
        for number, start in reversed(list(enumerate(starts, 1)))
    ]
    return joined(*parts)


def single_values(charts: Sequence[Chart], runs: Sequence[Run]) -> Markup | None:
    """Build a table of the metrics that never changed or were logged only once."""
    rows = []
    for chart in charts:
        for metric, source in dict.fromkeys((line.metric, line.source) for line in chart.lines):
            lines = [line for line in chart.lines if (line.metric, line.source) == (metric, source)]
            found = {line.run: line.curve.last() for line in lines}
            points = [found.get(index) for index in range(len(runs))]
            values = ["–" if point is None else f"{point[1]:.6g}" for point in points]
            rows.append([tag("code", metric), source, *values])
    if not rows:
        return None
    names = [run.name for run in runs] if len(runs) > 1 else ["value"]
    return fold("Metrics that did not change", table(["metric", "mode", *names], rows), opened=len(rows) <= 20)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, class_: str | None = None) -> Markup:
    """Build a table; cells that are already `td` elements are used unchanged."""
    head = tag("thead", tag("tr", *(tag("th", column, scope="col") for column in columns)))
    body = tag("tbody", *(tag("tr", *map(_cell, row)) for row in rows))
    return tag("div", tag("table", head, body, class_=class_), class_="scroll")


def pairs(entries: Mapping[str, str]) -> Markup:
    """Build a list of names and values."""
    return tag("dl", *(joined(tag("dt", name), tag("dd", value)) for name, value in entries.items() if value))


def fold(title: str, *content: str, opened: bool) -> Markup:
    """Build a collapsible part."""
    return tag("details", tag("summary", title), *content, open=opened)


def swatch(index: int, name: str) -> Markup:
    """Return the name of a run with its colour."""
    return joined(tag("i", class_="swatch", style=f"--colour: var(--line-{index % 8})"), name)


def readable_time(value: Any) -> str:
    """Format an ISO timestamp for reading."""
    return str(value or "").replace("T", " ").replace("+00:00", " UTC")


def _compared(number: KeyNumber | None, best: float | None) -> str:
    if number is None:
        return "–"
    is_best = best is not None and number.value == best
    text = tag("b", number.text) if is_best else number.text
    return joined(text, tag("small", number.note) if number.note and number.value is not None else None)


def _cell(content: str) -> Markup:
    is_cell = isinstance(content, Markup) and content.startswith("<td")
    return Markup(content) if is_cell else tag("td", content)


def _number_cell(value: int, text: str) -> Markup:
    return tag("td", text, data_value=value, class_="number")


def _spec(spec: Any) -> str:
    axes = spec if isinstance(spec, list) else []
    names = ["+".join(map(str, axis)) if isinstance(axis, list) else axis for axis in axes]
    return ", ".join("–" if name is None else str(name) for name in names) if any(names) else "whole"


def _groups(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Split a config by its top-level keys; values outside any group come first, under an empty name."""
    alone = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    nested = {key: dict(value) for key, value in config.items() if isinstance(value, Mapping)}
    return ([("", alone)] if alone else []) + list(nested.items())


def _config_group(group: tuple[str, dict[str, Any]]) -> Markup:
    name, settings = group
    rows = [[tag("code", key), tag("code", str(value))] for key, value in flat_config(settings).items()]
    return joined(tag("h4", name) if name else None, table(["setting", "value"], rows, class_="settings"))


def _describe_start(start: Mapping[str, Any]) -> dict[str, str]:
    git, devices, packages = (_mapping(start.get(key)) for key in ("git", "devices", "packages"))
    changed = {True: ", with changes", None: ", changes unknown"}.get(git.get("dirty"), "")
    command = start.get("command")
    end = f"{start.get('status')}, {readable_time(start.get('end_time'))}" if start.get("status") else ""
    return {
        "Command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "Ended": end,
        "Devices": f"{devices.get('count')} × {devices.get('kind')}" if devices else "",
        "Processes": str(devices.get("processes", "")),
        "Commit": f"{git.get('commit')}{changed}" if git else "",
        "Python": str(start.get("python", "")),
        "Platform": str(start.get("platform", "")),
        "Packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
    }


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
