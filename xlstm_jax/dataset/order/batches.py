"""Batches in an order that is a function of the seed and the step alone.

Every process lays out all rows of every batch, and writes only its own. So all of them agree without a word between
them, and where they stand is the same small state everywhere: it can be taken up by another number of processes, and of
workers, with exactly the next batch. The price is that each process reads all documents: millions of tokens a second
where they are tokenised already (`benchmarks/data.py`).
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
    """All that decides on the batches, beside the sources."""

    length: int
    """The number of tokens in a row."""
    num_rows: Callable[[int], int]
    """From the index of a batch to the number of its rows."""
    packing: PackingName = "stream"
    num_bins: int = 1
    """How many rows `first_fit` fills at a time."""
    weights: WeightSchedule | None = None
    """The shares of several sources."""
    is_endless: bool = True
    """Go through the documents again and again without a border; otherwise a pass ends with padded rows."""
    stops_after_pass: bool = False
    """Let an endless iterator stop once it has gone through all sources again; it goes on if it is asked."""
    first_input: int = 0
    """The first input of a document."""

    def create_packing(self) -> Packing:
        """Create the packing."""
        if self.packing == "stream":
            return StreamPacking(self.length)
        return FirstFitPacking(self.length, self.num_bins if self.packing == "first_fit" else 0)


class OrderedBatches(Iterator[LLMBatch]):
    """The rows of this process, batch after batch.

    Where the order says so, the iterator stops after each pass over the documents, and goes on with the next pass if it
    is asked again.

    Args:
        sources: The documents.
        order: What decides on the batches.
        own_rows: From the number of rows in a batch to the indices of those of this process.
        num_workers: The number of processes that read and tokenise; 0 to do it in this one.
        description: What else a state has to have in common with this iterator, for JSON.
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
        # One worker may use threads; several would get in each other's way.
        environment = {"TOKENIZERS_PARALLELISM": "false"} if num_workers > 1 else {}
        self._pool = WorkerPool(ReadDocuments(sources), num_workers, environment)
        self._streams = [DocumentStream(sources, index, self._pool) for index in range(len(sources))]
        self._begin()

    def _begin(self) -> None:
        self._mixture = Mixture(self._streams, self._weights)
        self._packing = self._order.create_packing()
        self._step = 0
        self._pass = 0
        self._epoch_begin = [0] * len(self._sources)
        self._counts = np.zeros(3, np.int64)

    def __iter__(self) -> "OrderedBatches":
        return self

    def __next__(self) -> LLMBatch:
        if self._order.stops_after_pass and self._has_gone_through_all():
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

    def _has_gone_through_all(self) -> bool:
        """Tell whether every source that has a share has been gone through since the epoch began."""
        return all(
            stream.position - begin >= len(source.documents)
            for source, stream, begin, share in self._by_source(self._epoch_begin, self._weights(self._step))
            if share
        )

    def _begin_epoch(self) -> None:
        """Let each source begin with the pass that it is in; one that has not been gone through goes on."""
        self._epoch_begin = [
            begin + (stream.position - begin) // len(source.documents) * len(source.documents)
            for source, stream, begin in self._by_source(self._epoch_begin)
        ]

    def _by_source(self, *values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        return zip(self._sources, self._streams, *values, strict=True)

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator stands, for JSON; it is the same in every process."""
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
        """Compare what a state is of with what this iterator is of.

        Raises:
            ValueError: They are other data, or other batches; the message has the differences.
        """
        check_keys(state, "data", "step", "pass", "epoch_begin", "counts", "mixture", "packing")
        before, now = _flatten(state["data"]), _flatten(self._description)
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if names:
            pairs = [(name, before.get(name, "absent"), now.get(name, "absent")) for name in names]
            lines = [f"  {name}: {old} in the state, {new} here" for name, old, new in pairs]
            raise ValueError("\n".join(["This state belongs to other data or other batches:", *lines]))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to where an iterator of the same data stood, with whatever number of processes and workers."""
        self.check_state(state)
        pieces = [piece for rows in state["packing"].values() for row in rows for piece in row]
        found = {
            (index, position): document
            for index, stream in enumerate(self._streams)
            for position, document in stream.fetch(sorted({piece[1] for piece in pieces if piece[0] == index})).items()
        }
        self._begin()
        self._packing.set_state(state["packing"], lambda source, position: found[source, position])
        self._mixture.set_state(state["mixture"])
        self._step, self._pass, self._epoch_begin = state["step"], state["pass"], state["epoch_begin"]
        self._counts = np.array(state["counts"], np.int64)

    def get_statistics(self) -> dict[str, float]:
        """Return how well rows are filled, and how far each source has been read, since the first batch."""
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
        """End the workers."""
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
