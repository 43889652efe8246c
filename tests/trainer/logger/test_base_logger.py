"""The logger logs in time, under the right mode, and finds every NaN."""

import dataclasses
import logging
import math
import time

import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerTool, LoggerToolsConfig
from xlstm_jax.trainer.metrics import update_metrics


class Recorder(LoggerTool):
    """Keeps what it is told."""

    def __init__(self):
        self.calls = []
        self.rows = []

    def log_config(self, config):
        self.calls.append(("log_config", config))

    def setup(self):
        self.calls.append(("setup",))

    def log_metrics(self, metrics, step, epoch, mode):
        self.rows.append((mode, epoch, step, metrics))

    def finalize(self, status):
        self.calls.append(("finalize", status))


@dataclasses.dataclass(kw_only=True, frozen=False)
class RecorderConfig(LoggerToolsConfig):
    """Asks for a recorder."""

    def create(self, logger):
        return Recorder()


@dataclasses.dataclass(kw_only=True, frozen=False)
class SilentConfig(LoggerToolsConfig):
    """Asks for a tool that overrides no hook."""

    def create(self, logger):
        return LoggerTool()


class Broken(LoggerTool):
    """Fails in every hook with the errors that it is given, one after the other."""

    def __init__(self, errors):
        self.errors = iter(errors)

    def fail(self, *args, **kwargs):
        raise next(self.errors)

    log_config = setup = drop_after = log_metrics = finalize = fail


def make(postprocess=None, every=1):
    logger = Logger(LoggerConfig(log_every_n_steps=every, log_tools=[RecorderConfig()]), postprocess)
    return logger, logger.log_tools[0]


def metrics_of(value, metrics=None):
    return update_metrics(metrics, {"loss": {"value": value, "count": 2}})


def test_metrics_are_logged_every_n_steps_and_start_anew():
    logger, recorder = make(every=2)
    logger.start_epoch(1, 0)
    metrics = None
    for step in range(1, 6):
        metrics = logger.log_step(metrics_of(float(step), metrics), step)
    assert [(mode, epoch, step) for mode, epoch, step, _ in recorder.rows] == [("train", 1, 2), ("train", 1, 4)]
    assert [row["loss"] for *_, row in recorder.rows] == [3 / 4, 7 / 4]
    assert [row["epoch"] for *_, row in recorder.rows] == [1, 1]
    assert metrics["loss"]["mean_nopostfix"]["value"] == 5


def test_metrics_that_are_not_logged_come_back_as_they_are():
    logger, recorder = make(every=10)
    metrics = metrics_of(1.0)
    assert logger.log_step(metrics, 3) is metrics
    assert recorder.rows == []


def test_an_epoch_within_another_has_its_own_mode_and_index():
    logger, recorder = make()
    modes = [logger.mode]
    for start in [(2, 10, "train"), (7, 10, "val")]:
        logger.start_epoch(*start)
        modes.append(logger.mode)
    for _ in range(2):
        logger.end_epoch(metrics_of(1.0), 10)
        modes.append(logger.mode)
    assert modes == ["default", "train", "val", "train", "default"]
    assert [row[:3] for row in recorder.rows] == [("val", 7, 10), ("train", 2, 10)]


def test_a_training_epoch_ends_with_its_time_only():
    logger, recorder = make()
    logger.start_epoch(1, 0)
    metrics = metrics_of(1.0)
    returned, host_metrics = logger.end_epoch(metrics, 4)
    assert returned is metrics
    assert host_metrics.keys() == {"epoch_time"}
    assert recorder.rows == [("train", 1, 4, host_metrics)]


@pytest.mark.parametrize("mode", ["val", "test", "some_task"])
def test_other_epochs_end_with_their_metrics(mode):
    logger, recorder = make(lambda metrics: {**metrics, "perplexity": math.exp(metrics["loss"])})
    logger.start_epoch(1, 0, mode)
    metrics = metrics_of(1.0)
    returned, host_metrics = logger.end_epoch(metrics, 4)
    assert returned is metrics
    assert host_metrics.keys() == {"loss", "perplexity", "epoch_time"}
    assert host_metrics["perplexity"] == pytest.approx(math.exp(0.5))
    assert recorder.rows == [(mode, 1, 4, host_metrics)]


def test_an_epoch_without_batches_ends_with_its_time():
    logger, _ = make()
    logger.start_epoch(1, 0, "val")
    returned, host_metrics = logger.end_epoch(None, 0)
    assert returned is None
    assert host_metrics.keys() == {"epoch_time"}


def test_an_epoch_that_was_not_started_cannot_end():
    with pytest.raises(ValueError, match="start_epoch"):
        make()[0].end_epoch(None, 0)


def test_step_time_is_the_mean_since_the_last_log(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    logger, recorder = make(every=2)
    logger.start_epoch(1, 10)
    for step, seconds in [(11, 1.0), (12, 2.0), (13, 0.5), (14, 0.5)]:
        now[0] += seconds
        logger.log_step(metrics_of(1.0), step)
    assert [row["step_time"] for *_, row in recorder.rows] == [1.5, 0.5]


def test_step_time_does_not_count_a_validation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    logger, recorder = make(every=2)
    logger.start_epoch(1, 0)
    for step in [1, 2]:
        now[0] += 3
        logger.log_step(metrics_of(1.0), step)
        logger.start_epoch(1, step, "val")
        now[0] += 60
        logger.end_epoch(None, step)
    assert [row["step_time"] for mode, *_, row in recorder.rows if mode == "train"] == [3]


def test_step_time_counts_only_what_the_clock_of_steps_counts(monkeypatch):
    now = [0.0]
    logger, recorder = make()
    logger.step_clock = lambda: now[0]
    logger.start_epoch(1, 0)
    now[0] += 2
    logger.log_step(metrics_of(1.0), 1)
    assert [row["step_time"] for *_, row in recorder.rows] == [2]


def test_step_time_does_not_count_what_came_before_the_timer_was_restarted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    logger, recorder = make(every=3)
    logger.start_epoch(1, 0)
    for step, seconds in [(1, 60.0), (2, 1.0), (3, 2.0)]:
        now[0] += seconds
        if step == 1:
            logger.restart_timer(step)
        logger.log_step(metrics_of(1.0), step)
    assert [row["step_time"] for *_, row in recorder.rows] == [1.5]


def test_host_metrics_go_to_the_mode_that_is_asked_for():
    logger, recorder = make()
    logger.log_host_metrics({"num_params": 3}, 0, mode="model")
    logger.start_epoch(2, 5)
    logger.log_host_metrics({"lr": 0.1}, 5)
    assert recorder.rows == [("model", 0, 0, {"num_params": 3}), ("train", 2, 5, {"lr": 0.1})]


@pytest.mark.parametrize("number", [np.float32(0.5), np.array([0.5]), jnp.float32(0.5), jnp.bfloat16(0.5)])
def test_tools_get_scalars_as_python_numbers(number):
    logger, recorder = make()
    logger.log_host_metrics({"x": number}, 0)
    ((*_, row),) = recorder.rows
    assert type(row["x"]) is float
    assert row["x"] == 0.5


NANS = {
    "python": math.nan,
    "numpy": np.float32("nan"),
    "jax": jnp.float32(math.nan),
    "bfloat16": jnp.bfloat16(math.nan),
    "array": np.array([1.0, math.nan]),
    "value and count": (np.array([math.nan]), np.array([1])),
}


@pytest.mark.parametrize("nan", NANS.values(), ids=NANS.keys())
def test_a_nan_of_any_type_is_found(nan, caplog):
    logger, recorder = make(lambda metrics: {**metrics, "broken": nan})
    logger.start_epoch(1, 0)
    logger.log_step(metrics_of(1.0), 1)
    assert logger.found_nans
    assert "Found NaN at step 1 in: broken." in caplog.messages
    assert len(recorder.rows) == 1


@pytest.mark.parametrize("value", [math.inf, 3, "text", None, np.array(["text"]), np.array([1, 2])])
def test_what_is_no_nan_is_not_taken_for_one(value):
    logger, _ = make(lambda metrics: {**metrics, "fine": value})
    logger.log_step(metrics_of(1.0), 1)
    assert not logger.found_nans


def test_a_nan_on_the_device_is_found_and_forgotten_by_the_next_run():
    logger, _ = make()
    logger.log_step(metrics_of(math.nan), 1)
    assert logger.found_nans
    logger.on_training_start()
    assert not logger.found_nans


def test_tools_hear_of_configs_starts_and_ends():
    logger, recorder = make()
    config = LoggerConfig()
    logger.log_config({"trainer": config})
    logger.on_training_start()
    logger.start_epoch(1, 0)
    logger.finalize("nan")
    assert recorder.calls == [("log_config", {"trainer": config}), ("setup",), ("finalize", "nan")]
    assert logger.mode == "default"


def test_a_tool_needs_none_of_the_hooks():
    logger = Logger(LoggerConfig(log_tools=[SilentConfig()]))
    logger.log_config(LoggerConfig())
    logger.on_training_start()
    logger.log_host_metrics({"x": 1}, 0)
    logger.finalize("success")


def test_tools_drop_later_steps_before_they_are_set_up(monkeypatch):
    logger, recorder = make()
    monkeypatch.setattr(recorder, "drop_after", lambda step: recorder.calls.append(("drop_after", step)), raising=False)
    logger.on_training_start()
    logger.on_training_start(step=30)
    assert recorder.calls == [("setup",), ("drop_after", 30), ("setup",)]


def test_a_tool_that_fails_stops_neither_the_run_nor_other_tools(caplog):
    logger, recorder = make()
    logger.log_tools.insert(0, Broken([OSError("The disk is full.")] * 5))
    logger.log_config(LoggerConfig())
    logger.on_training_start(3)
    logger.log_host_metrics({"loss": 1.0}, 4)
    logger.finalize("success")
    assert len(recorder.rows) == 1
    assert [call[0] for call in recorder.calls] == ["log_config", "setup", "finalize"]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "Broken failed" in warnings[0].getMessage()
    assert "The disk is full." in caplog.text


def test_a_failure_is_reported_once_for_each_kind_and_tool(caplog):
    logger, _ = make()
    logger.log_tools = [
        Broken([OSError(), OSError(), TypeError(), OSError(), TypeError()]),
        Broken([OSError(), OSError(), OSError(), OSError(), OSError()]),
    ]
    for step in range(5):
        logger.log_host_metrics({}, step)
    assert sum("Broken failed" in message for message in caplog.messages) == 3


def test_an_interrupt_in_a_tool_ends_the_run():
    logger, _ = make()
    logger.log_tools = [Broken([KeyboardInterrupt()])]
    with pytest.raises(KeyboardInterrupt):
        logger.log_host_metrics({}, 1)


def test_the_first_process_alone_has_tools(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    logger = Logger(LoggerConfig(log_tools=[RecorderConfig()]))
    assert logger.log_tools == []
    logger.log_step(metrics_of(math.nan), 1)
    assert logger.found_nans


def test_the_documented_lines_are_logged(caplog):
    logger, _ = make()
    logger.start_epoch(3, 20)
    logger.log_step(metrics_of(1.0), 21)
    logger.start_epoch(3, 21, "val")
    assert caplog.messages == [
        "Starting epoch 3 at step 20 in mode train.",
        "Logging at step 21 in epoch 3 in mode train",
        "Starting epoch 3 at step 21 in mode val.",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_messages_go_to_the_folder_of_the_run(tmp_path):
    config = LoggerConfig(log_path=tmp_path / "a" / "b", cmd_logging_name="messages")
    Logger(config).start_epoch(1, 0)
    (line,) = (tmp_path / "a" / "b" / "messages.log").read_text().splitlines()
    assert line.endswith("[INFO][R0] - Starting epoch 1 at step 0 in mode train.")
    assert config.log_dir == (tmp_path / "a" / "b").as_posix()


def test_without_a_folder_no_file_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logger = Logger(LoggerConfig(print_level="INFO"))
    logger.start_epoch(1, 0)
    assert logger.log_path is None
    assert LoggerConfig().log_dir == ""
    assert list(tmp_path.iterdir()) == []
    assert "Starting epoch 1" in capsys.readouterr().out


def test_only_warnings_are_printed_by_default(tmp_path, capsys):
    Logger(LoggerConfig(log_path=tmp_path)).start_epoch(1, 0)
    logging.getLogger("xlstm_jax.trainer").warning("printed")
    shown = capsys.readouterr().out
    assert "printed" in shown
    assert "Starting epoch" not in shown
    assert "Starting epoch" in (tmp_path / "output.log").read_text()


@pytest.mark.parametrize("every", [0, -1])
def test_steps_between_logs_are_positive(every):
    with pytest.raises(ConfigError, match="1 or more"):
        LoggerConfig(log_every_n_steps=every)
