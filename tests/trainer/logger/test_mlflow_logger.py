"""MLflow gets each mode over the step of training, in one run. A stand-in plays its part."""

import collections
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from xlstm_jax.trainer.logger import Logger, LoggerConfig, MLflowLoggerConfig, mlflow_logger

Metric = collections.namedtuple("Metric", "key value timestamp step")
Param = collections.namedtuple("Param", "key value")


class Server:
    """Keeps what clients send."""

    def __init__(self):
        self.experiments, self.runs, self.uris = {}, {}, []
        self.error, self.is_open = None, threading.Event()
        self.is_open.set()

    def client(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name, artifact_location):
        self.experiments[name] = SimpleNamespace(experiment_id=name, artifact_location=artifact_location)
        return name

    def create_run(self, experiment_id, run_name, tags):
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = SimpleNamespace(
            experiment_id=experiment_id, name=run_name, tags=tags, statuses=[], metrics=[], params={}
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id, status):
        self.runs[run_id].statuses.append(status)

    set_terminated = update_run

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) + len(params) <= 100
        self.is_open.wait(60)
        if self.error is not None:
            raise self.error
        self.runs[run_id].metrics += [(metric.key, metric.value, metric.step) for metric in metrics]
        for key, value in params:
            assert self.runs[run_id].params.setdefault(key, value) == value


@pytest.fixture
def server(monkeypatch):
    """What takes the place of MLflow."""
    server = Server()
    module = ModuleType("mlflow")
    module.MlflowClient = server.client
    module.entities = SimpleNamespace(Metric=Metric, Param=Param)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "sqlalchemy", ModuleType("sqlalchemy"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return server


def make(path=None, **settings):
    return Logger(LoggerConfig(log_path=path, log_tools=[MLflowLoggerConfig(**settings)]))


def test_numbers_have_the_names_of_their_mode(server):
    logger = make(tracking_uri="http://here")
    logger.on_training_start()
    logger.log_host_metrics({"loss": 0.5, "text": "x", "values": np.ones(3)}, 20, mode="train")
    logger.log_host_metrics({"loss": 2, "acc(%)": 1.0}, 20, mode="a,b/c")
    logger.finalize("success")
    (run,) = server.runs.values()
    assert run.metrics == [("train/loss", 0.5, 20), ("a_b/c/loss", 2.0, 20), ("a_b/c/acc___", 1.0, 20)]
    assert run.statuses == ["FINISHED"]


def test_metrics_before_the_start_begin_the_run(server):
    logger = make(tracking_uri="http://here")
    logger.log_host_metrics({"loss": 0.5}, 1, mode="train")
    logger.on_training_start()
    logger.finalize("success")
    (run,) = server.runs.values()
    assert run.metrics == [("train/loss", 0.5, 1)]


@pytest.mark.parametrize(
    ("status", "of_mlflow"),
    [("success", "FINISHED"), ("nan", "FAILED"), ("error", "FAILED"), ("interrupted", "KILLED")],
)
def test_the_run_ends_with_its_status(server, status, of_mlflow):
    logger = make(tracking_uri="http://here")
    logger.on_training_start()
    logger.finalize(status)
    assert server.runs["run-0"].statuses == [of_mlflow]


def test_a_second_training_run_goes_on_with_the_same_run(server):
    logger = make(tracking_uri="http://here")
    logger.log_config({"logger": logger.config})
    for step in [1, 2]:
        logger.on_training_start()
        logger.log_host_metrics({"loss": 0.5}, step, mode="train")
        logger.finalize("success")
    (run,) = server.runs.values()
    assert [step for *_, step in run.metrics] == [1, 2]
    assert run.statuses == ["FINISHED", "RUNNING", "FINISHED"]


def test_many_metrics_go_in_several_requests(server):
    logger = make(tracking_uri="http://here")
    logger.log_host_metrics({f"norm_{i}": float(i) for i in range(250)}, 1, mode="train")
    logger.finalize("success")
    assert len(server.runs["run-0"].metrics) == 250


def test_the_first_value_of_each_parameter_stays(server, caplog):
    logger = make(tracking_uri="http://here")
    logger.log_config({"a": LoggerConfig(cmd_logging_name="x" * 7000)})
    logger.on_training_start()
    logger.log_config({"a": LoggerConfig(), "b": LoggerConfig(log_every_n_steps=2)})
    logger.finalize("success")
    params = server.runs["run-0"].params
    assert params["a.cmd_logging_name"] == "x" * 6000
    assert params["b.log_every_n_steps"] == "2"
    assert not any("failed" in message for message in caplog.messages)


def test_the_settings_describe_the_run(server):
    settings = {"experiment_name": "e", "run_name": "n", "tags": {"k": "v"}}
    for _ in range(2):
        make(tracking_uri="http://here", **settings).on_training_start()
    assert server.experiments.keys() == {"e"}
    assert server.experiments["e"].artifact_location is None
    for run in server.runs.values():
        assert (run.experiment_id, run.name, run.tags) == ("e", "n", {"k": "v"})


def test_without_a_server_there_is_a_database_in_the_folder(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(Path("run")).on_training_start()
    folder = tmp_path / "run" / "mlflow"
    assert server.uris == [f"sqlite:///{folder}/mlflow.db"]
    assert folder.is_dir()
    assert server.experiments["xlstm_jax"].artifact_location == f"file://{folder}/artifacts"


def test_the_environment_may_name_the_server(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    make().on_training_start()
    make(tracking_uri="http://here").on_training_start()
    assert server.uris == ["http://there", "http://here"]


def test_a_place_to_log_to_is_needed(server):
    with pytest.raises(ValueError, match="tracking_uri"):
        make()


def test_training_does_not_wait_for_a_slow_server(server):
    logger = make(tracking_uri="http://here")
    server.is_open.clear()
    for step in [1, 2]:
        logger.log_host_metrics({"loss": 0.5}, step, mode="train")
    assert server.runs["run-0"].metrics == []
    server.is_open.set()
    logger.finalize("success")
    assert len(server.runs["run-0"].metrics) == 2


def test_a_server_that_does_not_answer_is_left_in_the_end(server, monkeypatch, caplog):
    monkeypatch.setattr(mlflow_logger, "LAST_SECONDS", 0.01)
    logger = make(tracking_uri="http://here")
    server.is_open.clear()
    logger.log_host_metrics({"loss": 0.5}, 1, mode="train")
    logger.finalize("success")
    server.is_open.set()
    assert server.runs["run-0"].statuses == ["FINISHED"]
    assert "TimeoutError" in caplog.text


def test_what_goes_wrong_in_the_thread_is_reported_by_the_next_row(server, caplog):
    logger = make(tracking_uri="http://here")
    server.error = ConnectionError("No network.")
    logger.log_host_metrics({"loss": 0.5}, 1, mode="train")
    wait(logger.log_tools[0]._pending, timeout=60)
    logger.log_host_metrics({"loss": 0.5}, 2, mode="train")
    assert "No network." in caplog.text


def test_what_goes_wrong_in_the_thread_is_reported_at_the_end(server, caplog):
    logger = make(tracking_uri="http://here")
    server.error = ConnectionError("No network.")
    server.is_open.clear()
    logger.log_host_metrics({"loss": 0.5}, 1, mode="train")
    assert "No network." not in caplog.text
    server.is_open.set()
    logger.finalize("success")
    assert "No network." in caplog.text
    assert server.runs["run-0"].statuses == ["FINISHED"]


def test_a_run_that_cannot_start_is_tried_once_for_each_training_run(server, monkeypatch):
    logger = make(tracking_uri="http://here")
    attempts = []
    monkeypatch.setattr(server, "create_run", lambda *args, **kwargs: attempts.append(1) or 1 / 0)
    logger.on_training_start()
    logger.log_host_metrics({"loss": 0.5}, 1, mode="train")
    logger.finalize("success")
    assert len(attempts) == 1
    monkeypatch.undo()
    logger.on_training_start()


def test_a_missing_mlflow_is_reported_at_once(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"xlstm_jax\[mlflow\]"):
        make(tracking_uri="http://here")
