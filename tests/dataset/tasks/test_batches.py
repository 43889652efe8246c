"""Formal tasks come as batches from a config, the same for any number of hosts."""

import json

import jax
import numpy as np
import pytest
from meshes import make_mesh

from xlstm_jax.dataset import FormalTaskDataConfig, create_data_iterator
from xlstm_jax.dataset.tasks.batches import TaskBatches
from xlstm_jax.dataset.tasks.formal_languages import TASKS, generate

PARITY = {"task": "parity", "min_length": 2, "max_length": 9, "global_batch_size": 8, "num_batches": 3}
MESH = make_mesh(dp=2, fsdp=2)


def assert_same(found, expected):
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


def expected_batch(index, seed=42):
    return generate(TASKS["parity"], seed, index, batch_size=8, min_length=2, max_length=9)


def test_an_iterator_yields_the_generated_batches_of_its_seed():
    iterator = create_data_iterator(FormalTaskDataConfig(**PARITY, data_shuffle_seed=5), MESH)
    assert len(iterator) == 3
    assert_same(list(iterator), [expected_batch(index, seed=5) for index in range(3)])


@pytest.mark.parametrize(("shuffle", "second"), [(False, 0), (True, 3)])
def test_epochs_differ_only_where_data_is_shuffled(shuffle, second):
    iterator = create_data_iterator(FormalTaskDataConfig(**PARITY, shuffle_data=shuffle), MESH)
    list(iterator)
    assert_same(next(iter(iterator)), expected_batch(second))


def test_hosts_own_rows_and_go_on_from_one_state():
    config = FormalTaskDataConfig(**PARITY)
    alone = TaskBatches(config)
    next(alone)
    state = json.loads(json.dumps(alone.get_state()))
    hosts = [TaskBatches(config, lambda count, half=half: np.arange(count)[half]) for half in (slice(4), slice(4, 8))]
    for each in hosts:
        each.set_state(state)
    parts = [next(each) for each in hosts]
    assert_same(jax.tree.map(lambda *rows: np.concatenate(rows), *parts), next(alone))


def test_rows_are_padded_to_the_length_that_is_asked_for():
    batch = next(TaskBatches(FormalTaskDataConfig(**PARITY, max_target_length=32)))
    assert batch.inputs.shape == (8, 32)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"task": "chess"}, "no task 'chess', only parity"),
        ({"max_target_length": 4}, "needs rows of 10 tokens"),
        ({"max_length": 1}, "max_length is 1, but must be at least 2"),
    ],
)
def test_tasks_that_cannot_be_drawn_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        TaskBatches(FormalTaskDataConfig(**PARITY | fields))


@pytest.mark.parametrize("other", [{"task": "even_pairs"}, {"max_target_length": 32}])
def test_a_state_of_another_task_or_other_rows_is_refused(other):
    state = TaskBatches(FormalTaskDataConfig(**PARITY)).get_state()
    with pytest.raises(ValueError, match=r"of .*parity.*, but here there is"):
        TaskBatches(FormalTaskDataConfig(**PARITY | other)).set_state(state)
