"""A package logger that is left as it was."""

import pytest

from xlstm_jax.trainer.logger.cmd_logging import PACKAGE_LOGGER


@pytest.fixture(autouse=True)
def package_logger(monkeypatch):
    """Give the package's logger its handlers and its level back after each test."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    handlers, level = PACKAGE_LOGGER.handlers[:], PACKAGE_LOGGER.level
    yield PACKAGE_LOGGER
    for handler in set(PACKAGE_LOGGER.handlers) - set(handlers):
        PACKAGE_LOGGER.removeHandler(handler)
        handler.close()
    PACKAGE_LOGGER.setLevel(level)
