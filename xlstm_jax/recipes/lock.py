"""One process to a folder: two that train in one would write over each other's checkpoints."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from xlstm_jax.configs import ConfigError

LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. The lock ends with the process too; where a system has none, there is none."""
    try:
        import fcntl
    except ImportError:
        fcntl = None
    if fcntl is None or jax.process_index() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another process trains in {folder}: wait until it has ended, or choose another folder."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
