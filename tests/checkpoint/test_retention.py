"""Which checkpoints are kept."""

import pytest

from xlstm_jax.checkpoint.retention import Retention

METRICS = {10: {"loss": 3.0}, 20: {"loss": 1.0}, 30: {}, 40: {"loss": 2.0}, 50: {"loss": float("nan")}}


@pytest.mark.parametrize(
    ("retention", "dropped"),
    [
        (Retention(), []),
        (Retention(max_to_keep=1), [10, 20, 30, 40]),
        (Retention(max_to_keep=2, keep_every=20), [10, 30]),
        (Retention(max_to_keep=1, monitor="loss"), [10, 30, 40]),
        (Retention(max_to_keep=1, monitor="loss", mode="max"), [20, 30, 40]),
        (Retention(max_to_keep=1, monitor="accuracy"), [10, 20, 30, 40]),
        (Retention(max_to_keep=9), []),
    ],
    ids=str,
)
def test_all_but_the_newest_the_best_and_the_regular_ones_are_dropped(retention, dropped):
    assert retention.dropped(list(METRICS), METRICS) == dropped


def test_of_equally_good_checkpoints_the_newest_is_the_best():
    metrics = {40: {"loss": 1.0}, 10: {"loss": 1.0}, 20: {"loss": 2.0}}
    assert Retention(monitor="loss").best(metrics) == 10


def test_newer_means_written_later():
    assert Retention(max_to_keep=1).dropped([100, 60], {100: {}, 60: {}}) == [100]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "0.5", None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_only_a_finite_number_can_be_the_best(mode, value):
    metrics = {10: {"loss": value}, 20: {"loss": 1.0}, 30: {"loss": value}}
    assert Retention(monitor="loss", mode=mode).best(metrics) == 20
