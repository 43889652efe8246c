"""Per-host toolbox on grain: batches whose number of rows changes with the step. All batches use its schedules."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grain
import jax
import numpy as np

from xlstm_jax.dataset.states import check_keys

T = TypeVar("T")
S = TypeVar("S")

Schedule = Callable[[int], int]
"""From the index of a batch to the number of its rows."""


class _BatchRampUpDatasetIterator(grain.DatasetIterator[T]):
    """Counts the batches, and draws the scheduled number of rows for each."""

    def __init__(
        self,
        parent: grain.DatasetIterator[S],
        batch_rampup_schedule: Schedule,
        drop_remainder: bool,
        batch_fn: Callable[[Sequence[S]], T],
    ):
        super().__init__(parent)
        self._rows = parent
        self._schedule = batch_rampup_schedule
        self._drop_remainder = drop_remainder
        self._batch_fn = batch_fn
        self._batch_step = 0

    def __next__(self) -> T:
        num_rows = self._schedule(self._batch_step)
        rows = list(itertools.islice(self._rows, num_rows))
        if not rows or (self._drop_remainder and len(rows) < num_rows):
            raise StopIteration
        self._batch_step += 1
        return self._batch_fn(rows)

    def get_state(self) -> dict[str, Any]:
        return {"batch_step": self._batch_step, "parent": self._rows.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        check_keys(state, "batch_step", "parent")
        self._batch_step = state["batch_step"]
        self._rows.set_state(state["parent"])


class BatchRampUpIterDataset(grain.IterDataset[T]):
    """A data set of batches whose number of rows follows a schedule.

    Its iterators can stop after any batch and resume from their state, `{"batch_step": ..., "parent": ...}`.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        batch_rampup_schedule: Schedule,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence], T] | None = None,
    ):
        """Batch a data set.

        Args:
            parent: The rows.
            batch_rampup_schedule: Maps the index of a batch to the number of its rows.
            drop_remainder: Drop the last rows if they are fewer than scheduled.
            batch_fn: Makes a batch of a list of rows; by default it stacks them.
        """
        super().__init__(parent)
        self._schedule = batch_rampup_schedule
        self._drop_remainder = drop_remainder
        self._batch_fn = _make_batch if batch_fn is None else batch_fn

    def __iter__(self) -> grain.DatasetIterator[T]:
        (parent,) = self.parents
        return _BatchRampUpDatasetIterator(
            iter(parent), self._schedule, drop_remainder=self._drop_remainder, batch_fn=self._batch_fn
        )


def batch_dataset_with_rampup(
    parent: grain.IterDataset,
    batch_size: int,
    drop_remainder: bool = False,
    batch_fn: Callable[[Sequence], Any] | None = None,
    schedule_type: str = "stepwise",
    boundaries_and_scales: Mapping[Any, float] | None = None,
) -> grain.IterDataset:
    """Batch a data set by a schedule.

    Args:
        parent: The rows.
        batch_size: The number of rows that the scales are relative to.
        drop_remainder: Drop the last rows if they do not fill a batch.
        batch_fn: Makes a batch of a list of rows; by default it stacks them.
        schedule_type: `stepwise` or `constant`.
        boundaries_and_scales: The boundaries of a stepwise schedule, as for `create_batch_rampup_schedule`.

    Returns:
        The data set of batches; without boundaries, grain's own.
    """
    schedule = create_batch_rampup_schedule(batch_size, schedule_type, boundaries_and_scales)
    if schedule_type == "constant" or not boundaries_and_scales:
        return parent.batch(batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn)
    return BatchRampUpIterDataset(parent, schedule, drop_remainder=drop_remainder, batch_fn=batch_fn)


def create_batch_rampup_schedule(
    batch_size: int, schedule_type: str, boundaries_and_scales: Mapping[Any, float] | None = None
) -> Schedule:
    """Create a schedule by its name.

    Args:
        batch_size: The number of rows that the scales are relative to.
        schedule_type: `constant`, or `stepwise` for one with boundaries.
        boundaries_and_scales: The scale from each boundary on, by the step of the boundary as a number or text. Without
            any, a stepwise schedule is constant; a constant schedule ignores them.

    Returns:
        A function from the index of a batch to the number of its rows.
    """
    if schedule_type == "constant":
        return constant_rampup_schedule(batch_size)
    if schedule_type == "stepwise":
        boundaries = {int(step): float(scale) for step, scale in (boundaries_and_scales or {}).items()}
        return stepwise_rampup_schedule(batch_size, boundaries)
    raise ValueError(f"schedule_type is {schedule_type!r}, but must be 'constant' or 'stepwise'.")


def constant_rampup_schedule(batch_size: int) -> Schedule:
    """Create the schedule of batches that all have `batch_size` rows."""
    return stepwise_rampup_schedule(batch_size, {})


def stepwise_rampup_schedule(batch_size: int, boundaries_and_scales: Mapping[int, float]) -> Schedule:
    """Create a schedule that changes at boundaries.

    Args:
        batch_size: The number of rows before the first boundary.
        boundaries_and_scales: The scale from each boundary on. Scales do not accumulate: each is relative to
            `batch_size`, and the number of rows is rounded down.

    Returns:
        A function from the index of a batch to the number of its rows.
    """
    sizes = {0: batch_size, **{step: int(batch_size * scale) for step, scale in boundaries_and_scales.items()}}
    wrong = [step for step, size in sizes.items() if step < 0 or size < 1]
    if wrong:
        raise ValueError(
            f"From step {wrong[0]} on, batches would have {sizes[wrong[0]]} rows (batch_size {batch_size}, scales "
            f"{dict(boundaries_and_scales)}): boundaries must be at least 0, and every batch needs a row."
        )
    return _Stepwise(tuple(sorted(sizes.items())))


class _Stepwise:
    """A schedule that can be pickled for workers, unlike a nested function."""

    def __init__(self, sizes: tuple[tuple[int, int], ...]):
        self._sizes = sizes

    def __call__(self, step: int) -> int:
        return next(size for boundary, size in reversed(self._sizes) if boundary <= step)


def _make_batch(values: Sequence[T]) -> T:
    """Stack trees of arrays along a new first axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *values)
