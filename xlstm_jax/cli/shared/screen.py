"""Output of commands: printing to stdout and stderr, and quoting of paths, values and commands."""

import re
import shlex
import signal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.panel import Panel

HYDRA_WORDS = ("true", "false", "null", "inf", "nan")
"""Words that Hydra does not parse as strings, in any letter case."""
WIDEST = 10_000
PANEL_FRAME = 4
"""Columns of the border and padding of a panel."""
CLOSED_STDOUT = 128 + signal.SIGPIPE


class Screen(Console):
    """A console that exits silently with the usual code on a broken pipe."""

    def print_whole(self, content: Any) -> None:
        """Print a table or a panel without breaking numbers, names or paths, even if it is wider than the terminal."""
        unlimited = self.options.update(max_width=WIDEST)
        if isinstance(content, Panel):  # Its reported minimum is its width without line breaks.
            width = Measurement.get(self, unlimited, content.renderable).minimum + PANEL_FRAME
        else:
            width = Measurement.get(self, unlimited, content).minimum
        self.width = max(self.width, width)
        self.print(content)

    def on_broken_pipe(self) -> None:
        """Exit with the code of a broken pipe."""
        try:
            super().on_broken_pipe()  # redirects stdout to the null device
        except SystemExit as stop:
            raise SystemExit(CLOSED_STDOUT) from stop


def print_out(content: Any) -> None:
    """Print to stdout; strings are printed verbatim, without line wrapping or markup."""
    if isinstance(content, str):
        Screen(highlight=False, markup=False, soft_wrap=True).print(content)
    elif content is not None:
        Screen(highlight=False).print_whole(content)


def print_error(message: str) -> None:
    """Print an error message to stderr."""
    Screen(stderr=True, highlight=False, markup=False, soft_wrap=True).print(message)


def describe_error(error: BaseException) -> str:
    """Return the message of an error in one line; the name of its class if the message is empty."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split()) or type(error).__name__


def as_typed(path: Path) -> str:
    """Return a path as a user would type it: relative if it is inside the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def as_value(text: str | Path) -> str:
    """Return a text or a path as the value of a setting, quoted if Hydra would parse it as something else."""
    plain = as_typed(text) if isinstance(text, Path) else text
    if re.fullmatch(r"[A-Za-z_/][A-Za-z0-9_/.:@%+-]*", plain) and plain.lower() not in HYDRA_WORDS:
        return plain
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), plain)
    return f"'{escaped}'"


def as_command(*words: str | Path) -> str:
    """Return an `xlstm-jax` command as a user would type it, quoted for the shell."""
    return shlex.join(["xlstm-jax", *(as_typed(word) if isinstance(word, Path) else word for word in words)])
