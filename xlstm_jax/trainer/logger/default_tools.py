"""The default tools of a logger."""

import dataclasses

from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig


def with_default_tools(config: LoggerConfig, *, shows_progress: bool) -> LoggerConfig:
    """Add the default tools to a config.

    Args:
        config: The config of the logger.
        shows_progress: Whether the run displays its progress.

    Returns:
        A config with a file logger, if there is a folder and no tool except the console, and with a console, if
        progress is displayed.
    """
    tools = list(config.log_tools)
    if config.log_path is not None and all(isinstance(tool, ConsoleLoggerConfig) for tool in tools):
        tools.append(FileLoggerConfig())
    if shows_progress and not any(isinstance(tool, ConsoleLoggerConfig) for tool in tools):
        tools.append(ConsoleLoggerConfig())
    return dataclasses.replace(config, log_tools=tools)
