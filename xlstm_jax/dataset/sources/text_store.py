"""Numbered texts in a temporary file: of any size, and shared by all processes that read them."""

import array
import contextlib
import hashlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from xlstm_jax.utils.locks import lock

_PREFIX = "xlstm_jax_texts_"
_OFFSET_BYTES = 8


class TextStore:
    """Texts in a file: all texts in UTF-8, then, aligned to 8 bytes, the offset of each.

    Create it with `build`. A pickled copy reads the same file, as long as the original store is alive.
    """

    def __init__(self, path: Path, num_texts: int, num_bytes: int, digest: str):
        self.path = path
        self.num_bytes = num_bytes
        """The size of all texts."""
        self.digest = digest
        """The SHA-256 of all texts, each with its length of 8 bytes before it."""
        self._num_texts = num_texts
        self._own_file: _OwnFile | None = None
        with open(path, "rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = np.frombuffer(self._content, np.int64, num_texts + 1, offset=_aligned(num_bytes))

    @classmethod
    def build(cls, texts: Iterable[str], folder: str | os.PathLike | None = None) -> "TextStore":
        """Write texts to a file that is removed together with the returned store.

        Args:
            texts: The texts, consumed one by one.
            folder: The folder of the file; by default, the one for temporary files. Files of killed processes are
                removed from it.

        Returns:
            The store.
        """
        file = _OwnFile(Path(folder or tempfile.gettempdir()))
        offsets = array.array("q", [0])
        sha256 = hashlib.sha256()
        with open(file.path, "wb") as stream:
            for text in texts:
                content = text.encode()
                stream.write(content)
                sha256.update(len(content).to_bytes(8, "little"))
                sha256.update(content)
                offsets.append(offsets[-1] + len(content))
            num_bytes = offsets[-1]
            stream.seek(_aligned(num_bytes))
            offsets.tofile(stream)
        store = cls(file.path, len(offsets) - 1, num_bytes, sha256.hexdigest())
        store._own_file = file
        return store

    def __len__(self) -> int:
        return self._num_texts

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return the texts with these numbers."""
        numbers = np.asarray(indices, np.int64)
        if np.any((numbers < 0) | (numbers >= len(self))):
            raise IndexError(f"Indices of texts go from 0 to {len(self) - 1}, not {list(indices)}.")
        starts, ends = self._offsets[numbers].tolist(), self._offsets[numbers + 1].tolist()
        return [self._content[start:end].decode() for start, end in zip(starts, ends, strict=True)]

    def scan(self, start: int, stop: int) -> list[str]:
        """Return the texts from one index up to another."""
        return self.read(range(start, stop))

    def __reduce__(self):
        return TextStore, (self.path, self._num_texts, self.num_bytes, self.digest)


class _OwnFile:
    """A file removed together with this object, or by the next process that finds it unlocked."""

    def __init__(self, folder: Path):
        _remove_abandoned(folder)
        # Other processes ignore this name until the lock is held.
        descriptor, new = tempfile.mkstemp(prefix=f"new_{_PREFIX}", dir=folder)
        try:
            lock(descriptor)
            self.path = Path(new).with_name(Path(new).name.removeprefix("new_"))
            os.rename(new, self.path)
        except BaseException:
            _remove(Path(new), descriptor, os.getpid())
            raise
        weakref.finalize(self, _remove, self.path, descriptor, os.getpid())


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # A forked copy of the process leaves the file alone.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if lock(file.fileno()):
                path.unlink()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _OFFSET_BYTES) * _OFFSET_BYTES
