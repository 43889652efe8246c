"""What commands say, to people and to other programs."""

import shlex
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

CLOSED_STDOUT = 128 + signal.SIGPIPE


class Screen(Console):
    """Leaves with the code of other programs, and without a word, when nobody reads its stdout any longer."""

    def on_broken_pipe(self) -> None:
        """Leave."""
        try:
            super().on_broken_pipe()  # points stdout at nothing
        except SystemExit as stop:
            raise SystemExit(CLOSED_STDOUT) from stop


def show(content: Any) -> None:
    """Print to stdout; the lines of a text are left as long as they are, and its brackets as they are."""
    if content is not None:
        is_text = isinstance(content, str)
        Screen(highlight=False, markup=not is_text, soft_wrap=is_text).print(content)


def complain(message: str) -> None:
    """Print what is wrong to stderr."""
    Screen(stderr=True, highlight=False, markup=False, soft_wrap=True).print(message)


def as_typed(path: Path) -> str:
    """Return a path as one would type it: from the current folder, if it lies there."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def as_command(*words: str | Path) -> str:
    """Return one of our commands as one would type it, whatever spaces and signs are in it."""
    return shlex.join(["xlstm-jax", *(as_typed(word) if isinstance(word, Path) else word for word in words)])
