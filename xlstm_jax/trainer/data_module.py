"""The data loaders of a training run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import PyTree

REPLAY_BYTES = 2**30
"""The limit in bytes of host memory for caching the batches of a one-pass iterator."""

DataIterator = Iterator | Any
"""Yields batches, epoch after epoch. If it has `get_state` and `set_state`, a run resumes at the next batch."""


@dataclasses.dataclass
class DataloaderModule:
    """The data that a run trains, validates and tests on; several validation or test sets have names."""

    train_dataloader: DataIterator | None = None
    val_dataloader: DataIterator | dict[str, DataIterator] | None = None
    test_dataloader: DataIterator | dict[str, DataIterator] | None = None


@contextlib.contextmanager
def kept_in_place(loaders: Any) -> Iterator[None]:
    """Restore the current positions of loaders at the end of a block, so that the block does not consume data."""
    parts = loaders.values() if isinstance(loaders, Mapping) else [loaders]
    resumable = [part for part in parts if is_resumable(part)]
    positions = [loader.get_state() for loader in resumable]
    try:
        yield
    finally:
        for loader, position in zip(resumable, positions, strict=True):
            loader.set_state(position)


def is_resumable(loader: Any) -> bool:
    """Return whether a loader can save and restore its position."""
    return hasattr(loader, "get_state") and hasattr(loader, "set_state")


class ReplayedIterator(Iterator):
    """An iterator over batches that restarts from its first batch at each `iter`.

    Validation, callbacks and the check before training all iterate over the same loader. An iterator that only has
    `__next__`, such as a generator, allows a single pass, so its batches are cached in host memory. An iterator that
    restarts by itself is not cached.

    Args:
        source: The iterator.
        max_bytes: The host memory that its cached batches may use in each process.
    """

    def __init__(self, source: Iterator, max_bytes: int = REPLAY_BYTES):
        self._source = source
        self._iterator = iter(source)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._batches: list[PyTree] = []
        self._is_used_up = False
        self._pass = self._replay()

    def __iter__(self) -> "ReplayedIterator":
        """Restart from the first batch."""
        self._pass = self._replay()
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._pass)

    def _replay(self) -> Iterator:
        if self._is_used_up:
            restarted = iter(self._source)
            if (first := next(restarted, None)) is not None:
                self._batches.clear()
                yield first
                while (batch := next(restarted, None)) is not None:
                    yield batch
                return
        if self._num_bytes > self._max_bytes:
            raise ValueError(
                f"The loader is an iterator ({type(self._source).__name__}) whose batches take more than the "
                f"{self._max_bytes / 2**20:,.0f} MiB that are kept to go through them again: pass a list, or an object "
                "whose __iter__ starts from the first batch."
            )
        index = 0
        while (batch := self._batch(index)) is not None:
            index += 1
            yield batch

    def _batch(self, index: int) -> Any:
        if index < len(self._batches):
            return _from_host(self._batches[index])
        batch = next(self._iterator, None)
        if batch is None:
            self._is_used_up = True
            return None
        self._num_bytes += sum(_bytes_in_process(leaf) for leaf in jax.tree.leaves(batch))
        if self._num_bytes > self._max_bytes:
            self._batches.clear()
        else:
            self._batches.append(_to_host(batch))
        return batch


def as_replayable(loaders: Any) -> Any:
    """Wrap one-pass loaders so that they can be iterated repeatedly; return the others unchanged."""
    if isinstance(loaders, Mapping):
        return {name: as_replayable(loader) for name, loader in loaders.items()}
    is_one_pass = isinstance(loaders, Iterator) and not is_resumable(loaders)
    return ReplayedIterator(loaders) if is_one_pass else loaders


@dataclasses.dataclass(frozen=True)
class _HostArray:
    """The local shards of a global array, in host memory."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: list[tuple[Any, np.ndarray]]
    """Each device with its shard."""


def _to_host(batch: PyTree) -> PyTree:
    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf  # Loaders may reuse their buffers.
        parts = [(shard.device, np.asarray(shard.data)) for shard in leaf.addressable_shards]
        return _HostArray(leaf.shape, leaf.sharding, parts)

    return jax.tree.map(copy, batch)


def _from_host(batch: PyTree) -> PyTree:
    def place(leaf: Any) -> Any:
        if not isinstance(leaf, _HostArray):
            return leaf
        parts = [jax.device_put(part, device) for device, part in leaf.parts]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return jax.tree.map(place, batch)


def _bytes_in_process(leaf: Any) -> int:
    if isinstance(leaf, jax.Array):
        return sum(shard.data.nbytes for shard in leaf.addressable_shards)
    return np.asarray(leaf).nbytes
