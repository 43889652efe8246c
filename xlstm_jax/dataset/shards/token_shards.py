"""Tokenised documents on disk: shards of records, and a manifest that describes them.

A folder holds the shards `<name>_<number>.arecord`, read in the order of their numbers. Each record is a document: its
tokens as little-endian integers of four bytes, without the token that ends a document. `manifest.json` records how the
shards were made and what each must contain; shards from other tools need none.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue], as it is compiled

from xlstm_jax.dataset.shards.manifest import MANIFEST_FILE, Manifest, Shard, read_manifest
from xlstm_jax.dataset.shards.records import REPAIR, RecordShards, ShardError, find_shards, open_records
from xlstm_jax.utils.files import move_into_place

_WRITER_OPTIONS = "group_size:1"
"""Records are compressed individually: 15 % larger files than with groups of 8, but random reads twice as fast."""
_RECORDS_AT_A_TIME = 1024
_MAX_VOCAB_SIZE = 2**24
"""The bound on token ids without a manifest: above any tokenizer, and below four bytes of text read as a number."""


class TokenShards:
    """The tokenised documents of a folder, by number.

    Opening checks that all shards exist with the right size; `verify` checks their content.

    Args:
        folder: The folder of a split.

    Raises:
        ShardError: A shard of the manifest is missing or has another size.
        ValueError: There are no shards, or shards that the manifest does not list.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self._vocab_size = self.manifest.vocab_size if self.manifest else _MAX_VOCAB_SIZE
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
        """The number of tokens, without those that end documents; known only with a manifest."""
        return self.manifest.num_tokens if self.manifest else None

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of the documents with these numbers, in read-only arrays."""
        records = self._records.read_records(indices)
        documents = [self._parse(index, record) for index, record in zip(indices, records, strict=True)]
        # One check of all is three times as fast as one each. As unsigned integers, negative numbers are the largest.
        if documents and np.concatenate(documents).view(np.uint32).max(initial=0) >= self._vocab_size:
            for index, document in zip(indices, documents, strict=True):
                self._check_range(index, document)
        return documents

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what identifies these documents, wherever they are stored."""
        return {"num_records": len(self), "sha256": self.manifest.digest} if self.manifest else self._records.describe()

    def _parse(self, index: int, record: bytes) -> np.ndarray:
        if len(record) % 4:
            raise self._no_tokens(index, f"its {len(record)} bytes are not a multiple of four")
        return np.frombuffer(record, "<i4").astype(np.int32, copy=False)

    def _check_range(self, index: int, tokens: np.ndarray) -> None:
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if wrong.size:
            raise self._no_tokens(index, f"{wrong[0]} is not from 0 to {self._vocab_size - 1}")

    def _no_tokens(self, index: int, cause: str) -> ValueError:
        way_out = (
            "is it text? Then set tokenize_data=True."
            if self.manifest is None
            else f"it does not match {MANIFEST_FILE}. Prepare the folder again."
        )
        return ValueError(f"The {self._records.locate(index)} holds no tokens, as {cause}: {way_out}")


def write_shard(file: Path, documents: Iterable[np.ndarray]) -> Shard:
    """Write the tokens of documents to a shard, which appears only once it is complete.

    Args:
        file: The shard.
        documents: The tokens of each document, consumed one by one.

    Returns:
        The shard, with no next position and no skipped documents.
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


def find_problem(folder: Path, shard: Shard) -> str | None:
    """Return what is wrong with a shard, as far as its size shows."""
    file = folder / shard.file
    if not file.exists():
        return "is missing"
    size = file.stat().st_size
    return None if size == shard.num_bytes else f"has {size} bytes, but should have {shard.num_bytes}"


def find_damage(folder: Path, shard: Shard) -> str | None:
    """Return what is wrong with a shard after reading all of it."""
    return find_problem(folder, shard) or (None if _matches(folder / shard.file, shard) else "is damaged")


def verify(folder: str | os.PathLike) -> None:
    """Read all shards of a folder, and compare them with the manifest.

    Raises:
        ShardError: Some shards do not match the manifest; the message names them.
        ValueError: There is no manifest.
    """
    shards = TokenShards(folder)
    if shards.manifest is None:
        raise ValueError(f"There is no {shards.folder / MANIFEST_FILE} to compare the shards with.")
    damaged = [shard.file for shard in shards.manifest.shards if find_damage(shards.folder, shard)]
    if damaged:
        raise ShardError(f"These shards in {folder} are damaged: {', '.join(damaged)}. For each of them, {REPAIR}.")


def _matches(file: Path, shard: Shard) -> bool:
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
        raise ValueError(f"{folder} is not completely prepared: run the command again to resume it.")
    for shard in manifest.shards:
        problem = find_problem(folder, shard)
        if problem:
            raise ShardError(f"The shard {folder / shard.file} {problem}: {REPAIR}.")
    unknown = [file.name for file in find_shards(folder) if file.name not in {shard.file for shard in manifest.shards}]
    if unknown:
        raise ValueError(f"{folder / MANIFEST_FILE} does not list {', '.join(unknown)}: move them away.")
