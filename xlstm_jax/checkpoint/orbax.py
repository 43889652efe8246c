"""Orbax, imported so that it does not change the root logger.

Orbax logs through absl, which adds a handler to a root logger without handlers at its first message.
"""

import logging
from typing import Any

_HANDLERS = logging.root.handlers[:]

import orbax.checkpoint as ocp  # noqa: E402

__all__ = ["CheckpointManager", "ocp"]

logging.root.handlers[:] = _HANDLERS


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a message of Orbax is relevant to users.

    The message that single arrays are not merged is always logged, so it is dropped. An error in a writer thread is
    raised again in the main thread, where `CheckpointStore` explains it.
    """
    is_raised_again = record.levelno >= logging.ERROR and bool(record.exc_info)
    return not is_raised_again and "Skipping merge of OCDBT" not in record.getMessage()


logging.getLogger("absl").addFilter(_is_news)


class CheckpointManager(ocp.CheckpointManager):
    """Orbax's manager that does not read metrics: a corrupt metrics file would keep it from listing any checkpoint."""

    def metrics(self, step: int) -> Any:  # noqa: ARG002
        """Return nothing: the store reads metrics itself, and verifies them."""
        return None
