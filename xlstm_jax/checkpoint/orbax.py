"""Orbax, imported so that it leaves the root logger alone.

It logs through absl, which gives the root logger a handler with its first message, if there is none.
"""

import logging
from typing import Any

_HANDLERS = logging.root.handlers[:]

import orbax.checkpoint as ocp  # noqa: E402

__all__ = ["CheckpointManager", "ocp"]

logging.root.handlers[:] = _HANDLERS


def _is_news(record: logging.LogRecord) -> bool:
    """Tell whether a message of Orbax is worth reading.

    That single arrays are not merged is always so. An error of a thread that writes is raised again in the main thread,
    where `CheckpointStore` says what it means.
    """
    is_raised_again = record.levelno >= logging.ERROR and bool(record.exc_info)
    return not is_raised_again and "Skipping merge of OCDBT" not in record.getMessage()


logging.getLogger("absl").addFilter(_is_news)


class CheckpointManager(ocp.CheckpointManager):
    """Orbax's manager without a look into metrics, whose damage would keep it from listing any checkpoint."""

    def metrics(self, step: int) -> Any:  # noqa: ARG002
        """Return nothing: the store reads metrics itself, and verifies them."""
        return None
