"""The learning rate of a run is logged, at no cost to the devices."""

import importlib.resources
from types import SimpleNamespace

import jax
import pytest
from trainer.callbacks.regression import draw_batches, make_regression, read_rows

from xlstm_jax.trainer.callbacks import LearningRateMonitorConfig


def rates(path, key="optimizer/lr"):
    return [(row["log_step"], row[key]) for row in read_rows(path, "train") if key in row]


def test_the_learning_rate_is_logged_every_n_steps(tmp_path):
    trainer = make_regression(tmp_path, callbacks=[LearningRateMonitorConfig(every_n_steps=2)])
    trainer.train_model(draw_batches(6), num_epochs=1)
    assert rates(tmp_path) == [(step, pytest.approx(float(trainer.lr_scheduler(step)))) for step in (2, 4, 6)]


def test_the_learning_rate_is_logged_after_epochs_under_any_name(tmp_path):
    config = LearningRateMonitorConfig(every_n_steps=-1, every_n_epochs=2, log_lr_key="rate")
    make_regression(tmp_path, callbacks=[config]).train_model(draw_batches(1), num_epochs=4)
    assert rates(tmp_path, "rate") == [(2, pytest.approx(0.1)), (4, pytest.approx(0.1))]


def monitor(schedule):
    """Build a monitor for a trainer that has nothing but a schedule and a logger: no state to wait for."""
    logged = []
    logger = SimpleNamespace(log_host_metrics=lambda metrics, step, mode: logged.append((step, mode, metrics)))
    callback = LearningRateMonitorConfig(every_n_steps=1).create(SimpleNamespace(lr_scheduler=schedule, logger=logger))
    return callback, logged


def test_all_steps_share_one_program():
    traced = []

    def schedule(step):
        traced.append(step)
        return 0.5 * step

    callback, logged = monitor(schedule)
    for step in (1, 2, 3):
        callback.on_training_step({}, 1, step)
    assert logged == [(step, "train", {"optimizer/lr": 0.5 * step}) for step in (1, 2, 3)]
    assert len(traced) == 1


def test_the_learning_rate_is_computed_on_the_cpu(monkeypatch):
    devices, cpu = [], jax.local_devices(backend="cpu")[3]
    monkeypatch.setattr(jax, "local_devices", lambda backend: {"cpu": [cpu]}[backend])
    callback, _ = monitor(lambda step: 0.5 * step)
    compute = callback._schedule
    callback._schedule = lambda step: devices.append(compute(step).devices()) or compute(step)
    callback.on_training_step({}, 1, 1)
    assert devices == [{cpu}]


def test_where_jax_has_no_cpu_the_learning_rate_is_logged_too(monkeypatch):
    def fail(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", fail)
    callback, logged = monitor(lambda step: 0.5 * step)
    callback.on_training_step({}, 1, 1)
    assert logged == [(1, "train", {"optimizer/lr": 0.5})]


def test_the_config_has_the_documented_defaults():
    config = LearningRateMonitorConfig().to_dict()
    assert config == {
        "every_n_epochs": -1,
        "every_n_steps": 50,
        "main_process_only": True,
        "log_lr_key": "optimizer/lr",
    }


def test_recipes_log_the_learning_rate_once():
    """Each row has the `lr` of its update; the rate of the next one would be a second curve, a step ahead."""
    group = (importlib.resources.files("xlstm_jax.recipes") / "groups/callbacks/default.yaml").read_text()
    assert "LearningRateMonitorConfig" not in group
