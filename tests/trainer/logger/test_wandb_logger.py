"""Weights & Biases gets each mode over the step of training, in one run. A stand-in plays its part."""

import sys
from types import ModuleType

import numpy as np
import pytest

from xlstm_jax.trainer.logger import Logger, LoggerConfig, WandBLoggerConfig


class Settings:
    """Refuses what it does not know."""

    model_fields = ("base_url", "api_key", "init_timeout")

    def __init__(self, **settings):
        assert settings.keys() <= set(self.model_fields)
        self.given = settings


class Config(dict):
    """Takes the argument that changed values need."""

    def update(self, values, allow_val_change):
        assert allow_val_change
        super().update(values)


class Run:
    """Keeps what it is told."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.id = arguments["id"] or "new-id"
        self.config = Config(arguments["config"])
        self.step_metrics, self.rows, self.exit_code = {}, [], None

    def define_metric(self, name, step_metric=None):
        self.step_metrics[name] = step_metric

    def log(self, row):
        assert self.exit_code is None
        self.rows.append(row)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A module with the parts of `wandb` that are used."""
    module = ModuleType("wandb")
    module.runs, module.attempts, module.error = [], 0, None

    def init(**arguments):
        module.attempts += 1
        if module.error is not None:
            raise module.error
        module.runs.append(Run(arguments))
        return module.runs[-1]

    module.init, module.Settings = init, Settings
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def make(path=None, **settings):
    return Logger(LoggerConfig(log_path=path, log_tools=[WandBLoggerConfig(**{"wb_settings": {}, **settings})]))


def test_modes_of_one_step_do_not_collide(wandb):
    logger = make()
    logger.on_training_start()
    logger.log_host_metrics({"loss": 0.5, "text": "x", "values": np.ones(3)}, 20, mode="train")
    logger.log_host_metrics({"loss": 0.7}, 20, mode="val")
    logger.log_host_metrics({"acc": 0.1}, 10, mode="task")
    (run,) = wandb.runs
    assert run.rows == [
        {"train/loss": 0.5, "step": 20},
        {"val/loss": 0.7, "step": 20},
        {"task/acc": 0.1, "step": 10},
    ]
    assert run.step_metrics == {"step": None, "*": "step"}


def test_metrics_before_the_start_begin_the_run(wandb):
    logger = make()
    logger.log_host_metrics({"loss": 0.5}, 1, mode="train")
    logger.on_training_start()
    assert [run.rows for run in wandb.runs] == [[{"train/loss": 0.5, "step": 1}]]


def test_a_second_training_run_goes_on_with_the_same_run(wandb):
    logger = make()
    for step, status in enumerate(["nan", "success"]):
        logger.on_training_start()
        logger.log_host_metrics({"loss": 0.5}, step, mode="train")
        logger.finalize(status)
    first, second = wandb.runs
    assert (first.arguments["id"], first.arguments["resume"]) == (None, None)
    assert (second.arguments["id"], second.arguments["resume"]) == (first.id, "allow")
    assert (first.exit_code, second.exit_code) == (1, 0)


def test_the_settings_describe_the_run(wandb, tmp_path):
    settings = {"wb_entity": "e", "wb_project": "p", "wb_name": "n", "wb_notes": "o", "wb_tags": ["t"]}
    logger = make(tmp_path, **settings, wb_resume_id="old", wb_host="https://here", wb_key="secret")
    logger.on_training_start()
    (run,) = wandb.runs
    described = {f"wb_{name}": run.arguments[name] for name in ["entity", "project", "name", "notes", "tags"]}
    assert described == settings
    assert (run.arguments["id"], run.arguments["resume"]) == ("old", "allow")
    assert run.arguments["dir"] == str(tmp_path / "wandb")
    assert (tmp_path / "wandb").is_dir()
    assert run.arguments["settings"].given == {"base_url": "https://here", "api_key": "secret"}


def test_the_public_host_leaves_the_choice_to_the_machine(wandb):
    make().on_training_start()
    assert wandb.runs[0].arguments["settings"].given == {}


def test_settings_that_this_wandb_does_not_have_are_left_out_with_a_warning(wandb, caplog):
    make(wb_settings={"start_method": "fork", "init_timeout": 3}).on_training_start()
    assert wandb.runs[0].arguments["settings"].given == {"init_timeout": 3}
    assert any("start_method" in message for message in caplog.messages)


def test_configs_before_and_after_the_start_reach_the_run(wandb):
    logger = make()
    logger.log_config({"first": LoggerConfig()})
    logger.on_training_start()
    (run,) = wandb.runs
    assert run.arguments["config"]["first"]["log_every_n_steps"] == 1
    logger.log_config({"second": LoggerConfig(log_every_n_steps=2)})
    assert run.config["second"]["log_every_n_steps"] == 2


def test_the_key_is_in_no_log(wandb):
    config = WandBLoggerConfig(wb_key="secret")
    assert "secret" not in repr(config)
    assert "secret" not in str(LoggerConfig(log_tools=[config]).to_dict())


def test_a_run_that_cannot_start_is_tried_once_for_each_training_run(wandb):
    wandb.error = OSError("No network.")
    logger = make()
    logger.on_training_start()
    for step in range(3):
        logger.log_host_metrics({"loss": 0.5}, step, mode="train")
    logger.finalize("success")
    assert wandb.attempts == 1
    wandb.error = None
    logger.on_training_start()
    logger.log_host_metrics({"loss": 0.5}, 3, mode="train")
    assert [run.rows for run in wandb.runs] == [[{"train/loss": 0.5, "step": 3}]]


def test_a_missing_wandb_is_reported_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"xlstm_jax\[wandb\]"):
        make()
