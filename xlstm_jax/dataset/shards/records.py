"""Read the records of sharded ArrayRecord files by number."""

import hashlib
import os
import re
import resource
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue], as it is compiled

SHARD_SUFFIX = ".arecord"
REPAIR = "delete it and run the command again that has prepared this folder, or copy it again from its origin"
"""What to do about a damaged shard, for messages."""
_READER_OPTIONS = "readahead_buffer_size:0"
_READER_BUFFER = 32768
_THREADS = 32
"""The number of files opened at a time to count their records."""
_SPARE_FILES = 512
"""The number of files that a process may open besides the shards."""
_NUM_SAMPLES = 64


class ShardError(ValueError):
    """A shard is missing, truncated, damaged or unreadable. Invalid content of a record is another error."""


class RecordShards:
    """The records of several ArrayRecord files, by number. Files are opened when they are first read.

    Args:
        files: The files.
        num_records: The expected number of records of each file; counted if not given.
    """

    def __init__(self, files: Sequence[Path], num_records: Sequence[int] | None = None):
        self._files = list(files)
        self._sizes = [_size_of(file) for file in self._files]
        if num_records is None:
            with ThreadPoolExecutor(_THREADS) as pool:
                num_records = list(pool.map(lambda file: _open(file).num_records(), self._files))
        self._num_records = list(num_records)
        self._length = sum(self._num_records)
        self._ends = np.cumsum(self._num_records, dtype=np.int64)
        self._readers: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(self._sizes)

    def read_records(self, indices: Sequence[int]) -> list[bytes]:
        """Return the records with these numbers."""
        numbers = np.asarray(indices, np.int64)
        if np.any((numbers < 0) | (numbers >= len(self))):
            raise IndexError(f"Indices of records go from 0 to {len(self) - 1}, not {list(indices)}.")
        files = np.searchsorted(self._ends, numbers, side="right")
        records = [b""] * len(numbers)
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            start = self._ends[file] - self._num_records[file]
            for place, record in zip(places.tolist(), self._read(file, numbers[places] - start), strict=True):
                records[place] = record
        return records

    def locate(self, index: int) -> str:
        """Return the file of a record and its index there, for messages."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return f"record {index - (self._ends[file] - self._num_records[file])} of {self._files[file]}"

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what identifies these records: their number, size and a sample."""
        sha256 = hashlib.sha256()
        for record in self.read_records(spread_numbers(len(self))):
            sha256.update(len(record).to_bytes(8, "little") + record)
        return {"num_records": len(self), "num_bytes": self.num_bytes, "sha256_of_samples": sha256.hexdigest()}

    def _read(self, index: int, positions: np.ndarray) -> list[bytes]:
        file = self._files[index]
        try:
            records = self._reader(index).read(positions.tolist())
        except RuntimeError as error:
            raise _unreadable(file, str(error)) from error
        # Beyond the end of a truncated file, the library returns empty records.
        if not all(records) and _size_of(file) != self._sizes[index]:
            raise _unreadable(file, "its size has changed since it was opened")
        return records

    def _reader(self, index: int) -> Any:
        if not self._readers:
            _allow_open_files(len(self._files))
        if index not in self._readers:
            reader = _open(self._files[index])
            found, expected = reader.num_records(), self._num_records[index]
            if found != expected:
                raise _unreadable(self._files[index], f"it has {found} records, but should have {expected}")
            self._readers[index] = reader
        return self._readers[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}


def open_records(folder: str | os.PathLike) -> "RecordShards":
    """Open the records of all shards in a folder."""
    files = find_shards(folder)
    if not files:
        raise ValueError(f"There are no shards {Path(folder) / f'*{SHARD_SUFFIX}'}.")
    return RecordShards(files)


def find_shards(folder: str | os.PathLike, suffix: str = SHARD_SUFFIX) -> list[Path]:
    """Return the shards in a folder, sorted by the numbers at the ends of their names; unnumbered ones come first."""

    def key(file: Path) -> tuple[int, str]:
        number = shard_number(file, suffix)
        return -1 if number is None else number, file.name

    return sorted((file for file in Path(folder).glob(f"*{suffix}") if file.name[0] != "."), key=key)


def shard_number(file: Path, suffix: str = SHARD_SUFFIX) -> int | None:
    """Return the number at the end of the name of a shard, if it has one."""
    digits = re.search(r"(\d+)$", file.name.removesuffix(suffix))
    return int(digits[1]) if digits else None


def spread_numbers(length: int) -> list[int]:
    """Return some indices below `length`, evenly spaced from the first to the last."""
    return np.linspace(0, length - 1, min(length, _NUM_SAMPLES)).astype(np.int64).tolist()


def _open(file: Path) -> Any:
    reader = array_record_module.ArrayRecordReader(
        str(file), options=_READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER
    )
    if not reader.ok():
        try:
            reader.close()
        except RuntimeError as error:
            raise _unreadable(file, str(error)) from error
    return reader


def _size_of(file: Path) -> int:
    try:
        status = file.stat()
    except OSError as error:
        raise _unreadable(file, str(error)) from error
    if not stat.S_ISREG(status.st_mode):  # Opening a pipe would block until another process writes to it.
        raise _unreadable(file, "it is not a regular file")
    return status.st_size


def _unreadable(file: Path, cause: str) -> ShardError:
    return ShardError(f"The shard {file} cannot be read: {cause}. If it is damaged, {REPAIR}.")


def _allow_open_files(num_files: int) -> None:
    """Raise the limit on open files, as far as allowed, if these files need it."""
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files + _SPARE_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        allowed = needed if largest == resource.RLIM_INFINITY else min(needed, largest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, largest))
