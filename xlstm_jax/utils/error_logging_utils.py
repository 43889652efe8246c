"""A decorator that logs exceptions before they end a program."""

import functools
import logging
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def with_error_handling(
    flush_output: bool = True, logger: logging.Logger | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that logs exceptions of a function and re-raises them.

    Interrupts and `sys.exit` are logged too.

    Args:
        flush_output: Whether to flush stdout and stderr when the function returns or raises.
        logger: The logger for the message and the traceback. Without one, the traceback is printed to stderr.

    Returns:
        The decorator.
    """

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                _report(error, function.__name__, logger)
                raise
            finally:
                if flush_output:
                    sys.stdout.flush()
                    sys.stderr.flush()

        return wrapper

    return decorator


def _report(error: BaseException, function_name: str, logger: logging.Logger | None) -> None:
    if logger is None:
        traceback.print_exception(error)
        return
    logger.error("%s raised %s: %s", function_name, type(error).__name__, error)
    logger.error("".join(traceback.format_exception(error)))
