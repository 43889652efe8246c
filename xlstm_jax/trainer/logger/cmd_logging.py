"""Handlers that write the log messages of the package to stdout and to a file.

Everything here changes only the logger `xlstm_jax`; the handlers and the level of the root logger are unchanged. If the
root logger has handlers, messages are propagated to it; if these print to the same stream, messages are not printed
twice.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

LOG_FORMAT = "[%(asctime)s][%(name)s:%(lineno)d][%(levelname)s]{rank} - %(message)s"
PACKAGE_LOGGER = logging.getLogger("xlstm_jax")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _StdoutHandler(logging.Handler):
    """Writes to the current `sys.stdout`, which may be replaced or captured at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        if _root_prints():
            return
        try:
            sys.stdout.write(f"{self.format(record)}\n")
            sys.stdout.flush()
        except Exception:
            self.handleError(record)


class _LogFileHandler(logging.FileHandler):
    """The handler of our log file, as opposed to handlers of users; a failed write is reported once."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Report an error of the file in one line, and an error of a message as usual."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {error.strerror}.\n")


class _ExceptionLogger:
    """Logs an exception, unless it is an interrupt, and calls the previous hook."""

    def __init__(self, previous: Callable[[type[BaseException], BaseException, TracebackType | None], Any]):
        self.previous = previous

    def __call__(
        self, error_type: type[BaseException], error: BaseException, traceback: TracebackType | None, /
    ) -> None:
        if not issubclass(error_type, KeyboardInterrupt):
            PACKAGE_LOGGER.critical("Uncaught exception", exc_info=(error_type, error, traceback))
        self.previous(error_type, error, traceback)


def setup_logging(logfile: str | Path | None = "output.log") -> None:
    """Log the messages of a single process to stdout and append them to a file.

    A second call replaces the file and the format of the first.

    Args:
        logfile: The file, whose folder is created if needed; `None` for stdout only.
    """
    _setup(logfile, rank="", level=get_loglevel())


def setup_logging_multiprocess(logfile: str | Path | None = "output.log", print_level: str = "DEBUG") -> None:
    """Set up logging with the rank in each line; processes other than the first only log errors.

    This initialises the JAX backends, so call `jax.distributed.initialize` first.

    Args:
        logfile: As for `setup_logging`.
        print_level: Messages below this level are written to the file only.
    """
    rank = jax.process_index()
    _setup(logfile, rank=f"[R{rank}]", level=get_loglevel() if rank == 0 else "ERROR", print_level=print_level)


def get_loglevel() -> str:
    """Return the level in the environment variable `LOGLEVEL`, `INFO` if it is not set."""
    level = os.environ.get("LOGLEVEL", "INFO").upper()
    if level not in LEVELS:
        raise ValueError(f"LOGLEVEL is {level!r}: choose from {', '.join(LEVELS)}.")
    return level


def setup_exception_logging() -> None:
    """Log uncaught exceptions: wrap `sys.excepthook`. The package never calls this itself."""
    if not isinstance(sys.excepthook, _ExceptionLogger):
        sys.excepthook = _ExceptionLogger(sys.excepthook)


def _setup(logfile: str | Path | None, *, rank: str, level: str, print_level: str = "DEBUG") -> None:
    handlers: list[logging.Handler] = [_StdoutHandler(print_level)]
    if logfile is not None:
        Path(logfile).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFileHandler(logfile, encoding="utf-8"))
    for handler in PACKAGE_LOGGER.handlers[:]:
        if isinstance(handler, _StdoutHandler | _LogFileHandler):
            PACKAGE_LOGGER.removeHandler(handler)
            handler.close()
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT.format(rank=rank)))
        PACKAGE_LOGGER.addHandler(handler)
    PACKAGE_LOGGER.setLevel(level)
    if not logging.getLogger().handlers:
        # The first message of absl, which Orbax uses, adds a handler to the root logger that would print ours too.
        PACKAGE_LOGGER.propagate = False


def _root_prints() -> bool:
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
    # During a live display, rich replaces each stream by a proxy.
    printed = [sys.stdout, sys.stderr, *(getattr(x, "rich_proxied_file", x) for x in (sys.stdout, sys.stderr))]
    return PACKAGE_LOGGER.propagate and any(stream in printed for stream in streams if stream)
