"""Tokenised documents on disk: shards of records, and a manifest that says what they are.

A folder has the shards `<name>_<number>.arecord`, read in the order of their numbers. Each record is a document: its
tokens, four bytes each with the least significant first, without the end of the document. `manifest.json` beside them
says how they were made and what each must contain; shards that others have made can do without.
"""

import collections
import dataclasses
import hashlib
import json
import os
import re
import resource
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue], as it is compiled

from xlstm_jax.utils.files import move_into_place

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
SHARD_SUFFIX = ".arecord"
TOKENIZER_FOLDER = "tokenizer"
"""Where a tokenizer lies that was trained for shards, beside the folders of their splits."""

_WRITER_OPTIONS = "group_size:1"
"""Each record is compressed by itself: the files are 15 % larger than with groups of 8, random reads twice as fast."""
_READER_OPTIONS = "readahead_buffer_size:0"
_READER_BUFFER = 32768
_THREADS = 32
"""How many files are opened at a time to count their records."""
_SPARE_FILES = 512
"""How many files a process may have open beside the shards."""
_RECORDS_AT_A_TIME = 1024
_NUM_SAMPLES = 64
_FOREIGN_VOCAB_SIZE = 2**24
"""More than any tokenizer has, and less than the number that four bytes of text make."""
_REPAIR = "delete it and run the command again that has prepared this folder, or copy it again from where it came from"


class ShardError(ValueError):
    """A shard is missing, cut, damaged or cannot be read; what is wrong with the content of a record is none."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a shard must contain, and how the one after it is made."""

    file: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    """The size of the file."""
    sha256: str
    """Of the file."""
    skipped: dict[str, int]
    """The documents that were left out, by reason, from the first of this shard to the first of the next."""
    next_position: tuple[int, int] | None
    """Where the first document of the next shard stands in the source; `None` if there is none."""

    def __post_init__(self):
        if not isinstance(self.file, str) or not self.file or Path(self.file).name != self.file:
            raise ValueError(f"the file of a shard is {self.file!r}, but must be a name without a folder")
        for name in ("num_documents", "num_tokens", "num_bytes"):
            _check_whole_number(f"{name} of {self.file}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """How the shards of a folder were made, and what is in them."""

    tokenizer_path: str
    tokenizer_digest: str
    vocab_size: int
    eod_token_id: int | None
    """What the tokenizer has for the end of a document; the records are without it."""
    add_bos: bool
    add_eos: bool
    source: Mapping[str, Any]
    """What decides on the documents and on where shards begin, for JSON."""
    shards: tuple[Shard, ...] = ()
    """Those that have been written so far."""

    def __post_init__(self):
        _check_whole_number("vocab_size", self.vocab_size)
        if self.eod_token_id is not None:
            _check_whole_number("eod_token_id", self.eod_token_id)
            if self.eod_token_id >= self.vocab_size:
                raise ValueError(f"eod_token_id is {self.eod_token_id}, but vocab_size is only {self.vocab_size}")

    @property
    def is_complete(self) -> bool:
        """Whether all shards have been written."""
        return bool(self.shards) and self.shards[-1].next_position is None

    @property
    def num_documents(self) -> int:
        """The number of documents in all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all shards, without the ends of documents."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def skipped(self) -> dict[str, int]:
        """How many documents were left out, by reason."""
        return dict(sum((collections.Counter(shard.skipped) for shard in self.shards), collections.Counter[str]()))

    @property
    def digest(self) -> str:
        """The SHA-256 of the digests of all shards."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()

    def with_shard(self, index: int, shard: Shard) -> "Manifest":
        """Return the manifest with another shard at an index, which may be the next one."""
        return dataclasses.replace(self, shards=(*self.shards[:index], shard, *self.shards[index + 1 :]))

    def to_json(self) -> str:
        """Return the content of `manifest.json`."""
        totals = {"num_documents": self.num_documents, "num_tokens": self.num_tokens, "skipped": self.skipped}
        content = dataclasses.asdict(self)
        shards = content.pop("shards")
        return (
            json.dumps({"format_version": FORMAT_VERSION, **content, "totals": totals, "shards": shards}, indent=2)
            + "\n"
        )

    @staticmethod
    def from_json(text: str) -> "Manifest":
        """Read the content of `manifest.json`."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} instead of fields")
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"its format version is {version}, and {FORMAT_VERSION} is known here")
        del content["totals"]
        for shard in content["shards"]:
            shard["next_position"] = shard["next_position"] and tuple(shard["next_position"])
        shards = tuple(Shard(**shard) for shard in content["shards"])
        if len({shard.file for shard in shards}) < len(shards):
            raise ValueError("it names a shard twice")
        return Manifest(**{**content, "shards": shards})


def _check_whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 0")


def read_manifest(folder: str | os.PathLike) -> Manifest | None:
    """Return the manifest of a folder, if there is one."""
    file = Path(folder) / MANIFEST_FILE
    if not file.exists():
        return None
    try:
        return Manifest.from_json(file.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no manifest that can be read: {error!r}. Prepare the folder anew.") from error


def write_manifest(folder: str | os.PathLike, manifest: Manifest) -> None:
    """Write the manifest of a folder, such that at every moment there is the old one or the new one."""
    temporary = Path(folder) / f".{MANIFEST_FILE}.tmp"
    temporary.write_text(manifest.to_json(), encoding="utf-8")
    move_into_place(temporary, Path(folder) / MANIFEST_FILE)


def write_shard(file: Path, documents: Iterable[np.ndarray]) -> Shard:
    """Write the tokens of documents, such that a shard is there as a whole or not at all.

    Args:
        file: The shard.
        documents: The tokens of each document; they are taken one by one.

    Returns:
        The shard, as the last one and with nothing left out.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    num_documents = num_tokens = 0
    writer = array_record_module.ArrayRecordWriter(str(temporary), _WRITER_OPTIONS)
    try:
        for tokens in documents:
            writer.write(tokens.astype("<i4", copy=False).tobytes())
            num_documents += 1
            num_tokens += tokens.size
    finally:
        writer.close()
    with open(temporary, "rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    shard = Shard(file.name, num_documents, num_tokens, temporary.stat().st_size, sha256, {}, None)
    move_into_place(temporary, file)
    return shard


def find_shards(folder: str | os.PathLike, suffix: str = SHARD_SUFFIX) -> list[Path]:
    """Return the shards in a folder, in the order of the numbers at the ends of their names, without one first."""

    def key(file: Path) -> tuple[int, str]:
        number = shard_number(file, suffix)
        return -1 if number is None else number, file.name

    return sorted((file for file in Path(folder).glob(f"*{suffix}") if file.name[0] != "."), key=key)


def shard_number(file: Path, suffix: str = SHARD_SUFFIX) -> int | None:
    """Return the number at the end of the name of a shard, if there is one."""
    digits = re.search(r"(\d+)$", file.name.removesuffix(suffix))
    return int(digits[1]) if digits else None


def open_records(folder: str | os.PathLike) -> "RecordShards":
    """Open the records of all shards in a folder."""
    files = find_shards(folder)
    if not files:
        raise ValueError(f"There are no shards {Path(folder) / f'*{SHARD_SUFFIX}'}.")
    return RecordShards(files)


def find_problem(folder: Path, shard: Shard) -> str | None:
    """Return what is wrong with a shard, as far as that can be said without reading it."""
    file = folder / shard.file
    if not file.exists():
        return "is missing"
    size = file.stat().st_size
    return None if size == shard.num_bytes else f"has {size} bytes, but should have {shard.num_bytes}"


def find_damage(folder: Path, shard: Shard) -> str | None:
    """Return what is wrong with a shard, having read all of it."""
    return find_problem(folder, shard) or (None if _is_sound(folder / shard.file, shard) else "is damaged")


def spread_numbers(length: int) -> list[int]:
    """Return some of the numbers below `length`, evenly spread from the first to the last."""
    return np.linspace(0, length - 1, min(length, _NUM_SAMPLES)).astype(np.int64).tolist()


class RecordShards:
    """The records of several ArrayRecord files, by number; files are opened when they are first read.

    Args:
        files: The files.
        num_records: How many records each must have; they are counted if not given.
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
            raise IndexError(f"There are records 0 to {len(self) - 1}, but these were asked for: {list(indices)}.")
        files = np.searchsorted(self._ends, numbers, side="right")
        records = [b""] * len(numbers)
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file)
            start = self._ends[file] - self._num_records[file]
            for place, record in zip(places.tolist(), self._read(file, numbers[places] - start), strict=True):
                records[place] = record
        return records

    def locate(self, index: int) -> str:
        """Say where the record with this number is: which one of which file, both counted from 0."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return f"record {index - (self._ends[file] - self._num_records[file])} of {self._files[file]}"

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, by what these records are told from others, as far as a sample of them says."""
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
        # Beyond the end of a file that has become shorter, the library finds empty records.
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


class TokenShards:
    """The tokenised documents of a folder, by number.

    Opening checks, without reading, that all shards are there as a whole; `verify` checks what is in them.

    Args:
        folder: The folder of a split.

    Raises:
        ShardError: A shard that the manifest names is missing or not whole.
        ValueError: There are no shards, or others.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self._vocab_size = self.manifest.vocab_size if self.manifest else _FOREIGN_VOCAB_SIZE
        if self.manifest is None:
            self._records = open_records(folder)
        else:
            _check_files(self.manifest, self.folder)
            num_documents = [shard.num_documents for shard in self.manifest.shards]
            self._records = RecordShards([self.folder / shard.file for shard in self.manifest.shards], num_documents)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens, without the ends of documents; known only if there is a manifest."""
        return self.manifest.num_tokens if self.manifest else None

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of the documents with these numbers, in arrays that are not to be written to."""
        records = self._records.read_records(indices)
        documents = [self._parse(index, record) for index, record in zip(indices, records, strict=True)]
        # All at once, as one by one takes three times as long. Without a sign, negative numbers are the largest.
        if documents and np.concatenate(documents).view(np.uint32).max(initial=0) >= self._vocab_size:
            for index, document in zip(indices, documents, strict=True):
                self._check_range(index, document)
        return documents

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, by what these documents are told from others, wherever they are stored."""
        return {"num_records": len(self), "sha256": self.manifest.digest} if self.manifest else self._records.describe()

    def _parse(self, index: int, record: bytes) -> np.ndarray:
        if len(record) % 4:
            raise self._no_tokens(index, f"its {len(record)} bytes are no multiple of four")
        return np.frombuffer(record, "<i4").astype(np.int32, copy=False)

    def _check_range(self, index: int, tokens: np.ndarray) -> None:
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if wrong.size:
            raise self._no_tokens(index, f"{wrong[0]} is not from 0 to {self._vocab_size - 1}")

    def _no_tokens(self, index: int, cause: str) -> ValueError:
        way_out = (
            "is it text? Then set tokenize_data=True."
            if self.manifest is None
            else f"it is not what {MANIFEST_FILE} says. Prepare the folder anew."
        )
        return ValueError(f"The {self._records.locate(index)} holds no tokens, as {cause}: {way_out}")


def verify(folder: str | os.PathLike) -> None:
    """Read all shards of a folder, and compare them with the manifest.

    Raises:
        ShardError: Some shards are not what the manifest says; the message names them.
        ValueError: There is no manifest.
    """
    shards = TokenShards(folder)
    if shards.manifest is None:
        raise ValueError(f"There is no {shards.folder / MANIFEST_FILE} to compare the shards with.")
    damaged = [shard.file for shard in shards.manifest.shards if find_damage(shards.folder, shard)]
    if damaged:
        raise ShardError(f"These shards in {folder} are damaged: {', '.join(damaged)}. For each of them, {_REPAIR}.")


def _is_sound(file: Path, shard: Shard) -> bool:
    with open(file, "rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != shard.sha256:
            return False
    records = RecordShards([file])
    blocks = (
        records.read_records(range(start, min(start + _RECORDS_AT_A_TIME, len(records))))
        for start in range(0, len(records), _RECORDS_AT_A_TIME)
    )
    num_bytes = sum(len(record) for block in blocks for record in block)
    return len(records) == shard.num_documents and num_bytes == 4 * shard.num_tokens


def _check_files(manifest: Manifest, folder: Path) -> None:
    if not manifest.is_complete:
        raise ValueError(f"{folder} has not been prepared to its end: run the command again, and it will go on.")
    for shard in manifest.shards:
        problem = find_problem(folder, shard)
        if problem:
            raise ShardError(f"The shard {folder / shard.file} {problem}: {_REPAIR}.")
    unknown = [file.name for file in find_shards(folder) if file.name not in {shard.file for shard in manifest.shards}]
    if unknown:
        raise ValueError(f"{folder / MANIFEST_FILE} does not know of {', '.join(unknown)}: move them away.")


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
    if not stat.S_ISREG(status.st_mode):  # Opening a pipe would wait for somebody to write to it.
        raise _unreadable(file, "it is no regular file")
    return status.st_size


def _unreadable(file: Path, cause: str) -> ShardError:
    return ShardError(f"The shard {file} cannot be read: {cause}. If it is damaged, {_REPAIR}.")


def _allow_open_files(num_files: int) -> None:
    """Raise the limit on open files as far as this process may, if these files need it."""
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_files + _SPARE_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        allowed = needed if largest == resource.RLIM_INFINITY else min(needed, largest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, largest))
