"""A run that is rejected before anything was made for it leaves no folder behind."""

import contextlib
import shutil
from pathlib import Path
from types import TracebackType

import jax

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.lock import LOCK_FILE


def make_folder(folder: Path) -> None:
    """Make the folder of a run.

    Raises:
        ConfigError: It cannot be made there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be made ({error.strerror}): choose another one.") from error


class RejectedFolder:
    """Removes the folder of a new run if an error ends the context before `keep` is called.

    Ctrl-C is no error: a run that was interrupted can be resumed. What others have put into the folder stays.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._before: set[Path] | None = None

    def own(self) -> None:
        """Take what is added from now on as part of the run; the folder is locked."""
        self._before = set(self._folder.iterdir()) - {self._folder / LOCK_FILE}

    def keep(self) -> None:
        """Keep what is there: it is of use to a run that is resumed."""
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
                folder.rmdir()  # Fails where the folder is not empty.
