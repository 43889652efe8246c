"""Batches in an order that is a function of the seed and the step alone.

Every process plans all rows of every batch, and fills only its own. So the processes agree without communication, and
their state is the same small value everywhere: another number of processes or workers resumes it with exactly the next
batch. The price is that each process reads all documents, at millions of tokens per second if they are tokenised
already (`benchmarks/data.py`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from xlstm_jax.dataset.background.workers import WorkerPool
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.order.document_stream import DocumentStream, ReadDocuments
from xlstm_jax.dataset.order.mixture import Mixture, WeightSchedule
from xlstm_jax.dataset.packing.first_fit import FirstFitPacking
from xlstm_jax.dataset.packing.rows import Packing, make_batch
from xlstm_jax.dataset.packing.stream import StreamPacking
from xlstm_jax.dataset.sources.source import Source
from xlstm_jax.dataset.states import check_keys

PackingName = Literal["stream", "first_fit", "none"]
_STATE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class BatchOrder:
    """All settings that determine the batches, besides the sources."""

    length: int
    """The number of tokens in a row."""
    num_rows: Callable[[int], int]
    """Maps the index of a batch to the number of its rows."""
    packing: PackingName = "stream"
    num_bins: int = 1
    """The number of rows that `first_fit` fills at a time."""
    weights: WeightSchedule | None = None
    """The shares of several sources."""
    is_endless: bool = True
    """Repeat the documents without padding between passes; otherwise each pass ends with padded rows."""
    stops_after_pass: bool = False
    """Stop an endless iterator whenever every source has been read once more; the next call continues."""
    first_input: int = 0
    """The first input of a document."""

    def create_packing(self) -> Packing:
        """Create the packing."""
        if self.packing == "stream":
            return StreamPacking(self.length)
        return FirstFitPacking(self.length, self.num_bins if self.packing == "first_fit" else 0)


class OrderedBatches(Iterator[LLMBatch]):
    """The rows of this process, batch after batch.

    With `stops_after_pass`, the iterator stops after each pass over the documents; the next call starts the next pass.

    Args:
        sources: The documents.
        order: The settings of the batches.
        own_rows: Maps the number of rows in a batch to the indices of the rows of this process.
        num_workers: The number of processes that read and tokenise; 0 for a thread of this process.
        description: Further facts that must be the same when a state is restored, for JSON.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        order: BatchOrder,
        own_rows: Callable[[int], np.ndarray] = np.arange,
        num_workers: int = 0,
        description: Mapping[str, Any] | None = None,
    ):
        if not order.is_endless and len(sources) > 1:
            raise ValueError("Several sources have no common end: a mixture is endless.")
        self._sources = sources
        self._order = order
        self._own_rows = own_rows
        self._weights = order.weights or WeightSchedule(len(sources))
        self._description = {
            "version": _STATE_VERSION,
            "sources": [source.describe() for source in sources],
            "weights": self._weights.describe(),
            "length": order.length,
            "packing": order.packing,
            "num_bins": order.num_bins if order.packing == "first_fit" else None,
            "is_endless": order.is_endless,
            **(description or {}),
        }
        # One worker may use threads; the threads of several workers would compete.
        environment = {"TOKENIZERS_PARALLELISM": "false"} if num_workers > 1 else {}
        self._pool = WorkerPool(ReadDocuments(sources), num_workers, environment)
        self._streams = [DocumentStream(sources, index, self._pool) for index in range(len(sources))]
        self._restart()

    def _restart(self) -> None:
        self._mixture = Mixture(self._streams, self._weights)
        self._packing = self._order.create_packing()
        self._step = 0
        self._pass = 0
        self._epoch_begin = [0] * len(self._sources)
        self._counts = np.zeros(3, np.int64)

    def __iter__(self) -> "OrderedBatches":
        return self

    def __next__(self) -> LLMBatch:
        if self._order.stops_after_pass and self._has_read_all():
            self._begin_epoch()
            raise StopIteration
        limit = None if self._order.is_endless else (self._pass + 1) * len(self._sources[0].documents)
        num_rows = self._order.num_rows(self._step)
        rows = self._packing.fill(num_rows, lambda: self._mixture.draw(self._step, limit))
        if not any(rows):
            self._pass += 1
            raise StopIteration
        self._step += 1
        sizes = [piece.stop - piece.start for row in rows for piece in row]
        self._counts += (num_rows, len(sizes), sum(sizes))
        own = [rows[index] for index in self._own_rows(num_rows)]
        return make_batch(own, self._order.length, self._order.first_input)

    def _has_read_all(self) -> bool:
        """Return whether every source with a share has been read once since the epoch started."""
        return all(
            stream.position - begin >= len(source.documents)
            for source, stream, begin, share in self._by_source(self._epoch_begin, self._weights(self._step))
            if share
        )

    def _begin_epoch(self) -> None:
        """Start the epoch at the current pass of each source; unfinished sources continue."""
        self._epoch_begin = [
            begin + (stream.position - begin) // len(source.documents) * len(source.documents)
            for source, stream, begin in self._by_source(self._epoch_begin)
        ]

    def _by_source(self, *values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        return zip(self._sources, self._streams, *values, strict=True)

    def get_state(self) -> dict[str, Any]:
        """Return the position of the iterator, for JSON; it is the same in every process."""
        return {
            "data": self._description,
            "step": self._step,
            "pass": self._pass,
            "epoch_begin": self._epoch_begin,
            "counts": self._counts.tolist(),
            "mixture": self._mixture.get_state(),
            "packing": self._packing.get_state(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Compare the data and the batches of a state with those of this iterator.

        Raises:
            ValueError: They differ; the message lists the differences.
        """
        check_keys(state, "data", "step", "pass", "epoch_begin", "counts", "mixture", "packing")
        before, now = _flatten(state["data"]), _flatten(self._description)
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if names:
            pairs = [(name, before.get(name, "absent"), now.get(name, "absent")) for name in names]
            lines = [f"  {name}: {old} in the state, {new} here" for name, old, new in pairs]
            raise ValueError("\n".join(["This state belongs to other data or other batches:", *lines]))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume the state of an iterator of the same data, with any number of processes and workers."""
        self.check_state(state)
        pieces = [piece for rows in state["packing"].values() for row in rows for piece in row]
        documents = {
            (index, position): document
            for index, stream in enumerate(self._streams)
            for position, document in stream.fetch(sorted({piece[1] for piece in pieces if piece[0] == index})).items()
        }
        self._restart()
        self._packing.set_state(state["packing"], lambda source, position: documents[source, position])
        self._mixture.set_state(state["mixture"])
        self._step, self._pass, self._epoch_begin = state["step"], state["pass"], state["epoch_begin"]
        self._counts = np.array(state["counts"], np.int64)

    def get_statistics(self) -> dict[str, float]:
        """Return the utilization of rows and the progress in each source, since the first batch."""
        num_rows, num_pieces, num_tokens = self._counts.tolist()
        statistics = {
            "utilization": num_tokens / max(num_rows * self._order.length, 1),
            "documents_per_row": num_pieces / max(num_rows, 1),
        }
        for source, stream in self._by_source():
            suffix = f"_{source.name}" if len(self._sources) > 1 else ""
            statistics[f"epochs{suffix}"] = stream.position / len(source.documents)
            statistics[f"skipped{suffix}"] = float(source.num_skipped + stream.num_skipped)
        return statistics

    def shut_down(self) -> None:
        """Stop the workers."""
        self._pool.close()


def _flatten(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        parts = tree.items()
    elif isinstance(tree, list):
        parts = enumerate(tree)
    else:
        return {name: tree}
    return {
        key: value for part, subtree in parts for key, value in _flatten(subtree, f"{name}.{part}".lstrip(".")).items()
    }
