"""Atomic writes to local files."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: str | Iterable[bytes], *, durable: bool = True) -> None:
    """Write a file atomically: readers see either the complete old file or the complete new one, also after a crash.

    Args:
        path: The file. Its folder is created if it does not exist.
        content: A string, which is encoded as UTF-8, or chunks of bytes.
        durable: Flush the file to disk first. Otherwise, a crash of the machine can lose the content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines([content.encode()] if isinstance(content, str) else content)
    if durable:
        move_into_place(temporary, path)
    else:
        temporary.replace(path)


def move_into_place(temporary: Path, path: Path) -> None:
    """Flush a complete temporary file to the disk, then rename it to its final path in the same folder."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
