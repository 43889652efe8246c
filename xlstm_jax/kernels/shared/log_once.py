"""Log each distinct message once, such as the choice of `auto`."""

import functools
import logging


@functools.cache
def log_once(logger: logging.Logger, message: str) -> None:
    """Log a message, unless it has been logged before."""
    logger.info(message)
