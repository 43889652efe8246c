"""A run ends once it no longer gets better, and remembers that."""

import json
import math
from types import SimpleNamespace

import pytest
from trainer.callbacks.regression import draw_batches, make_regression

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.callbacks.early_stopping import EarlyStoppingConfig


def make_callback(**options):
    return EarlyStoppingConfig(monitor="loss", **options).create(SimpleNamespace(should_stop=False))


def validate(callback, values):
    """Report one value after the other; return how many it took until the run was to stop."""
    for index, value in enumerate(values, start=1):
        callback.on_validation_epoch_end({"loss": value, "accuracy": 0.5}, epoch_idx=index, step_idx=10 * index)
        if callback.trainer.should_stop:
            return index
    return None


@pytest.mark.parametrize(
    ("options", "values", "stops_after"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.0], 4),
        ({"patience": 2}, [3.0, 3.5, 2.0, 2.5, 1.0, 1.5], None),
        ({"patience": 1}, [3.0, 2.0, 1.0], None),
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.1, 0.15], 4),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.0, 1.6], 3),
        ({"patience": 1, "mode": "max", "min_delta": 0.5}, [1.0, 2.0, 2.4], 3),
        ({}, [1.0, 2.0, 2.0, 2.0], 4),
    ],
    ids=["worse", "better in between", "always better", "max", "too little", "too little, max", "default patience"],
)
def test_a_run_stops_after_some_validations_without_improvement(options, values, stops_after):
    assert validate(make_callback(**options), values) == stops_after


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_improvement(mode, value):
    callback = make_callback(mode=mode, patience=2)
    assert validate(callback, [value, 2.0]) is None
    assert (callback.best, callback.num_without_improvement) == (2.0, 0)
    assert validate(callback, [value, value]) == 2


def test_a_missing_metric_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'loss'.*choose from accuracy, val_loss\."):
        make_callback().on_validation_epoch_end({"val_loss": 1.0, "accuracy": 0.5}, epoch_idx=1, step_idx=1)


def resumed(callback, **options):
    """Build the callback of a run that goes on from a checkpoint."""
    other = make_callback(**options)
    other.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    other.on_training_start()
    return other


def test_a_run_that_goes_on_keeps_counting():
    callback = make_callback()
    validate(callback, [1.0, 2.0, 2.0])
    after = resumed(callback)
    assert (after.best, after.num_without_improvement, after.trainer.should_stop) == (1.0, 2, False)
    assert validate(after, [2.0]) == 1


def test_a_run_that_has_stopped_goes_on_only_with_more_patience():
    callback = make_callback(patience=1)
    assert validate(callback, [1.0, 2.0]) == 2
    assert resumed(callback, patience=1).trainer.should_stop
    assert not resumed(callback, patience=2).trainer.should_stop


@pytest.mark.parametrize("kept", [{}, {"monitor": "accuracy", "best": 0.9, "num_without_improvement": 2}])
def test_a_checkpoint_that_says_nothing_about_the_metric_starts_anew(kept):
    callback = make_callback()
    validate(callback, [1.0, 2.0])
    callback.load_state_dict(kept)
    assert (callback.best, callback.num_without_improvement) == (None, 0)


def test_a_run_that_learns_nothing_ends_early():
    trainer = make_regression(lr=0.0, callbacks=[EarlyStoppingConfig(monitor="loss", patience=2)])
    results = trainer.train_model(draw_batches(2), draw_batches(1), num_epochs=9)
    assert list(results) == ["val_epoch_1", "val_epoch_2", "val_epoch_3"]
    assert trainer.global_step == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "least"}, "mode is 'least': choose from min, max"),
        ({"patience": 0}, "patience is 0"),
        ({"min_delta": -0.1}, "min_delta is -0.1"),
        ({"main_process_only": True}, "all processes have to take part"),
    ],
)
def test_a_bad_config_is_refused(options, message, unchecked_shapes):
    with pytest.raises(ConfigError, match=message):
        EarlyStoppingConfig(monitor="loss", **options)
