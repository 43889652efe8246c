"""NaN goes where a recurrence carries it, and nowhere else: not back in time, not into another document.

In the parallel and the chunkwise mLSTM, keys and values are operands of products over a whole chunk, in which those
that do not count have a weight of zero; NaN times zero is NaN. There it stays within its chunk, and there are no
promises between documents.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.slstm import slstm
from xlstm_jax.kernels.slstm.arg_specs import SMALL

MLSTM = ArgSpec(2, 23, 2, 4, 6)
SLSTM = SMALL["several tokens"]
CHUNK_SIZE = 8
NAMES = ("q", "k", "v", "igate", "fgate")
of_mlstm_forms = pytest.mark.parametrize("form", ["reference", "parallel", "chunkwise"])
of_slstm_forms = pytest.mark.parametrize("form", ["reference", "recompute"])


def poisoned(arguments, positions, names=NAMES):
    """Put NaN into some positions of some arguments."""
    pairs = zip(NAMES, arguments, strict=True)
    return tuple(x.at[:, positions].set(jnp.nan) if name in names else x for name, x in pairs)


def outputs_and_gradients(run, arguments, counted):
    """Return the outputs at some positions, and the gradients there of a loss that sees no others."""

    def loss(arguments):
        hidden = run(*arguments)[:, counted]
        return jnp.sum(jnp.sin(hidden)), hidden

    gradients, hidden = jax.jit(jax.grad(loss, has_aux=True))(arguments)
    return hidden, tuple(x[:, counted] for x in gradients)


@of_mlstm_forms
def test_queries_and_gates_of_the_mlstm_change_no_earlier_output(form, key):
    arguments = MLSTM.arguments(key)
    run = jax.jit(functools.partial(mlstm, backend=form, chunk_size=CHUNK_SIZE))
    changed = run(*poisoned(arguments, slice(11, None), ("q", "igate", "fgate")))
    assert np.isnan(changed[:, 11:]).all()
    assert_close(changed[:, :11], run(*arguments)[:, :11])


@pytest.mark.parametrize(("form", "start"), [("reference", 11), ("chunkwise", 8), ("chunkwise", 16)])
def test_nothing_of_the_mlstm_changes_an_earlier_output_or_chunk(form, start, key):
    arguments = MLSTM.arguments(key)
    run = jax.jit(functools.partial(mlstm, backend=form, chunk_size=CHUNK_SIZE))
    changed = run(*poisoned(arguments, slice(start, None)))
    assert np.isnan(changed[:, start:]).all()
    assert_close(changed[:, :start], run(*arguments)[:, :start])


def test_a_document_of_the_mlstm_is_untouched_by_the_one_before(key):
    arguments = MLSTM.arguments(key)
    resets = jnp.zeros((MLSTM.batch_size, MLSTM.length), bool).at[:, 13].set(True)
    run = functools.partial(mlstm, resets=resets, backend="reference")
    counted = slice(13, None)
    actual = outputs_and_gradients(run, poisoned(arguments, slice(13)), counted)
    assert_close(actual, outputs_and_gradients(run, arguments, counted))


@of_mlstm_forms
def test_what_pads_a_sequence_leaves_no_trace(form, key):
    """Positions are added up to a multiple of the chunk size; their gates are infinite, and never seen."""
    arguments = MLSTM.arguments(key)
    results = [
        outputs_and_gradients(functools.partial(mlstm, backend=form, chunk_size=chunk_size), arguments, slice(None))
        for chunk_size in (CHUNK_SIZE, MLSTM.length, 1)
    ]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))
    for other in results[1:]:
        for a, e in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            assert np.linalg.norm(a - e) <= 1e-4 * np.linalg.norm(e)


@of_slstm_forms
def test_nothing_of_the_slstm_changes_an_earlier_output(form, key):
    gates, recurrent = SLSTM.arguments(key)
    run = jax.jit(functools.partial(slstm, recurrent=recurrent, backend=form))
    changed = run(gates.at[:, 9:].set(jnp.nan))
    assert np.isnan(changed[:, 9:]).all()
    assert_close(changed[:, :9], run(gates)[:, :9])


@of_slstm_forms
def test_a_document_of_the_slstm_is_untouched_by_the_one_before(form, key):
    gates, recurrent = SLSTM.arguments(key)
    resets = jnp.zeros((SLSTM.batch_size, SLSTM.length), bool).at[:, 9].set(True)
    run = functools.partial(slstm, recurrent=recurrent, resets=resets, backend=form)
    actual = outputs_and_gradients(run, (gates.at[:, :9].set(jnp.nan),), slice(9, None))
    assert_close(actual, outputs_and_gradients(run, (gates,), slice(9, None)))


@of_slstm_forms
def test_masked_positions_of_the_slstm_reach_nothing_even_between_documents(form, key):
    gates, recurrent = SLSTM.arguments(key)
    rows = (SLSTM.batch_size, SLSTM.length)
    resets = jnp.zeros(rows, bool).at[:, jnp.array([6, 12])].set(True)
    mask = jnp.ones(rows, bool).at[:, 4:7].set(False).at[:, 15:].set(False)

    @jax.jit
    def gradients(gates, recurrent):
        def loss(gates, recurrent):
            hidden, last = slstm(gates, recurrent, resets=resets, mask=mask, return_state=True, backend=form)
            return jnp.sum(jnp.sin(hidden)) + jnp.sum(last.cell), (hidden, last)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(gates, recurrent)

    gates_with_nan = jnp.where(mask[..., None, None, None], gates, jnp.nan)
    assert_close(gradients(gates_with_nan, recurrent), gradients(gates, recurrent))
