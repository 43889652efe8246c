"""Synthetic batches have the right shape and place, and a run goes on where it stopped."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from xlstm_jax.dataset.configs import SyntheticDataConfig
from xlstm_jax.dataset.synthetic_dataloading import SyntheticDataIterator, draw_packed_batch


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


def draw(seed=0, **changes):
    fields = {"batch_size": 7, "length": 301, "vocab_size": 53, "mean_document_length": 20, **changes}
    return draw_packed_batch(seed, **fields)


def test_random_documents_are_numbered_and_positions_count_from_their_starts():
    batch = draw()
    is_start = np.asarray(batch.get_document_borders())
    assert is_start[:, 0].all()
    np.testing.assert_array_equal(np.cumsum(is_start, axis=1), batch.inputs_segmentation)
    np.testing.assert_array_equal(batch.inputs_position == 0, is_start)
    assert set(np.diff(batch.inputs_position)[~is_start[:, 1:]]) == {1}
    assert batch.targets_segmentation is batch.inputs_segmentation
    assert batch.targets_position is batch.inputs_position


def test_inputs_are_the_targets_before_them_and_zero_where_a_document_starts():
    batch = draw()
    is_start = np.asarray(batch.get_document_borders())
    expected = np.where(is_start[:, 1:], 0, batch.targets[:, :-1])
    np.testing.assert_array_equal(batch.inputs[:, 1:], expected)
    np.testing.assert_array_equal(batch.inputs[:, 0], np.zeros(7))


def test_random_tokens_fill_the_vocabulary_and_the_first_are_the_most_frequent():
    batch = draw(length=5001)
    counts = np.bincount(batch.targets.ravel(), minlength=53)
    assert counts.shape == (53,)
    assert counts.min() > 0
    expected = np.log1p(1 / np.arange(1, 54)) / np.log(54)
    np.testing.assert_allclose(counts / counts.sum(), expected, rtol=0.25)


def test_documents_have_the_mean_length():
    num_documents = draw(length=20_001).inputs_segmentation[:, -1]
    assert 20_001 / num_documents.mean() == pytest.approx(20, rel=0.05)


def test_without_a_mean_length_every_row_is_one_document():
    batch = draw(mean_document_length=None)
    np.testing.assert_array_equal(batch.inputs_segmentation, np.ones((7, 301)))
    np.testing.assert_array_equal(batch.inputs_position, np.tile(np.arange(301), (7, 1)))


def tokens_of(iterator):
    return [np.asarray(batch.targets) for batch in iterator]


def test_random_batches_differ_and_come_again_in_the_next_epoch():
    iterator = make_iterator(vocab_size=11, mean_document_length=3)
    first, second = tokens_of(iterator), tokens_of(iterator)
    assert (first[0] != first[1]).any()
    np.testing.assert_array_equal(first, second)


def test_a_restored_iterator_draws_the_batches_that_were_left():
    first = iter(make_iterator(vocab_size=11))
    next(first)
    second = make_iterator(vocab_size=11)
    second.set_state(json.loads(json.dumps(first.get_state())))
    np.testing.assert_array_equal(tokens_of(second), tokens_of(make_iterator(vocab_size=11))[1:])


def test_random_rows_are_split_over_all_devices():
    batch = next(make_iterator(vocab_size=11))
    assert {shard.data.shape for shard in batch.targets.addressable_shards} == {(2, 5)}


def test_another_seed_gives_other_tokens():
    batches = [next(make_iterator(vocab_size=11, data_shuffle_seed=seed)) for seed in (0, 1)]
    assert (np.asarray(batches[0].targets) != np.asarray(batches[1].targets)).any()
