"""Group the documents of a split: each group becomes a shard, and its borders follow from the documents alone."""

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path

from xlstm_jax.dataset.prepare.splits import Split
from xlstm_jax.dataset.shards.manifest import Manifest
from xlstm_jax.dataset.sources.source import BEGINNING, Position
from xlstm_jax.dataset.sources.text_store import TextStore

_DEFAULT_NUM_SHARDS = 256
_SHARD_BYTES_RANGE = (16 * 2**20, 512 * 2**20)
"""The least and the most text in a shard by default."""
_MAX_SHARD_DOCUMENTS = 2**20


@dataclasses.dataclass(frozen=True)
class Group:
    """The documents of a shard."""

    index: int
    texts: TextStore
    skipped: dict[str, int]
    next_position: Position | None
    num_bytes_read: int
    """How many bytes of the source have been read up to the end of the group."""


class _Gatherer:
    """Groups the documents of a split, from a given document on.

    Args:
        split: The documents.
        folder: Where the texts of a group are kept until its shard is written.
        shard_bytes: A group is complete once its texts have this many bytes.
        start: The position of the first document in the source.
        index: The index of the first group.
    """

    def __init__(self, split: Split, folder: Path, shard_bytes: int, start: Position, index: int):
        self._split = split
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._index = index
        split.take_skipped()
        self._documents = split.documents(start)
        self._next = next(self._documents, None)
        if start != BEGINNING:  # Documents skipped before it belong to the previous group.
            split.take_skipped()

    def __iter__(self) -> Iterator[Group]:
        while self._next is not None:
            texts = TextStore.build(self._take(), self._folder)
            next_position = self._next[0] if self._next else None
            num_bytes_read = self._split.source.num_bytes_read
            yield Group(self._index, texts, self._split.take_skipped(), next_position, num_bytes_read)
            self._index += 1

    def _take(self) -> Iterator[str]:
        num_bytes = num_documents = 0
        while self._next is not None and num_bytes < self._shard_bytes and num_documents < _MAX_SHARD_DOCUMENTS:
            text = self._next[1]
            yield text
            num_bytes += len(text.encode())
            num_documents += 1
            self._next = next(self._documents, None)


def gather_unfinished(
    split: Split, folder: Path, manifest: Manifest, damaged: Collection[int], shard_bytes: int
) -> Iterator[Group]:
    """Yield the groups of the shards to repair, then those of the shards that have not been written yet.

    Args:
        split: The documents.
        folder: The folder of the shards.
        manifest: The shards written so far.
        damaged: The indices of the shards to repair.
        shard_bytes: The bytes of text in a shard.
    """
    start: Position | None = BEGINNING
    for index, shard in enumerate(manifest.shards):
        if start is not None and index in damaged:
            yield next(iter(_Gatherer(split, folder, shard_bytes, start, index)))
        start = shard.next_position
    if start is not None:
        yield from _Gatherer(split, folder, shard_bytes, start, len(manifest.shards))


def default_shard_bytes(num_bytes: int) -> int:
    """Return the bytes of text in a shard for a source of this size."""
    least, most = _SHARD_BYTES_RANGE
    return min(max(num_bytes // _DEFAULT_NUM_SHARDS, least), most)
