"""Tasks have the right answers, come from a seed, and say where answers are asked for."""

import functools

import numpy as np
import pytest

from xlstm_jax.dataset.tasks.examples import Example, draw_batch, draw_parity, draw_recall

RECALL = functools.partial(draw_recall, num_pairs=3, num_keys=5, num_values=4)
TASKS = pytest.mark.parametrize("task", [draw_parity, RECALL], ids=["parity", "recall"])


class Bits(np.random.Generator):
    """A generator that draws given bits."""

    def __init__(self, bits):
        super().__init__(np.random.PCG64(0))
        self.bits = np.array(bits)

    def integers(self, low, high, size):
        assert (low, high, size) == (0, 2, len(self.bits))
        return self.bits


def count_up(generator, length):
    """A task whose sequences tell how long they are; only the last position asks."""
    return Example(np.arange(1, length + 1), np.full(length, length), np.arange(length) == length - 1)


@pytest.mark.parametrize(
    ("bits", "parities"),
    [
        ([0, 0, 0], [0, 0, 0]),
        ([1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1, 0]),
        ([1, 1, 1, 1, 1], [1, 0, 1, 0, 1]),
    ],
)
def test_parity_of_known_bits(bits, parities):
    example = draw_parity(Bits(bits), len(bits))
    np.testing.assert_array_equal(example.inputs, bits)
    np.testing.assert_array_equal(example.targets, parities)
    assert example.mask.all()


def test_bits_are_fair():
    bits = draw_parity(np.random.default_rng(0), 10_000).inputs
    assert set(bits) == {0, 1}
    assert abs(bits.mean() - 0.5) < 0.02


def test_recall_of_a_known_draw():
    inputs, targets, mask = RECALL(np.random.default_rng(2), 12)
    np.testing.assert_array_equal(inputs, [3, 7, 5, 9, 4, 7, 5, 0, 3, 0, 4, 0])
    np.testing.assert_array_equal(targets, [0, 0, 0, 0, 0, 0, 9, 0, 7, 0, 7, 0])
    np.testing.assert_array_equal(mask, targets > 0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [9, 10, 17])
def test_each_key_is_asked_for_once_and_answered_with_its_value(seed, length):
    inputs, targets, mask = RECALL(np.random.default_rng(seed), length)
    keys, values, rest = inputs[0:6:2], inputs[1:6:2], inputs[6:]
    assert len(set(keys)) == 3
    assert set(keys) <= set(range(1, 6))
    assert set(values) <= set(range(6, 10))
    assert sorted(rest[rest > 0]) == sorted(keys)
    np.testing.assert_array_equal(mask, np.concatenate([np.zeros(6, bool), rest > 0]))
    answers = dict(zip(keys, values, strict=True))
    np.testing.assert_array_equal(
        targets, [answers[token] if asks else 0 for token, asks in zip(inputs, mask, strict=True)]
    )


def test_queries_come_in_any_order_and_at_any_place():
    draws = [RECALL(np.random.default_rng(seed), 12) for seed in range(200)]
    places = [np.flatnonzero(example.mask) for example in draws]
    assert set(np.concatenate(places)) == set(range(6, 12))
    orders = {tuple(np.argsort(example.inputs[example.mask])) for example in draws}
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("length", "changes"), [(8, {}), (12, {"num_pairs": 0}), (30, {"num_pairs": 6})], ids=["short", "none", "few keys"]
)
def test_recall_refuses_pairs_that_do_not_fit(length, changes):
    with pytest.raises(ValueError, match="num_pairs is"):
        RECALL(np.random.default_rng(0), length, **changes)


@TASKS
def test_a_seed_decides_every_batch(task):
    draw = functools.partial(draw_batch, task, batch_size=4, min_length=9, max_length=11)
    first, again, other = (np.random.default_rng(seed) for seed in (1, 1, 2))
    for _ in range(2):
        batch = draw(generator=first)
        same, different = draw(generator=again), draw(generator=other)
        np.testing.assert_array_equal(batch.inputs, same.inputs)
        np.testing.assert_array_equal(batch.targets, same.targets)
        assert (batch.inputs != different.inputs).any()


@TASKS
def test_rows_differ(task):
    batch = draw_batch(task, np.random.default_rng(0), 16, min_length=12, max_length=12)
    assert len({row.tobytes() for row in batch.inputs}) > 12


def test_rows_are_padded_and_the_segmentation_says_where():
    batch = draw_batch(count_up, np.random.default_rng(0), 50, min_length=2, max_length=5)
    lengths = batch.inputs.max(axis=1)
    assert set(lengths) == {2, 3, 4, 5}
    column = np.arange(5)
    inside, last = column < lengths[:, None], column == lengths[:, None] - 1
    np.testing.assert_array_equal(batch.inputs, np.where(inside, column + 1, 0))
    np.testing.assert_array_equal(batch.targets, np.where(inside, lengths[:, None], 0))
    np.testing.assert_array_equal(batch.inputs_segmentation, inside)
    np.testing.assert_array_equal(batch.targets_segmentation, last)
    for position in (batch.inputs_position, batch.targets_position):
        np.testing.assert_array_equal(position, np.where(inside, column, 0))
    leaves = (batch.inputs, batch.targets, batch.inputs_position, batch.targets_segmentation)
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.int32)}


@pytest.mark.parametrize("lengths", [(0, 4), (5, 4)])
def test_a_batch_refuses_lengths_out_of_order(lengths):
    with pytest.raises(ValueError, match="min_length is"):
        draw_batch(draw_parity, np.random.default_rng(0), 2, min_length=lengths[0], max_length=lengths[1])
