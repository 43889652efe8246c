"""Synthetic batches have the right shape and place, and a run goes on where it stopped."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from xlstm_jax.dataset.configs import SyntheticDataConfig
from xlstm_jax.dataset.synthetic_dataloading import SyntheticDataIterator


def make_iterator(num_batches=3, **changes):
    fields = {"global_batch_size": 8, "max_target_length": 5, "num_batches": num_batches, **changes}
    return SyntheticDataIterator(SyntheticDataConfig(**fields), make_mesh(dp=2, tp=2))


def test_tokens_and_positions_are_zero_and_every_row_is_one_document():
    batch = next(make_iterator())
    for name in ("inputs", "targets", "inputs_position", "targets_position"):
        np.testing.assert_array_equal(getattr(batch, name), np.zeros((8, 5)))
    for name in ("inputs_segmentation", "targets_segmentation"):
        np.testing.assert_array_equal(getattr(batch, name), np.ones((8, 5)))
    assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {np.dtype(np.int32)}


def test_rows_are_split_over_all_devices():
    batch = next(make_iterator())
    mesh = batch.inputs.sharding.mesh
    for leaf in jax.tree.leaves(batch):
        assert leaf.sharding.spec == P(mesh.axis_names)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 5)}


def test_an_epoch_has_num_batches_every_time():
    iterator = make_iterator(num_batches=3)
    assert len(iterator) == 3
    assert iterator.dataset_size == 24
    assert [len(list(iterator)) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize(("num_drawn", "num_left"), [(0, 3), (1, 2), (2, 1), (3, 3)])
def test_a_restored_iterator_ends_its_epoch_and_then_begins_the_next(num_drawn, num_left):
    first = iter(make_iterator())
    for _ in range(num_drawn):
        next(first)
    second = make_iterator()
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second.get_state() == first.get_state()
    assert [len(list(second)) for _ in range(2)] == [num_left, 3]


def test_a_loop_that_is_left_early_begins_anew():
    iterator = make_iterator()
    iterator.set_state({"step": 1, "num_batches": 3})
    next(iterator)
    assert len(list(iterator)) == 3


def test_a_state_of_other_epochs_is_refused():
    with pytest.raises(ValueError, match="epochs of 4 batches, but num_batches is 3"):
        make_iterator().set_state({"step": 1, "num_batches": 4})


def test_a_batch_that_no_device_can_hold_is_refused():
    with pytest.raises(ValueError, match="max_target_length is None"):
        make_iterator(max_target_length=None)
    with pytest.raises(ValueError, match="global_batch_size is 6, but must be a multiple of the 4 devices"):
        make_iterator(global_batch_size=6)
