"""Where the numbers and the messages of a run go."""

from xlstm_jax.trainer.logger.base_logger import Logger, LoggerConfig

__all__ = ["Logger", "LoggerConfig"]
