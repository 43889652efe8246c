"""Batches grow by the schedule, and go on exactly where they stopped."""

import json
import pickle

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm_jax.dataset.grain_batch_rampup import (
    BatchRampUpIterDataset,
    batch_dataset_with_rampup,
    constant_rampup_schedule,
    create_batch_rampup_schedule,
    stepwise_rampup_schedule,
)

SERIAL = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def numbers(count):
    return grain.MapDataset.range(count).to_iter_dataset(SERIAL)


def lists(dataset):
    return [batch.tolist() for batch in dataset]


def test_a_stepwise_schedule_is_relative_to_the_base_and_not_cumulative():
    schedule = stepwise_rampup_schedule(10, {5: 2.0, 2: 0.55, 7: 1.0})
    assert [schedule(step) for step in range(9)] == [10, 10, 5, 5, 5, 20, 20, 10, 10]


def test_a_boundary_at_zero_goes_before_the_base():
    assert stepwise_rampup_schedule(8, {0: 0.25, 1: 0.5})(0) == 2


def test_a_constant_schedule_never_changes():
    for schedule in (
        constant_rampup_schedule(4),
        create_batch_rampup_schedule(4, "constant", {1: 2.0}),
        create_batch_rampup_schedule(4, "stepwise"),
    ):
        assert {schedule(step) for step in (0, 1, 1000)} == {4}


def test_boundaries_can_be_texts():
    schedule = create_batch_rampup_schedule(4, "stepwise", {"2": 0.5, "10": 2})
    assert [schedule(step) for step in (0, 2, 9, 10)] == [4, 2, 2, 8]


def test_unknown_schedules_and_empty_batches_are_refused():
    with pytest.raises(ValueError, match="schedule_type is 'linear', but must be 'constant' or 'stepwise'"):
        create_batch_rampup_schedule(4, "linear")
    with pytest.raises(ValueError, match="From step 3 on, batches would have 0 rows"):
        create_batch_rampup_schedule(4, "stepwise", {3: 0.2})
    with pytest.raises(ValueError, match="boundaries must be at least 0"):
        create_batch_rampup_schedule(4, "stepwise", {-1: 2.0})
    with pytest.raises(ValueError, match="From step 0 on, batches would have 0 rows"):
        constant_rampup_schedule(0)


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_have_as_many_rows_as_the_schedule_says(drop_remainder):
    batches = batch_dataset_with_rampup(
        numbers(9), 1, drop_remainder=drop_remainder, boundaries_and_scales={1: 2.0, 2: 4.0}
    )
    assert isinstance(batches, BatchRampUpIterDataset)
    assert lists(batches) == [[0], [1, 2], [3, 4, 5, 6]] + [[7, 8]] * (not drop_remainder)
    assert lists(batches) == lists(batches)


def test_without_boundaries_the_batches_are_those_of_grain():
    for batches in (
        batch_dataset_with_rampup(numbers(5), 2, drop_remainder=True),
        batch_dataset_with_rampup(
            numbers(5), 2, drop_remainder=True, schedule_type="constant", boundaries_and_scales={0: 3.0}
        ),
    ):
        assert not isinstance(batches, BatchRampUpIterDataset)
        assert lists(batches) == [[0, 1], [2, 3]]


def test_rows_are_stacked_leaf_by_leaf_or_by_a_function_of_yours():
    rows = grain.MapDataset.source([{"a": np.arange(3) + i, "b": i} for i in range(4)]).to_iter_dataset(SERIAL)
    schedule = stepwise_rampup_schedule(1, {1: 3.0})
    first, second = BatchRampUpIterDataset(rows, schedule)
    np.testing.assert_array_equal(first["a"], [[0, 1, 2]])
    np.testing.assert_array_equal(second["a"], [[1, 2, 3], [2, 3, 4], [3, 4, 5]])
    np.testing.assert_array_equal(second["b"], [1, 2, 3])
    assert list(BatchRampUpIterDataset(numbers(4), schedule, batch_fn=sum)) == [0, 6]


@settings(deadline=None, max_examples=30)
@given(
    boundaries=st.dictionaries(st.integers(0, 6), st.sampled_from([1.0, 2.0, 3.5]), max_size=3),
    stop=st.integers(0, 8),
    drop_remainder=st.booleans(),
)
def test_a_restored_iterator_goes_on_with_exactly_the_next_batch(boundaries, stop, drop_remainder):
    rows = grain.MapDataset.range(31).seed(3).shuffle().to_iter_dataset(SERIAL)
    batches = BatchRampUpIterDataset(rows, stepwise_rampup_schedule(2, boundaries), drop_remainder)
    iterator = iter(batches)
    for _, _ in zip(range(stop), iterator, strict=False):
        pass
    state = json.loads(json.dumps(iterator.get_state()))
    assert set(state) == {"batch_step", "parent"}
    restored = iter(batches)
    restored.set_state(state)
    assert lists(restored) == lists(iterator) == lists(batches)[stop:]


def test_workers_can_be_sent_a_data_set():
    batches = BatchRampUpIterDataset(numbers(5), create_batch_rampup_schedule(2, "stepwise", {1: 1.5}))
    assert lists(pickle.loads(pickle.dumps(batches))) == [[0, 1], [2, 3, 4]]
