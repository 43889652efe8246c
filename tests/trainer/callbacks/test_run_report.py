"""A run leaves a report, whatever happens to it, and no report ends a run."""

import json
import logging
import os
import signal
from types import SimpleNamespace

import jax
import pytest
from trainer.callbacks.regression import draw_batches, make_regression

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.callbacks import Callback, CallbackConfig, run_report
from xlstm_jax.trainer.callbacks.run_report import RunReportConfig
from xlstm_jax.trainer.run.signals import TrainingInterrupted

pytestmark = pytest.mark.slow


class Hook(Callback):
    """Calls a function after each step."""

    def on_training_step(self, step_metrics, epoch_idx, step_idx):
        self.config.function(step_idx)


class HookConfig(CallbackConfig):
    """Has a function to call."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def create(self, trainer, data_module=None):
        return Hook(self, trainer, data_module)


def train(path, *, hook=lambda step: None, num_steps=6, batches=None, **options):
    """Train with a report, and with a validation every other step."""
    callbacks = [RunReportConfig(**options), HookConfig(hook)]
    trainer = make_regression(path, callbacks=callbacks, check_val_every_n_steps=2)
    trainer.train_model(batches or draw_batches(num_steps), draw_batches(1, seed=1), num_train_steps=num_steps)
    return trainer


def starts(path):
    return json.loads((path / "environment.json").read_text())["starts"]


def test_a_run_leaves_a_report_of_all_that_it_logged(tmp_path):
    train(tmp_path, references={"gzip": 2.5})
    page = (tmp_path / "report.html").read_text()
    assert '<span class="status finished">' in page
    assert "Step 6 of 6" in page
    assert [(start["step"], start["status"]) for start in starts(tmp_path)] == [(0, "success")]
    assert json.loads((tmp_path / "environment.json").read_text())["references"] == {"gzip": 2.5}
    assert json.loads((tmp_path / "parameters.json").read_text()) == [
        {"name": "layer.bias", "shape": [1], "dtype": "float32", "spec": [None], "size": 1},
        {"name": "layer.kernel", "shape": [4, 1], "dtype": "float32", "spec": [None, None], "size": 4},
    ]


def test_the_report_is_written_after_each_validation(tmp_path):
    found = {}

    def look(step):
        page = tmp_path / "report.html"
        found[step] = page.read_text() if page.exists() else ""

    train(tmp_path, hook=look)
    assert not found[2]
    for step in (3, 5):
        assert '<span class="status running">' in found[step]
        assert f"Step {step - 1} of 6" in found[step]


def test_slow_reports_are_written_more_rarely(tmp_path, monkeypatch):
    times = iter(range(0, 1000, 4))
    monkeypatch.setattr(run_report, "time", SimpleNamespace(monotonic=lambda: next(times)))
    written = []
    monkeypatch.setattr(run_report, "write_report", lambda runs, path: written.append(runs[0].last_step))
    train(tmp_path, num_steps=60)
    assert written[0] == 2
    assert 2 <= len(written) < 5
    assert written[-1] == 60


def test_a_run_that_goes_on_keeps_the_record_of_its_first_start(tmp_path):
    train(tmp_path)
    train(tmp_path)
    assert [start["status"] for start in starts(tmp_path)] == ["success", "success"]


def test_the_report_says_that_a_run_was_interrupted(tmp_path):
    def interrupt(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        train(tmp_path, hook=interrupt)
    assert '<span class="status interrupted">' in (tmp_path / "report.html").read_text()


def test_the_report_says_that_a_run_diverged(tmp_path):
    train(tmp_path, batches=draw_batches(6, bad=[3]))
    assert '<span class="status diverged">' in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_written_is_warned_of_once_and_ends_no_run(tmp_path, caplog):
    for name in ("report.html", "environment.json", "parameters.json"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING, "xlstm_jax"):
        trainer = train(tmp_path)
    assert trainer.global_step == 6
    assert caplog.text.count("The report could not be written; the run goes on.") == 1


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "xlstm_jax"):
        train(None)
    assert list(tmp_path.iterdir()) == []
    assert "report" not in caplog.text


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    trainer = make_regression(tmp_path / "run")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    callback = RunReportConfig().create(trainer)
    callback.on_training_start()
    callback.finalize("success")
    assert not (tmp_path / "run/environment.json").exists()


def test_a_run_that_never_started_does_not_change_the_record(tmp_path):
    train(tmp_path)
    (tmp_path / "report.html").unlink()
    RunReportConfig().create(make_regression(tmp_path)).finalize("error")
    assert starts(tmp_path)[-1]["status"] == "success"
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_reference_that_no_compressor_reaches_is_refused(value):
    with pytest.raises(ConfigError, match=r"references has.*finite and positive"):
        RunReportConfig(references={"gzip": value})
