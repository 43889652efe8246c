"""Cleanup of the folder of a run that is rejected before it has started."""

import contextlib
import shutil
from pathlib import Path
from types import TracebackType

import jax

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.lock import LOCK_FILE


def make_folder(folder: Path) -> None:
    """Create the folder of a run.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be made ({error.strerror}): choose another one.") from error


class RejectedFolder:
    """A context that removes the folder of a new run if an error ends it before `keep` is called.

    Ctrl-C does not count as an error, as an interrupted run can be resumed. Files that existed before `own` was called
    are never removed.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._before: set[Path] | None = None

    def own(self) -> None:
        """Treat all files added from now on as part of the run; call it when the folder is locked."""
        self._before = set(self._folder.iterdir()) - {self._folder / LOCK_FILE}

    def keep(self) -> None:
        """Keep the files, as a resumed run can use them."""
        self._before = None

    def __enter__(self) -> "RejectedFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or not self._folder.is_dir() or jax.process_index() != 0:
            return
        if self._before is not None:
            for path in set(self._folder.iterdir()) - self._before:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        here = Path.cwd()
        around = [folder for folder in self._folder.parents if folder != here and folder.is_relative_to(here)]
        with contextlib.suppress(OSError):
            for folder in (self._folder, *around):
                folder.rmdir()  # Fails if the folder is not empty.
