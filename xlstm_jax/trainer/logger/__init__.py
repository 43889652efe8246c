"""Logging of the metrics and the messages of a run."""

from xlstm_jax.trainer.logger.base_logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig
from xlstm_jax.trainer.logger.mlflow_logger import MLflowLoggerConfig
from xlstm_jax.trainer.logger.tensorboard_logger import TensorBoardLoggerConfig
from xlstm_jax.trainer.logger.wandb_logger import WandBLoggerConfig

__all__ = [
    "ConsoleLoggerConfig",
    "FileLoggerConfig",
    "Logger",
    "LoggerConfig",
    "MLflowLoggerConfig",
    "TensorBoardLoggerConfig",
    "WandBLoggerConfig",
]
