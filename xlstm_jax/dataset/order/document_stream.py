"""Read the documents of a source, pass after pass, in an order that is drawn from a seed."""

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from grain.experimental import index_shuffle

from xlstm_jax.dataset.background.workers import Pending, WorkerPool
from xlstm_jax.dataset.shards.records import ShardError
from xlstm_jax.dataset.sources.source import Document, Source

_MAX_STORED_PERMUTATION = 2**16
"""Permutations of fewer documents are kept in memory. Larger ones are computed index by index, which would be slower
for few documents."""
_CHUNK_TOKENS = 2**19
"""The approximate number of tokens read at a time: enough to tokenise several documents at once, and few enough for
long documents to fit into memory."""
_FIRST_CHUNK, _LARGEST_CHUNK = 2, 1024
"""The number of documents read first, before their mean length is known, and the largest number."""


class DocumentStream:
    """Yields the documents of a source one by one, and reads ahead.

    Args:
        sources: All sources that the pool reads.
        index: The index of this source.
        pool: Applies `ReadDocuments` of these sources.
    """

    def __init__(self, sources: Sequence[Source], index: int, pool: WorkerPool):
        self._source = sources[index]
        self._index = index
        self._pool = pool
        self._num_documents = len(self._source.documents)
        if not self._num_documents:
            raise ValueError(f"There are no documents in {self._source.location}.")
        self._chunk = _FIRST_CHUNK
        self.seek(0)
        self.num_skipped = 0

    @property
    def position(self) -> int:
        """The position of the next document in the endless order of the source."""
        return self._position

    def seek(self, position: int) -> None:
        """Continue with the document at a position."""
        self._position = self._next_read = position
        self._ahead: deque[Pending] = deque()
        self._ready: deque[np.ndarray] = deque()

    def draw(self, limit: int | None = None) -> Document | None:
        """Return the next document that has tokens, or `None` at the position `limit`."""
        last = self._position + self._num_documents
        while self._position != limit:
            if not self._ready:
                self._read_next(limit)
            document = self._finish(self._position, self._ready.popleft())
            self._position += 1
            if document is not None:
                return document
            self.num_skipped += 1
            if self._position == last:
                raise ValueError(f"None of the {self._num_documents} documents of {self._source.location} has tokens.")
        return None

    def fetch(self, positions: Sequence[int]) -> dict[int, Document]:
        """Return the documents at some positions, without moving the stream."""
        tokens = self._submit(positions).result()
        found = {position: self._finish(position, row) for position, row in zip(positions, tokens, strict=True)}
        missing = [position for position, document in found.items() if document is None]
        if missing:
            raise ValueError(
                f"The document at position {missing[0]} of {self._source.location} had tokens when the state was "
                "saved, and now has none: the data has changed."
            )
        return {position: document for position, document in found.items() if document is not None}

    def _read_next(self, limit: int | None) -> None:
        """Wait for the next documents, after submitting reads of later ones."""
        end = math.inf if limit is None else limit
        while len(self._ahead) < self._pool.num_ahead and self._next_read < end:
            stop = int(min(self._next_read + self._chunk, end))
            self._ahead.append(self._submit(range(self._next_read, stop)))
            self._next_read = stop
        try:
            documents = self._ahead.popleft().result()
        except Exception:
            self.seek(self._position)  # The next call reads these documents again, or raises the same error.
            raise
        self._ready.extend(documents)
        mean_length = max(sum(map(len, documents)) // len(documents), 1)
        self._chunk = max(min(_CHUNK_TOKENS // mean_length, 2 * self._chunk, _LARGEST_CHUNK), 1)

    def _submit(self, positions: Sequence[int]) -> Pending:
        return self._pool.submit((self._index, self._documents_at(positions)))

    def _documents_at(self, positions: Sequence[int]) -> list[int]:
        """Return the indices of the documents at some positions; each pass has its own permutation."""
        size, seed = self._num_documents, self._source.shuffle_seed
        if seed is None:
            return [position % size for position in positions]
        return [_order_of_pass(size, seed, position // size)(position % size) for position in positions]

    def _finish(self, position: int, tokens: np.ndarray) -> Document | None:
        if not tokens.size:
            if self._source.on_bad_data == "skip":
                return None
            (index,) = self._documents_at([position])
            raise ValueError(
                f"Document {index} of {self._source.location} has no tokens. Remove it, or set "
                'on_bad_data="skip" to skip and count such documents.'
            )
        if self._source.eod_token_id is not None:
            tokens = np.append(tokens, np.int32(self._source.eod_token_id))
        return Document(self._index, position, tokens)


class ReadDocuments:
    """The work of a worker: read documents of several sources.

    Args:
        sources: The sources.
    """

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources

    def __call__(self, task: tuple[int, Sequence[int]]) -> list[np.ndarray]:
        """Return the tokens of some documents of a source; skipped documents have none."""
        index, indices = task
        source = self._sources[index]
        if source.on_bad_data == "error":
            return source.documents.read(indices)
        try:
            return source.documents.read(indices)
        except (OSError, ValueError):
            return [self._read_or_skip(source, index) for index in indices]

    @staticmethod
    def _read_or_skip(source: Source, index: int) -> np.ndarray:
        try:
            return source.documents.read([index])[0]
        except (OSError, ShardError):
            if not source.skips_unreadable:
                raise
        except ValueError:
            pass
        return np.zeros(0, np.int32)


@functools.lru_cache(maxsize=64)
def _order_of_pass(size: int, seed: int, number: int) -> Callable[[int], int]:
    """Return a permutation of the indices below `size`, drawn from a seed and the number of a pass."""
    random = np.random.SeedSequence((seed, number))
    if size < _MAX_STORED_PERMUTATION:
        return np.argsort(random.generate_state(size, np.uint64), kind="stable").item
    (own_seed,) = random.generate_state(1).tolist()
    return functools.partial(index_shuffle, max_index=size - 1, seed=own_seed, rounds=4)
