"""The losses of the head for targets outside the vocabulary and for equal logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from meshes import BATCH, make_mesh, on_mesh

from xlstm_jax.distributed.data_parallel import sync_gradients
from xlstm_jax.models.shared.lm_head import LMHead
from xlstm_jax.models.shared.norms import RMSNorm
from xlstm_jax.utils.partitioned import unboxed

VOCAB_SIZE = 24
OUTSIDE = [-100, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, -(2**31)]
PLACE = (2, 3)
"""A position that is counted where the tests say so."""
WAYS = {
    "one device": ({}, 1000, False),
    "one device, in chunks, logits kept": ({}, 5, True),
    "dp2-tp4": ({"dp": 2, "tp": 4}, 1000, True),
    "dp2-tp4, in chunks": ({"dp": 2, "tp": 4}, 5, False),
}
every_way = pytest.mark.parametrize("way", WAYS)


@functools.cache
def program(way, scale=1.0):
    """Return `(x, targets, is_target) -> (losses, hits, dx, dkernel)`, with gradients of the losses that count."""
    sizes, tokens_per_chunk, keep_logits = WAYS[way]
    init = nn.initializers.normal(scale) if scale else nn.initializers.zeros
    head = LMHead(VOCAB_SIZE, "tp", RMSNorm, init, tokens_per_chunk=tokens_per_chunk, keep_logits=keep_logits)
    mesh = make_mesh(**sizes)

    def run(x, targets, is_target):
        def total(params, x):
            losses, hits = head.apply(params, x, targets)
            return jnp.sum(jnp.where(is_target, losses, 0)), (losses, hits)

        params = head.init(jax.random.key(0), x)
        (dparams, dx), results = jax.grad(total, argnums=(0, 1), has_aux=True)(params, x)
        dkernel = unboxed(sync_gradients(dparams, mesh.axis_names)["params"]["out_dense"]["kernel"])
        return *results, dx, dkernel

    return on_mesh(run, mesh, (BATCH, BATCH, BATCH), (BATCH, BATCH, BATCH, P(None, "tp")))


def drawn():
    """Draw features, targets, and which of them count: all but one."""
    x = jax.random.normal(jax.random.key(1), (4, 6, 8))
    targets = np.asarray(jax.random.randint(jax.random.key(2), (4, 6), 0, VOCAB_SIZE))
    is_target = np.ones((4, 6), bool)
    is_target[PLACE] = False
    return x, targets, is_target


def with_target(targets, token):
    changed = targets.copy()
    changed[PLACE] = token
    return changed


@every_way
def test_the_loss_of_a_target_outside_the_vocabulary_is_nan_and_no_other_loss_changes(way):
    x, targets, is_target = drawn()
    expected, *_ = program(way)(x, targets, is_target)
    for token in OUTSIDE:
        losses, hits, *_ = program(way)(x, with_target(targets, token), is_target)
        assert np.isnan(losses[PLACE]), token
        assert not hits[PLACE]
        np.testing.assert_array_equal(np.where(is_target, losses, 0), np.where(is_target, expected, 0))


@every_way
def test_a_target_that_does_not_count_may_be_any_number_and_changes_no_gradient(way):
    x, targets, is_target = drawn()
    expected = program(way)(x, targets, is_target)[2:]
    for token in OUTSIDE:
        dx, dkernel = program(way)(x, with_target(targets, token), is_target)[2:]
        assert not np.any(dx[PLACE])
        for actual, gradient in zip((dx, dkernel), expected, strict=True):
            np.testing.assert_array_equal(actual, gradient)


@every_way
def test_a_target_outside_the_vocabulary_that_counts_makes_gradients_nan(way):
    x, targets, is_target = drawn()
    *_, dx, dkernel = program(way)(x, with_target(targets, VOCAB_SIZE), np.ones_like(is_target))
    assert np.isnan(dx[PLACE]).all()
    assert np.isnan(dkernel).all()


@every_way
def test_of_equal_logits_the_first_is_the_largest(way):
    x, _, is_target = drawn()
    targets = np.arange(24).reshape(4, 6)
    _, hits, *_ = program(way, scale=0.0)(x, targets, is_target)
    np.testing.assert_array_equal(hits, targets == 0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
def test_targets_may_be_integers_of_any_type(dtype):
    x, targets, is_target = drawn()
    expected, *_ = program("one device")(x, targets, is_target)
    actual, *_ = program("one device")(x, with_target(targets, 100).astype(dtype), is_target)
    np.testing.assert_array_equal(np.where(is_target, actual, 0), np.where(is_target, expected, 0))
    assert np.isnan(actual[PLACE])
