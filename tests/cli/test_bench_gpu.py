"""The throughput table: what it runs, what it reads from runs, and how a later call completes it."""

import argparse
import importlib
import importlib.util
import io
import json
import re
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look up annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(monkeypatch):
    module = load("gpu", monkeypatch)
    monkeypatch.setattr(module, "describe_machine", lambda: {"GPU": "a GPU"})
    return module


def options(**changes):
    values = {"only": ["xlstm_160m"], "parts": ["log", "step"], "time_limit": 1e6, "again": False, "set": []}
    return argparse.Namespace(**values | {"peer_options": []} | changes)


@pytest.fixture
def calls(gpu, monkeypatch):
    """What was measured, by functions that take the place of the real ones."""
    made = []

    def measure_log(row, folder, limit, settings):
        made.append((row.experiment, "log"))
        return {"tokens_per_second": 200.0, "settings": "all chosen", "command": "xlstm-jax train", "steps": [30, 90]}

    def measure_step(row, folder, limit, settings):
        made.append((row.experiment, "step"))
        return {"rows": [{"tokens_per_second": 250.0}]}

    def measure_peer(row, peer, folder, limit, settings, flags):
        made.append((row.experiment, peer))
        figures = {"batch": 8, "parameters": 7, "peak_gib": 1.0, "first_steps_seconds": 2.0, "out_of_memory": [16]}
        return {"tokens_per_second": 160.0 if peer == "llama-documents" else 100.0, **figures}

    monkeypatch.setattr(gpu, "measure_log", measure_log)
    monkeypatch.setattr(gpu, "measure_step", measure_step)
    monkeypatch.setattr(gpu, "measure_peer", measure_peer)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    return made


def cells_of(page, experiment):
    line = next(line for line in page.splitlines() if line.startswith(f"| {experiment} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_later_call_measures_what_is_missing(gpu, calls, tmp_path):
    list(gpu.measure_all(gpu.Results(tmp_path, "2000-01-01"), options(parts=["log"])))
    list(gpu.measure_all(gpu.Results(tmp_path, "2000-01-01"), options()))
    assert calls == [("xlstm_160m", "log"), ("xlstm_160m", "step")]


def test_a_call_on_another_day_measures_anew(gpu, calls, tmp_path):
    for day in ("2000-01-01", "2000-01-02"):
        list(gpu.measure_all(gpu.Results(tmp_path, day), options(parts=["log"])))
    assert len(calls) == 2


def test_again_measures_anew(gpu, calls, tmp_path):
    for again in (False, True):
        list(gpu.measure_all(gpu.Results(tmp_path, "2000-01-01"), options(parts=["log"], again=again)))
    assert len(calls) == 2


def test_what_takes_longer_than_the_time_left_is_left_out(gpu, calls, tmp_path):
    lines = list(gpu.measure_all(gpu.Results(tmp_path, "2000-01-01"), options(time_limit=80)))
    assert calls == [("xlstm_160m", "step")]
    assert lines[0].startswith("xlstm_160m b16, log: left out, for ")


def test_an_error_is_a_cell_and_the_others_go_on(gpu, calls, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no luck")

    monkeypatch.setattr(gpu, "measure_log", fail)
    results = gpu.Results(tmp_path, "2000-01-01")
    list(gpu.measure_all(results, options()))
    cells = cells_of(results.write_page(), "xlstm_160m")
    assert cells[2] == "error: no luck"
    assert cells[4] == "250"


def test_ratios_are_those_of_the_log_to_the_bare_step_and_to_the_best_peer_without_documents(gpu, calls, tmp_path):
    results = gpu.Results(tmp_path, "2000-01-01")
    list(gpu.measure_all(results, options(only=["llama_160m"], parts=gpu.PARTS)))
    cells = dict(
        zip(
            importlib.import_module("support.gpu_page").COLUMNS,
            cells_of(results.write_page(), "llama_160m"),
            strict=True,
        )
    )
    assert (cells["tokens/s (log)"], cells["bare step"], cells["log / bare"]) == ("200", "250", "0.800")
    assert (cells["peer, tokens/s"], cells["log / peer"]) == ("100", "2.00")
    assert "batch 16" in (tmp_path / "2000-01-01-gpu.md").read_text()


def test_the_page_says_what_is_not_measured_yet(gpu, calls, tmp_path):
    results = gpu.Results(tmp_path, "2000-01-01")
    list(gpu.measure_all(results, options(parts=["log"])))
    missing = results.write_page().splitlines()[-1]
    assert missing.startswith("Not measured yet: xlstm_160m b16 (step), xlstm_400m b16 (log)")


def test_without_a_gpu_the_page_is_written_and_nothing_measured(gpu, calls, tmp_path, monkeypatch, capsys):
    gpu.Results(tmp_path, "2000-01-01").put(
        gpu.ROWS[0], "log", {"tokens_per_second": 321.0, "command": "a", "steps": [30, 90]}
    )
    monkeypatch.setattr(gpu, "list_gpus", list)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path), "--date", "2000-01-01"])
    gpu.main()
    assert calls == []
    assert "| 321 |" in capsys.readouterr().out


def test_the_header_of_a_run_is_read(gpu):
    table = Table.grid(padding=(0, 2))
    facts = {"performance": "remat none (auto: about 9 of 10 GiB)", "memory": "9.50 of 10.00 GiB on a device"}
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(value))
    console = Console(width=300, file=io.StringIO(), record=True)
    console.print(Panel(table, title="run starts", title_align="left"))
    assert gpu.read_header(console.export_text()) == facts


def process(gpu, code, **changes):
    return gpu.run_process([sys.executable, "-c", code], {}, **{"limit": 60.0, **changes})


def test_a_process_is_killed_when_its_work_is_done(gpu, tmp_path):
    file = tmp_path / "done"
    code = f"import pathlib, time; pathlib.Path({str(file)!r}).touch(); time.sleep(600)"
    ended = process(gpu, code, is_done=file.exists)
    assert ended.exit_code == 0
    assert ended.seconds < 60


def test_a_process_that_takes_too_long_is_killed(gpu):
    start = time.perf_counter()
    ended = process(gpu, "import time; time.sleep(600)", limit=0.2)
    assert time.perf_counter() - start < 60
    with pytest.raises(gpu.TimeUpError):
        ended.raise_for_failure()


@pytest.mark.parametrize("steps", [[10, 30, 40], [10, 30, 40, 50]])
def test_a_run_whose_time_is_up_counts_if_its_log_has_enough_rows(gpu, tmp_path, monkeypatch, steps):
    logs = {
        "train": [{"log_step": step, "tokens_per_second": step, "step_time": 1.0, "mfu": 0.5} for step in steps],
        "startup": [{"startup_seconds": 2.0, "compile_seconds": 1.0, "num_programs": 1}],
        "model": [{"num_params": 7}],
    }
    (tmp_path / "file_logs").mkdir()
    for name, rows in logs.items():
        text = "".join(json.dumps(row | {"mfu_6n": 0.6, "device_memory_gib": 1.0}) + "\n" for row in rows)
        (tmp_path / "file_logs" / f"metrics_{name}.jsonl").write_text(text)
    monkeypatch.setattr(gpu, "run_process", lambda *_: gpu.Process("", None, 1.0))
    if len(steps) < 4:
        with pytest.raises(gpu.TimeUpError):
            gpu.measure_log(gpu.ROWS[0], tmp_path, 1.0, [])
    else:
        assert gpu.measure_log(gpu.ROWS[0], tmp_path, 1.0, [])["tokens_per_second"] == 40


def test_a_failed_process_is_told_by_its_error(gpu):
    ended = process(gpu, "import sys, atexit; atexit.register(print, 'bye', file=sys.stderr); raise ValueError('why')")
    with pytest.raises(RuntimeError, match=r"^ValueError: why$"):
        ended.raise_for_failure()


def test_an_incomplete_last_row_of_a_log_is_left_out(gpu, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"log_step": 10}) + '\n{"log_st')
    assert gpu.read_rows(log) == [{"log_step": 10}]


def test_bars_of_all_groups_have_one_scale(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from support.bar_chart import Bar, bar_chart

    groups = {"a": [Bar("x", 40.0, "40"), Bar("y", 10.0, "10")], "b & c": [Bar("x", 2.0, "2")]}
    root = ElementTree.fromstring(bar_chart("t", groups))
    bars = [element for element in root.iter() if element.tag.endswith("rect") and element.get("height") == "16"]
    lengths = [float(bar.get("width")) for bar in bars]
    assert lengths[0] == 4 * lengths[1] == 20 * lengths[2] > 0
    assert bars[0].get("fill") == bars[2].get("fill") != bars[1].get("fill")
    assert {"a", "b & c", "40", "10", "2", "x", "y"} <= {element.text for element in root.iter()}


def test_the_chart_compares_shares_of_the_peak_by_tokens_per_second(gpu, tmp_path):
    results = gpu.Results(tmp_path, "2000-01-01")
    row = gpu.ROWS[0]
    results.put(row, "log", {"tokens_per_second": 2000.0, "mfu_6n": 0.6})
    results.put(row, f"peer:{row.peers[0]}", {"tokens_per_second": 1000.0})
    chart = gpu.render_chart(results)
    assert "0.60 (2,000 tokens/s)" in chart
    assert "0.30 (1,000 tokens/s)" in chart


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--experiment", "xlstm_160m", "--remat", "full"], "--remat cannot change an experiment"),
        (["batch_size=2"], "batch_size=2 is a setting of an experiment"),
    ],
)
def test_flags_of_shapes_and_settings_of_experiments_do_not_mix(arguments, reason, monkeypatch, capsys):
    script = load("train_step", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["train_step.py", *arguments])
    with pytest.raises(SystemExit):
        script.parse_arguments()
    assert reason in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_shapes_of_the_recipes_are_timed_under_their_names(monkeypatch):
    from xlstm_jax.recipes.compose import compose
    from xlstm_jax.recipes.run_config import build_run

    models = load("train_step", monkeypatch).MODELS
    for name in ("160m", "400m", "830m", "1.4b"):
        shape = build_run(compose([f"experiment=xlstm_{name.replace('.', '_')}"])).model.model_config
        assert {field: getattr(shape, field) for field in models[name]} == models[name]
