"""Curves that belong together share a chart, and every curve has one."""

import pytest
from report.run_folders import write_rows, write_run

from xlstm_jax.report.charts import (
    MOST_POINTS,
    MOST_POINTS_OF_ALL,
    chart_data,
    clock,
    make_charts,
    points_per_line,
)
from xlstm_jax.report.run_files import read_run


def drawn(*folders, most=MOST_POINTS):
    """Return what is drawn, by title."""
    runs = [read_run(folder) for folder in folders]
    return {data["title"]: data for data in (chart_data(chart, runs, most) for chart in make_charts(runs))}


def labels(chart):
    return [(series["run"], series["label"]) for series in chart["series"]]


def test_training_and_validation_share_the_charts_of_what_is_learnt(tmp_path):
    charts = drawn(write_run(tmp_path / "run"))
    for title in ("Loss", "Perplexity", "Bits per byte", "Accuracy"):
        assert labels(charts[title]) == [(0, "train"), (0, "val")]
    assert charts["Bits per byte"]["references"] == [("gzip", 2.11), ("xz", 1.6)]
    assert charts["Loss"]["references"] == []


def test_several_sets_of_a_validation_share_a_chart(tmp_path):
    write_rows(tmp_path, "train", {1: {"loss_mean": 1.0}})
    write_rows(tmp_path, "val", {1: {"wiki_loss": 1.0, "code_loss": 2.0}})
    assert labels(drawn(tmp_path)["Loss"]) == [(0, "train"), (0, "val wiki"), (0, "val code")]


def test_metrics_that_nobody_knows_have_charts_of_their_own(tmp_path):
    write_rows(tmp_path, "val_extended", {1: {"recall": 0.5}, 2: {"recall": 0.6}})
    charts = make_charts([read_run(tmp_path)])
    assert [(chart.kind.section, chart.kind.title, chart.is_worth_drawing) for chart in charts] == [
        ("Other metrics", "recall", True)
    ]


def test_what_never_changes_is_not_worth_a_chart_unless_it_is_expected(tmp_path):
    write_rows(tmp_path, "train", {step: {"bad_steps": 0, "lr": 0.1} for step in (1, 2)})
    assert {chart.kind.title: chart.is_worth_drawing for chart in make_charts([read_run(tmp_path)])} == {
        "Learning rate": True,
        "bad_steps": False,
    }


def test_a_learning_rate_that_is_logged_twice_is_drawn_once(tmp_path):
    write_rows(tmp_path, "train", {1: {"lr": 0.1, "optimizer/lr": 0.1}})
    assert labels(drawn(tmp_path)["Learning rate"]) == [(0, "train")]
    write_rows(tmp_path, "train", {1: {"optimizer/lr": 0.1}})
    assert labels(drawn(tmp_path)["Learning rate"]) == [(0, "train")]


def test_norms_of_single_parameters_share_a_chart(tmp_path):
    write_rows(tmp_path, "train", {1: {"grad_norm_mean": 1.0, "grad_norm_a.b_mean": 0.5, "grad_norm_c_mean": 0.2}})
    charts = drawn(tmp_path)
    assert labels(charts["Gradient norm"]) == [(0, "train")]
    assert labels(charts["Gradient norm by parameter"]) == [(0, "grad_norm_a.b"), (0, "grad_norm_c")]


def test_runs_share_charts_but_each_has_its_own_of_where_the_time_went(tmp_path):
    charts = drawn(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert labels(charts["Goodput"]) == [(0, "train"), (1, "train")]
    assert labels(charts["Where the time went: b"]) == [(1, "training"), (1, "compile"), (1, "data")]
    shares = [
        sum(at) for at in zip(*(series["y"] for series in charts["Where the time went: a"]["series"]), strict=True)
    ]
    assert shares == pytest.approx([1.0] * len(shares), abs=1e-5)


def test_a_line_has_no_more_points_than_asked_for_and_keeps_its_gaps(tmp_path):
    rows = {step: {"loss_mean": None if 400 < step < 420 else 1 / step} for step in range(1, 1001)}
    write_rows(tmp_path, "train", rows)
    (series,) = drawn(tmp_path, most=100)["Loss"]["series"]
    assert len(series["x"]) == len(series["y"]) <= 100
    assert None in series["y"]


def test_many_lines_have_fewer_points_each(tmp_path):
    write_rows(tmp_path, "train", {1: {f"metric {index}": index for index in range(1000)}})
    charts = make_charts([read_run(tmp_path)])
    assert points_per_line(charts) == MOST_POINTS_OF_ALL // 1000
    assert points_per_line(charts[:3]) == MOST_POINTS


def test_tokens_and_seconds_are_known_at_every_step(tmp_path):
    axes = clock(read_run(write_run(tmp_path / "run")))
    tokens, seconds = (dict(zip(axis[::2], axis[1::2], strict=True)) for axis in (axes["tokens"], axes["seconds"]))
    assert (tokens[0], seconds[1]) == (0, pytest.approx(11))
    assert (tokens[400], seconds[400]) == (400_000, pytest.approx(410))


def test_a_run_that_tells_no_time_has_no_such_axis(tmp_path):
    write_rows(tmp_path, "train", {1: {"loss": 1.0, "compile_time": 0.0, "lost_compile": 0.0}})
    assert clock(read_run(tmp_path)) == {}
