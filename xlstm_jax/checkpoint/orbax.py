"""Orbax, imported so that it leaves the root logger alone.

It logs through absl, which gives the root logger a handler with its first message, if there is none.
"""

import logging

_HANDLERS = logging.root.handlers[:]

import orbax.checkpoint as ocp  # noqa: E402

__all__ = ["ocp"]

logging.root.handlers[:] = _HANDLERS


def _is_news(record: logging.LogRecord) -> bool:
    """Tell whether a message of Orbax is worth reading: that single arrays are not merged is always so."""
    return "Skipping merge of OCDBT" not in record.getMessage()


logging.getLogger("absl").addFilter(_is_news)
