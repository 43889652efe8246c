"""The lock on the folder of a run, without which two processes could overwrite each other's checkpoints."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from xlstm_jax.configs import ConfigError
from xlstm_jax.utils.locks import lock

LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs until the context or the process ends. Only the first process of a run locks it.

    On systems and file systems without locks, this does nothing.
    """
    if jax.process_index() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        try:
            lock(file.fileno())
        except BlockingIOError as error:
            raise ConfigError(
                f"Another process trains in {folder}: wait until it has ended, or choose another folder."
            ) from error
        yield
