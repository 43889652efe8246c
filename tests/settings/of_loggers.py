"""Settings of loggers, observed in files, or in what the libraries of tools are asked for."""

import io
from types import SimpleNamespace

from rich.console import Console
from settings.cases import Recorder, World, cases

from xlstm_jax.configs import ConfigDict
from xlstm_jax.trainer.logger import base_logger, mlflow_logger, tensorboard_logger, wandb_logger
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLogger, ConsoleLoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig
from xlstm_jax.trainer.logger.mlflow_logger import MLflowLoggerConfig
from xlstm_jax.trainer.logger.tensorboard_logger import TensorBoardLoggerConfig
from xlstm_jax.trainer.logger.wandb_logger import WandBLoggerConfig

METRICS = {"loss": 1.5, "bits_per_byte": 2.0}


def build_logger(config, world: World):
    """Return when a logger logs, with which tools, and where messages go."""
    world.monkeypatch.chdir(world.folder)
    called = Recorder()
    world.monkeypatch.setattr(base_logger, "setup_logging_multiprocess", called.messages)
    logger = Logger(config)
    due = [step for step in range(1, 9) if logger.is_due(step)]
    return due, logger.log_path, [type(tool).__name__ for tool in logger.log_tools], called.calls


def use_tool(tool) -> None:
    """Log a config and a row."""
    tool.log_config({"trainer": ConfigDict()})
    tool.setup()
    tool.log_metrics(METRICS, step=3, epoch=1, mode="val")
    tool.finalize("success")


def write_files(config, world: World):
    """Return the files of a logger."""
    use_tool(config.create(SimpleNamespace(log_path=world.folder, monitored_names=set())))
    return {file.relative_to(world.folder): file.read_bytes() for file in sorted(world.folder.rglob("*.*"))}


def show_progress(config, world: World):
    """Return what a console shows."""
    del world
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    tool = ConsoleLogger(config, None, console)
    use_tool(tool)
    return tool.is_live, console.file.getvalue()


def call_library(module):
    """Return an observation of what the library behind a tool is asked for."""

    def observe(config, world: World):
        names = dict.fromkeys(("base_url", "api_key", "start_method", "mode"))
        library = Recorder(answers={"Settings.model_fields": names})
        world.monkeypatch.setattr(module, "import_extra", lambda *_, **__: library)
        world.monkeypatch.setattr("time.time_ns", lambda: 0)
        world.monkeypatch.setattr("time.time", lambda: 0.0)
        world.monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        use_tool(config.create(SimpleNamespace(log_path=world.folder, monitored_names=set())))
        return library.calls

    return observe


CASES = [
    *cases(
        LoggerConfig,
        build_logger,
        {"log_path": "run"},
        log_every_n_steps=3,
        log_path=None,
        log_tools=[FileLoggerConfig()],
        cmd_logging_name="messages",
        print_level="ERROR",
    ),
    *cases(
        FileLoggerConfig,
        write_files,
        {},
        log_step_key="step",
        log_epoch_key="epoch",
        config_format="yaml",
        log_dir="elsewhere",
    ),
    *cases(ConsoleLoggerConfig, show_progress, {}, live=False, references={"xz": 1.5}),
    *cases(
        TensorBoardLoggerConfig,
        call_library(tensorboard_logger),
        {},
        tb_flush_secs=3,
        tb_max_queue=3,
        tb_new_style=True,
        log_dir="elsewhere",
    ),
    *cases(
        WandBLoggerConfig,
        call_library(wandb_logger),
        {},
        wb_entity="me",
        wb_project="mine",
        wb_host="https://here",
        wb_key="secret",
        wb_name="name",
        wb_notes="notes",
        wb_settings={"mode": "offline"},
        wb_tags=["tag"],
        wb_resume_id="id",
        log_dir="elsewhere",
    ),
    *cases(
        MLflowLoggerConfig,
        call_library(mlflow_logger),
        {},
        tracking_uri="http://here",
        experiment_name="mine",
        run_name="name",
        tags={"a": "b"},
        log_dir="elsewhere",
    ),
]
