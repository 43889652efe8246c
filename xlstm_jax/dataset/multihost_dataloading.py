"""Global batches: each process loads its own rows, which together form one sharded array."""

import base64
import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.dataset.background.prefetch import Prefetcher
from xlstm_jax.dataset.batch import TokenRange, find_token_ranges
from xlstm_jax.dataset.states import check_keys
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary

_BASE64 = "base64"
_NUM_DRAWN = "num_drawn"


class MultiHostDataLoadIterator:
    """Yields batches that are sharded over all devices of a mesh, epoch after epoch.

    A `for` loop is an epoch. The next epoch continues where the loader is, unless `reset_after_epoch` is set. After
    `set_state` in the middle of an epoch, the next loop is the rest of that epoch.

    Attributes:
        vocabulary: The token ids that batches can hold; `None` if unknown before the batches are read.
        token_ranges: The ranges of the token ids of this process's rows of the last batch, found on the host before it
            went to the devices; see `find_token_ranges`.
    """

    def __init__(
        self,
        dataloader: Iterable,
        global_mesh: Mesh,
        iterator_length: int | None = None,
        dataset_size: int | None = None,
        reset_after_epoch: bool = False,
        pad_shapes: bool = False,
        pad_value: int | float = 0,
        prefetch: int = 0,
        length_is_upper_bound: bool = False,
        vocabulary: Vocabulary | None = None,
    ):
        """Wrap the loader of this process.

        Args:
            dataloader: Yields trees of host arrays, the rows of this process. If its iterators have `get_state` and
                `set_state`, these define its position. Otherwise batches are counted, and drawn again to resume.
            global_mesh: The mesh.
            iterator_length: The number of batches in an epoch; `None` for all batches of the loader.
            dataset_size: The number of examples, for information.
            reset_after_epoch: Start every epoch with the first batch.
            pad_shapes: Pad arrays to the largest shape in any process.
            pad_value: The padding value.
            prefetch: The number of batches that a thread puts on the devices ahead of time.
            length_is_upper_bound: Whether the loader may end before `iterator_length`; the length of an epoch is then
                unknown until it ends.
            vocabulary: The token ids that batches can hold, if known beforehand.
        """
        if prefetch and pad_shapes:
            raise ValueError(
                "Padding shapes needs communication of all processes, which a thread must not do: set prefetch=0."
            )
        self.dataloader = dataloader
        self.global_mesh = global_mesh
        self.iterator_length = iterator_length
        self.length_is_upper_bound = length_is_upper_bound
        self.dataset_size = dataset_size
        self.reset_after_epoch = reset_after_epoch
        self.pad_shapes = pad_shapes
        self.pad_value = pad_value
        self.vocabulary = vocabulary
        self.token_ranges: dict[str, TokenRange] = {}
        self._batches = batches = _LocalBatches(dataloader)
        self._prefetcher = Prefetcher(lambda: _draw(batches, global_mesh, dataloader), prefetch) if prefetch else None
        if self._prefetcher is not None:
            weakref.finalize(self, self._prefetcher.stop)
        self._place: Any = None
        self._statistics: dict[str, float] = {}
        self._step = 0
        self._is_mid_epoch = False

    def reset(self) -> None:
        """Restart with the first batch."""
        self._stop_prefetching()
        self._batches.restart()
        self._step = 0

    def get_state(self) -> dict[str, Any]:
        """Return the step in the epoch, the length of an epoch and the state of the loader.

        The state is JSON if the state of the loader is JSON or bytes.
        """
        return {
            "step": self._step,
            "iterator_length": self.iterator_length,
            "iterator": self._batches.get_state() if self._place is None else self._place,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume the state of an iterator of the same data, after `check_state` of the loader if it has that."""
        check_keys(state, "step", "iterator_length", "iterator")
        if hasattr(self.dataloader, "check_state"):
            self.dataloader.check_state(state["iterator"])  # pyright: ignore[reportAttributeAccessIssue]
        if state["iterator_length"] != self.iterator_length:
            raise ValueError(
                f"The state is from epochs of {state['iterator_length']} batches, but here they have "
                f"{self.iterator_length}: the data or the batch size has changed."
            )
        self._stop_prefetching()
        self._batches.set_state(state["iterator"])
        self._step = state["step"]
        self._is_mid_epoch = self._step > 0 and not self._has_ended()

    def __iter__(self) -> "MultiHostDataLoadIterator":
        if not self._is_mid_epoch:
            self._step = 0
            if self.reset_after_epoch:
                self._stop_prefetching()
                self._batches.restart()
        self._is_mid_epoch = False
        return self

    def __len__(self) -> int:
        if self.iterator_length is None or self.length_is_upper_bound:
            raise TypeError("This iterator has no length: it yields all batches of its loader. Set iterator_length.")
        return self.iterator_length

    def __next__(self) -> PyTree:
        if self._has_ended():
            raise StopIteration
        self._is_mid_epoch = False
        try:
            batch = self._next_batch_of_epoch()
        except StopIteration:
            self._step = 0  # The epoch is over, so this state is not in the middle of one.
            raise
        self._step += 1
        return batch

    def get_statistics(self) -> dict[str, float]:
        """Return the statistics of the loader, if it has any, up to the last batch that was returned."""
        return _statistics_of(self.dataloader) if self._place is None else self._statistics

    def shut_down(self) -> None:
        """Stop the thread and the processes that prepare batches, as garbage collection of the iterator does.

        It is not called `close`, as a generator that yields from an iterator calls `close` at its own end.
        """
        if self._prefetcher is not None:
            self._prefetcher.stop()
        if hasattr(self.dataloader, "shut_down"):
            self.dataloader.shut_down()  # pyright: ignore[reportAttributeAccessIssue]

    def _next_batch_of_epoch(self) -> PyTree:
        """Return the next batch; an epoch that starts at the end of the loader starts with the loader's next pass."""
        try:
            return self._next_batch()
        except StopIteration:
            if self._step > 0:
                raise
        return self._next_batch()

    def _next_batch(self) -> PyTree:
        if self._prefetcher is None:
            batch = get_next_batch_sharded(
                self._batches, self.global_mesh, pad=self.pad_shapes, pad_value=self.pad_value
            )
            self.token_ranges = self._batches.token_ranges
            return batch
        if self._place is None:
            self._place, self._statistics = self._batches.get_state(), _statistics_of(self.dataloader)
        elif not self._prefetcher.is_running:  # It has failed, so the batch is drawn again.
            self._batches.set_state(self._place)
        batch, self._place, self._statistics, self.token_ranges = self._prefetcher.next()
        if batch is None:
            self._stop_prefetching()
            raise StopIteration
        return batch

    def _stop_prefetching(self) -> None:
        """Stop the thread, and move the loader back to the position of this iterator."""
        if self._prefetcher is not None and self._place is not None:
            self._prefetcher.stop()
            self._batches.set_state(self._place)
            self._place = None

    def _has_ended(self) -> bool:
        return self.iterator_length is not None and self._step >= self.iterator_length


def _draw(
    batches: "_LocalBatches", global_mesh: Mesh, dataloader: Iterable
) -> tuple[PyTree | None, Any, dict[str, float], dict[str, TokenRange]]:
    """Return the next global batch, the loader's state and statistics after it, and the ranges of its tokens.

    At the end of the loader there is no batch.
    """
    batch = None
    with contextlib.suppress(StopIteration):
        batch = get_next_batch_sharded(batches, global_mesh)
    return batch, batches.get_state(), _statistics_of(dataloader), batches.token_ranges


def _statistics_of(dataloader: Any) -> dict[str, float]:
    return dataloader.get_statistics() if hasattr(dataloader, "get_statistics") else {}


class _LocalBatches(Iterator):
    """The batches of this process, from a loader with or without a state."""

    def __init__(self, loader: Iterable):
        self._loader = loader
        self.token_ranges: dict[str, TokenRange] = {}
        self._open()
        self._has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        self._beginning = self.get_state() if self._iterator is loader else None

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self.token_ranges = find_token_ranges(batch)
        self._num_drawn += 1
        self._is_at_beginning = False
        return batch

    def restart(self) -> None:
        if self._is_at_beginning:
            return
        if self._iterator is self._loader:
            self.set_state(self._beginning)
        else:
            self._reopen()

    def get_state(self) -> Any:
        if not self._has_state:
            return {_NUM_DRAWN: self._num_drawn}
        state = self._iterator.get_state()  # pyright: ignore[reportAttributeAccessIssue]
        return {_BASE64: base64.b64encode(state).decode()} if isinstance(state, bytes) else state

    def set_state(self, state: Any) -> None:
        if self._has_state:
            is_encoded = isinstance(state, Mapping) and set(state) == {_BASE64}
            inner = base64.b64decode(state[_BASE64]) if is_encoded else state
            self._iterator.set_state(inner)  # pyright: ignore[reportAttributeAccessIssue]
            self._is_at_beginning = False
        else:
            check_keys(state, _NUM_DRAWN)
            self._skip_to(state[_NUM_DRAWN])

    def _skip_to(self, num_drawn: int) -> None:
        if num_drawn < self._num_drawn:
            if self._iterator is self._loader:
                raise ValueError(
                    f"The loader is at batch {self._num_drawn} and cannot go back to {num_drawn}: a "
                    f"{type(self._loader).__name__} can be read once, and has no get_state and set_state."
                )
            self._reopen()
        while self._num_drawn < num_drawn:
            next(self)

    def _open(self) -> None:
        self._iterator = iter(self._loader)
        self._num_drawn = 0
        self._is_at_beginning = True

    def _reopen(self) -> None:
        if hasattr(self._iterator, "close"):
            self._iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        self._open()


def get_next_batch_sharded(
    local_iterator: Iterator, global_mesh: Mesh, pad: bool = False, pad_value: int | float = 0
) -> PyTree:
    """Draw a batch in each process, and form global arrays from all of them.

    Args:
        local_iterator: Yields trees of host arrays, the rows of this process.
        global_mesh: The mesh; the first axis of each array is sharded over all of its devices.
        pad: Pad arrays to the largest shape in any process.
        pad_value: The padding value.

    Returns:
        A tree of the same structure.
    """
    batch = jax.tree.map(np.asarray, next(local_iterator))
    if pad and jax.process_count() > 1:
        leaves, structure = jax.tree.flatten(batch)
        shapes = _largest_shapes([leaf.shape for leaf in leaves])
        batch = jax.tree.unflatten(
            structure, [_pad_array_to_shape(pair, pad_value) for pair in zip(leaves, shapes, strict=True)]
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    if jax.process_count() == 1:  # One call for all arrays is faster.
        for path, array in leaves:
            _check_rows(path, array, global_mesh)
        sharding = NamedSharding(global_mesh, PartitionSpec(global_mesh.axis_names))
        return jax.device_put(batch, sharding)
    return jax.tree.unflatten(structure, [_form_global_array(path, array, global_mesh) for path, array in leaves])


def rows_of_process(global_mesh: Mesh, num_rows: int) -> np.ndarray:
    """Return the sorted indices of the rows of a global batch on devices of this process."""
    _, sharding = _build_global_shape_and_sharding((num_rows,), global_mesh)
    slices = sharding.addressable_devices_indices_map((num_rows,)).values()
    bounds = {part[0].indices(num_rows)[:2] for part in slices if part is not None}
    return np.concatenate([np.arange(*pair) for pair in sorted(bounds)])


def _largest_shapes(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return, for each array, the largest size of each axis in any process."""
    everywhere = multihost_utils.process_allgather(np.array([size for shape in shapes for size in shape], np.int32))
    largest = iter(np.max(everywhere, axis=0).tolist())
    return [tuple(next(largest) for _ in shape) for shape in shapes]


def _pad_array_to_shape(array_and_shape: tuple[np.ndarray, tuple[int, ...]], pad_value: int | float = 0) -> np.ndarray:
    array, shape = array_and_shape
    missing = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
    return np.pad(array, missing, constant_values=pad_value)


def _check_rows(path: Any, array: np.ndarray, global_mesh: Mesh) -> None:
    num_devices = len(global_mesh.local_devices)
    if array.ndim == 0 or array.shape[0] % num_devices:
        raise ValueError(
            f"The array {jax.tree_util.keystr(path)} of a batch has the shape {array.shape} in this process: its first "
            f"axis must be a multiple of the {num_devices} devices here. Change the batch size."
        )


def _form_global_array(path: Any, array: np.ndarray, global_mesh: Mesh) -> jax.Array:
    _check_rows(path, array, global_mesh)
    shape, sharding = _build_global_shape_and_sharding(array.shape, global_mesh)
    return jax.make_array_from_process_local_data(sharding, array, shape)


def _build_global_shape_and_sharding(
    local_shape: tuple[int, ...], global_mesh: Mesh
) -> tuple[tuple[int, ...], NamedSharding]:
    """Return the global shape of the rows of all processes, and their sharding over all devices of the mesh."""
    num_rows = local_shape[0] * global_mesh.size // len(global_mesh.local_devices)
    return (num_rows, *local_shape[1:]), NamedSharding(global_mesh, PartitionSpec(global_mesh.axis_names))
