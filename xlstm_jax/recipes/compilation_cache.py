"""The persistent compilation cache of commands on GPUs: private, bounded and safe with concurrent processes.

It is JAX's own cache with a size limit, under which JAX takes a file lock around each read and write and evicts the
least recently used programs. JAX's own settings take precedence: with `JAX_COMPILATION_CACHE_DIR`, the cache is
configured by JAX alone; `JAX_ENABLE_COMPILATION_CACHE=false` disables it.
"""

import contextlib
import logging
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.recipes.processes import from_first_process

LOGGER = logging.getLogger(__name__)

CONFIG: Any = jax.config
"""JAX's configuration, untyped because type checkers do not know its attributes."""
GIB = 2**30
FOLDER_VARIABLE = "XLSTM_JAX_CACHE_DIR"
"""The parent folder of the cache's folder `compilation`; by default `xlstm_jax` in the user's cache directory."""
MAX_BYTES = 2 * GIB
"""The size limit, unless `JAX_COMPILATION_CACHE_MAX_SIZE` is set."""
MIN_COMPILE_SECONDS = 0.1
"""The minimum compile time of a cached program, unless `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` is set."""
OUR_SETTINGS = {
    "jax_compilation_cache_max_size": (-1, MAX_BYTES),
    "jax_persistent_cache_min_compile_time_secs": (1.0, MIN_COMPILE_SECONDS),
}
"""Settings of JAX that are replaced if the environment does not set them: JAX's default and our value."""
MAX_AUTOTUNING_FILES = 20_000
"""The maximum number of autotuning files: XLA writes one for each fusion and never deletes any."""
AUTOTUNING_FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"
LOCK_SECONDS = 10

ENTRY, LAST_USE = "-cache", "-atime"
"""The suffixes of JAX's files; the time of the last use is written after the entry."""


def enable_compilation_cache() -> None:
    """Enable the persistent compilation cache, on GPUs only.

    All processes of a run have to call this function after JAX's distributed initialisation. An unusable folder only
    logs a warning.
    """
    if jax.default_backend() != "gpu" or not CONFIG.jax_enable_compilation_cache:
        return
    if CONFIG.jax_compilation_cache_dir is not None:
        return
    folder, problem = Path("~/.cache"), None
    try:
        prepare_folder(folder := default_folder())
    except (OSError, RuntimeError) as error:  # no home directory, or no file locks on a network file system
        problem = str(error)
    if not _is_shared(folder if problem is None else None):
        problem = problem or "processes of this run on other hosts do not see it"
    if problem is not None:
        LOGGER.warning(
            "Compiled programs are not kept, because %s cannot be used: %s. Set %s to another folder, or "
            "JAX_ENABLE_COMPILATION_CACHE=false.",
            folder,
            problem,
            FOLDER_VARIABLE,
        )
        return
    CONFIG.update("jax_compilation_cache_dir", str(folder))
    for name in OUR_SETTINGS:
        CONFIG.update(name, _own(name))


def default_folder() -> Path:
    """Return the folder of the cache, if JAX's own settings do not name one."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser().absolute() / "compilation"
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "xlstm_jax" / "compilation"


def prepare_folder(folder: Path) -> None:
    """Make the folder private and remove entries that JAX cannot use; raise an `OSError` if the folder is unusable.

    Programs in the cache are executed, so anyone who can write to it can run code as this user. Therefore the folder
    must belong to the user, access of other users is revoked, and files of other users are removed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError("it belongs to another user, whose programs would be executed")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    with filelock.FileLock(folder / ".lockfile", timeout=LOCK_SECONDS):
        _remove_unusable(folder)
        _limit_autotuning(folder / AUTOTUNING_FOLDER)


def describe_cache() -> str:
    """Describe the folder and the size of the cache, or why it is off and how to enable it."""
    if not CONFIG.jax_enable_compilation_cache:
        return "off, as JAX_ENABLE_COMPILATION_CACHE is set"
    given = CONFIG.jax_compilation_cache_dir
    if given is None and jax.default_backend() != "gpu":
        return "off: it is used on GPUs only; set JAX_COMPILATION_CACHE_DIR to use one here"
    folder = Path(given) if given is not None else default_folder()
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    name = "jax_compilation_cache_max_size"
    limit = getattr(CONFIG, name) if given is not None else _own(name)
    bound = f" of {limit / GIB:.1f} GiB" if limit > 0 else " GiB, without a limit"
    return f"{folder}: {len(list(folder.glob(f'*{ENTRY}')))} programs, {sum(sizes) / GIB:.2f}{bound}"


def _own(name: str) -> Any:
    """Return the value of a JAX setting for our cache: the user's if set, else ours."""
    value, (default, ours) = getattr(CONFIG, name), OUR_SETTINGS[name]
    return ours if value == default and name.upper() not in os.environ else value


def _remove_unusable(folder: Path) -> None:
    """Remove files of other users, and incomplete entries that a killed process left behind.

    JAX would fail to read an incomplete entry each time and never replace it.
    """
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Another process may remove the file at the same time.
            if path.lstat().st_uid != os.getuid():
                path.unlink()
    entries, uses = (
        {path.name.removesuffix(ending) for path in folder.glob(f"*{ending}")} for ending in (ENTRY, LAST_USE)
    )
    for name in entries - uses:
        (folder / f"{name}{ENTRY}").unlink(missing_ok=True)
    for name in uses - entries:
        (folder / f"{name}{LAST_USE}").unlink(missing_ok=True)


def _limit_autotuning(folder: Path) -> None:
    if not folder.is_dir():
        return
    with os.scandir(folder) as found:
        files = sorted((entry.stat().st_mtime, entry.path) for entry in found if entry.is_file())
    for _, path in files[:-MAX_AUTOTUNING_FILES]:
        Path(path).unlink(missing_ok=True)


def _is_shared(folder: Path | None) -> bool:
    """Check that all processes see the cache folder of the first one.

    If only some processes read a program from the cache, the others wait forever for them to take part in autotuning.
    """
    if jax.process_count() == 1:
        return True
    name = from_first_process(lambda: _mark(folder))
    is_seen = folder is not None and bool(name) and (folder / name).exists()
    is_shared = bool(np.all(multihost_utils.process_allgather(np.array(is_seen))))
    if jax.process_index() == 0 and folder is not None and name:
        (folder / name).unlink(missing_ok=True)
    return is_shared


def _mark(folder: Path | None) -> str:
    """Create a marker file for other processes to find and return its name; an empty name if there is no folder."""
    if folder is None:
        return ""
    name = f".shared-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name
