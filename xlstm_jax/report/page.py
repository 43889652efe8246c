"""The HTML page of a report: a self-contained file."""

import base64
import datetime
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from xlstm_jax.report import tables
from xlstm_jax.report.charts import OTHER, SECTIONS, Chart, chart_data, clock, make_charts, points_per_line
from xlstm_jax.report.labels import with_labels
from xlstm_jax.report.markup import Markup, joined, script_json, tag
from xlstm_jax.report.run_files import Run
from xlstm_jax.report.summary import key_numbers
from xlstm_jax.utils.files import write_atomically
from xlstm_jax.version import __version__

WIDE_CHARTS = {"Loss"}
REFRESH_SECONDS = 60
"""The interval at which a browser reloads the page while the run is training."""
MOST_OPEN_CHARTS = 12
"""If there are more charts of other metrics than this, their section is folded."""


def write_report(runs: Sequence[Run], path: Path) -> None:
    """Write the page of runs atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, build_page(runs))


def build_page(runs: Sequence[Run]) -> str:
    """Build the page of one run or of a comparison of several."""
    if len(runs) > 1:
        runs = with_labels(runs)
    all_charts = make_charts(runs)
    charts = [chart for chart in all_charts if chart.is_worth_drawing]
    constant = [chart for chart in all_charts if not chart.is_worth_drawing]
    most = points_per_line(charts)
    data = {
        "charts": [chart_data(chart, runs, most) for chart in charts],
        "runs": [_run_data(run) for run in runs],
    }
    sections = [
        _overview(runs),
        tag("nav", _legend(runs), Markup(_asset("controls.html")), aria_label="View of the charts"),
        *(_chart_section(name, charts) for name in SECTIONS),
        _section("Other numbers", tables.single_values(constant, runs)),
        _section("Samples", tag("div", id="samples") if any(run.samples for run in runs) else None),
        _section("Parameters", _of_each(runs, tables.parameters)),
        _section("Config", _configs(runs)),
        _section("Environment", _of_each(runs, tables.environment)),
    ]
    is_running = len(runs) == 1 and runs[0].status == "running"
    return _document(", ".join(run.name for run in runs), joined(*sections), data, refreshes=is_running)


def _document(title: str, body: Markup, data: dict[str, Any], *, refreshes: bool) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Content security policy: load nothing and run only our script, even if other markup gets into the page.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="refresh", content=str(REFRESH_SECONDS)) if refreshes else None,
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    content = joined(
        tag("main", body),
        tag("footer", f"xlstm_jax {__version__} wrote this page at {written}."),
        tag("script", script_json(data), type="application/json", id="data"),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', content), lang='en')}\n"


def _overview(runs: Sequence[Run]) -> Markup:
    if len(runs) > 1:
        return joined(tag("header", tag("h1", f"{len(runs)} runs")), tag("section", tables.comparison(runs)))
    run = runs[0]
    tiles = [
        tag("div", tag("dt", number.label), tag("dd", number.text), tag("p", number.note) if number.note else None)
        for number in key_numbers(run)
    ]
    return joined(tag("header", tag("h1", run.name, _status(run)), _progress(run)), tag("dl", *tiles, class_="tiles"))


def _legend(runs: Sequence[Run]) -> Markup | None:
    """Build a button per run that shows or hides it; `None` for a single run."""
    buttons = [
        tag("button", tables.swatch(index, run.name), type="button", data_run=index, aria_pressed="true")
        for index, run in enumerate(runs)
    ]
    return tag("div", *buttons, class_="legend") if len(runs) > 1 else None


def _status(run: Run) -> Markup:
    return tag("span", run.status, class_=f"status {run.status}")


def _progress(run: Run) -> Markup:
    planned = run.facts.get("num_train_steps")
    step = run.last_step
    facts = [f"Step {step:,}" + (f" of {planned:,}" if isinstance(planned, int) else "")]
    if run.starts:
        facts.append(f"started {tables.readable_time(run.starts[0].get('time'))}")
    if run.status == "running" and isinstance(beat := run.heartbeat.get("time"), int | float):
        heard = datetime.datetime.fromtimestamp(beat, datetime.UTC).isoformat(timespec="seconds")
        facts.append(f"last heard of {tables.readable_time(heard)}")
    share = min(step / planned, 1.0) if isinstance(planned, int) and planned > 0 else 1.0
    bar = tag("div", tag("i", style=f"width: {share:.2%}"), class_="progress")
    return joined(bar, tag("p", " · ".join(facts), class_="note"))


def _chart_section(name: str, charts: Sequence[Chart]) -> Markup | None:
    figures = [
        tag("figure", data_chart=index, class_="wide" if chart.kind.title in WIDE_CHARTS else None)
        for index, chart in enumerate(charts)
        if chart.kind.section == name
    ]
    if not figures:
        return None
    grid = tag("div", *figures, class_="charts")
    if name != OTHER:
        return _section(name, grid)
    is_open = len(figures) <= MOST_OPEN_CHARTS
    return _section(name, tables.fold(f"{len(figures)} charts", grid, opened=is_open))


def _configs(runs: Sequence[Run]) -> Markup:
    if len(runs) == 1:
        return tables.configs(runs[0])
    return joined(tag("h3", "Differences"), tables.differences(runs), _of_each(runs, tables.configs))


def _of_each(runs: Sequence[Run], describe: Any) -> Markup | None:
    """Build a part for each run; for several runs, each part is folded under the run's name."""
    described = [(run, part) for run in runs if (part := describe(run)) is not None]
    if not described:
        return None
    if len(runs) == 1:
        return described[0][1]
    return joined(*(tables.fold(run.name, part, opened=False) for run, part in described))


def _section(title: str, content: Markup | None) -> Markup | None:
    return None if content is None else tag("section", tag("h2", title), content)


def _run_data(run: Run) -> dict[str, Any]:
    samples = [{"step": samples.step, "texts": samples.texts} for samples in run.samples]
    return {"name": run.name, "clock": clock(run), "samples": samples}


def _asset(name: str) -> str:
    return (resources.files("xlstm_jax.report") / name).read_text(encoding="utf-8")
