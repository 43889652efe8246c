"""What commands say, to people and to other programs."""

from pathlib import Path
from typing import Any

from rich.console import Console


def show(content: Any) -> None:
    """Print to stdout; the lines of a text are left as long as they are, and its brackets as they are."""
    if content is not None:
        is_text = isinstance(content, str)
        Console(highlight=False, markup=not is_text, soft_wrap=is_text).print(content)


def complain(message: str) -> None:
    """Print what is wrong to stderr."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(message)


def as_typed(path: Path) -> str:
    """Return a path as one would type it: from the current folder, if it lies there."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
