"""The mLSTM in kernels for Hopper GPUs, computed by one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.mlstm.comparisons import INPUTS, OUTPUTS, assert_small, computed, drawn, errors, exact, named, rms

from xlstm_jax.kernels.mlstm import MLSTMState, mlstm
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.mlstm.hopper.tiling import HEAD_DIMS

pytestmark = pytest.mark.gpu

EASY, KEPT, STRONG, SMALL = (-3.0, 4.0), (-3.0, 8.0), (4.0, 8.0), (-10.0, 8.0)
"""Means of input and forget gates. At the first, little of a memory is left after a chunk."""
CASES = [(dims, 1000, gates) for dims in HEAD_DIMS for gates in (KEPT, STRONG)]
CASES += [((256, 512), 2048, gates) for gates in (EASY, KEPT, STRONG, SMALL)] + [((128, 256), 77, KEPT)]


def typical(x):
    """Return the geometric mean."""
    return np.exp(np.mean(np.log(np.maximum(x, 1e-12))))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dims", "length", "gates"), CASES)
def test_errors_are_those_of_plain_xla(dims, length, gates, documents, record_property):
    """Where a denominator is nearly zero, one position is most of a sequence's gradients, and its error is luck.

    Two chunk sizes of plain JAX differ by a factor of four in some sequences. Hence what is typical counts, and the
    worst only has a bound.
    """
    igate, fgate = gates
    spec = ArgSpec(4, length, 8, *dims, igate_mean=igate, fgate_mean=fgate)
    options = {"reset_rate": 0.003 * documents}
    expected = exact(spec, **options)
    ours, theirs = (errors(computed(spec, form, **options), expected) for form in ("mosaic", "chunkwise"))
    too_large = []
    for name, pair in ours.items():
        for what, a, b in zip(("norm", "worst row"), pair, theirs[name], strict=True):
            for of, limit in ((typical, 1.5), (rms, 2.0)):
                both = f"{name}, {what}, {of.__name__}: {of(a):.5f} beside {of(b):.5f}"
                record_property("errors", both)
                if of(a) > max(limit * of(b), 1e-3):  # Where plain JAX hardly rounds, both are exact.
                    too_large.append(both)
    assert not too_large, "; ".join(too_large)


@pytest.mark.parametrize(
    ("batch_size", "length", "num_heads", "dims"),
    [
        (8, 2048, 16, (128, 256)),
        (4, 2048, 32, (64, 128)),
        (8, 2048, 8, (256, 512)),
        (1, 8192, 8, (256, 512)),  # which is cut, as is the next
        (2, 8192, 3, (64, 128)),
    ],
)
def test_blocks_that_do_much_work_compute_what_plain_jax_does(batch_size, length, num_heads, dims):
    spec = ArgSpec(batch_size, length, num_heads, *dims, igate_mean=-3.0, fgate_mean=8.0)
    assert_small(computed(spec, "mosaic", with_state=False), computed(spec, "chunkwise", with_state=False))


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("length", [77, 256])
def test_a_chunk_without_memories_gives_the_bits_of_one_with_empty_memories(dims, length):
    spec = ArgSpec(40, length, 8, *dims, igate_mean=-3.0, fgate_mean=8.0)
    inputs, _, resets, dhidden, _ = drawn(spec, with_state=False, reset_rate=0.02)

    def results(return_state):
        def hidden(*inputs):
            result = mlstm(*inputs, resets=resets, backend="mosaic", return_state=return_state)
            return result[0] if return_state else result

        hidden, backward = jax.vjp(jax.jit(hidden), *inputs)
        return hidden, backward(dhidden)

    jax.tree.map(np.testing.assert_array_equal, results(True), results(False))


@pytest.mark.parametrize("dims", [(96, 192), (192, 384), (40, 48)])
def test_heads_that_are_filled_up_give_the_results_of_plain_jax(dims):
    spec = ArgSpec(4, 1000, 4, *dims, igate_mean=-3.0, fgate_mean=8.0)
    assert_small(*(computed(spec, form, reset_rate=0.003) for form in ("mosaic", "chunkwise")))


def test_two_runs_give_the_same_bits():
    spec = ArgSpec(2, 1024, 4, 256, 512, igate_mean=-3.0, fgate_mean=8.0)
    first, second = (computed(spec, "mosaic", reset_rate=0.003) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("length", [1, 100, 300])
@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_any_length_and_input_gate(length, input_gate):
    spec = ArgSpec(2, length, 2, 64, 128, igate_mean=0.0, fgate_mean=6.0)
    inputs, state, *_ = drawn(spec)
    run = functools.partial(mlstm, *inputs, state=state, return_state=True, input_gate=input_gate)
    actual, expected = (jax.jit(functools.partial(run, backend=form))() for form in ("mosaic", "chunkwise"))
    names = [*OUTPUTS, "stabilizer"]
    assert_small(*(named(names, (hidden, *last)) for hidden, last in (actual, expected)))


@pytest.mark.parametrize("igate", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("fgate", [-50.0, 0.0, 50.0])
def test_extreme_gates_give_finite_results(igate, fgate):
    spec = ArgSpec(1, 300, 2, 64, 64, igate_mean=igate, fgate_mean=fgate)
    assert all(np.isfinite(x).all() for x in computed(spec, "mosaic").values())


def test_a_head_full_of_nan_stays_alone():
    inputs, *_ = drawn(ArgSpec(2, 300, 2, 64, 64, fgate_mean=6.0))
    clean = mlstm(*inputs, backend="mosaic")
    poisoned = mlstm(*(x.at[1, :, 1].set(jnp.nan) for x in inputs), backend="mosaic")
    assert np.isnan(poisoned[1, :, 1]).all()
    assert np.array_equal(poisoned[0], clean[0])
    assert np.array_equal(poisoned[1, :, 0], clean[1, :, 0])


def test_a_split_sequence_gives_the_result_of_a_whole_one():
    inputs, *_ = drawn(ArgSpec(2, 1000, 2, 128, 128, igate_mean=0.0, fgate_mean=8.0))
    run = jax.jit(functools.partial(mlstm, return_state=True, backend="mosaic"))
    whole, end = run(*inputs)
    first, middle = run(*(x[:, :444] for x in inputs))
    second, end_of_second = run(*(x[:, 444:] for x in inputs), state=middle)
    assert isinstance(end, MLSTMState)
    joined = np.concatenate([first, second], axis=1), end_of_second.memory
    assert_small(*(named(OUTPUTS[:2], results) for results in (joined, (whole, end.memory))))


def slices(arguments, borders):
    """Cut sequences at borders."""
    return [tuple(x[:, a:b] for x in arguments) for a, b in itertools.pairwise(borders)]


def test_gradients_flow_through_the_state_between_two_parts():
    inputs, *_, weights, _ = drawn(ArgSpec(2, 1000, 2, 128, 128, igate_mean=0.0, fgate_mean=8.0))
    run = functools.partial(mlstm, return_state=True, backend="mosaic")

    def loss(inputs, borders):
        state, parts = None, []
        for part in slices(inputs, (0, *borders, 1000)):
            hidden, state = run(*part, state=state)
            parts.append(hidden)
        return jnp.sum(jnp.concatenate(parts, axis=1).astype(jnp.float32) * weights)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_small(*(named(INPUTS[:5], gradient(inputs, borders)) for borders in ((444,), ())))


def test_packed_documents_give_the_results_of_separate_ones():
    inputs, *_, weights, _ = drawn(ArgSpec(1, 1000, 2, 64, 128, igate_mean=0.0, fgate_mean=8.0))
    borders = (0, 100, 101, 600, 1000)
    resets = jnp.zeros((1, 1000), bool).at[0, jnp.array(borders[1:-1])].set(True)
    run = functools.partial(mlstm, backend="mosaic")

    def packed(inputs):
        hidden = run(*inputs, resets=resets)
        return jnp.sum(hidden.astype(jnp.float32) * weights), hidden

    def separate(inputs):
        hidden = jnp.concatenate([run(*part) for part in slices(inputs, borders)], axis=1)
        return jnp.sum(hidden.astype(jnp.float32) * weights), hidden

    results = (jax.jit(jax.grad(f, has_aux=True))(inputs) for f in (packed, separate))
    results = [named([*INPUTS[:5], "hidden"], (*gradients, hidden)) for gradients, hidden in results]
    assert_small(*results, limit=2e-2)  # as both are rounded


def test_a_document_that_begins_at_once_drops_the_initial_state():
    inputs, state, *_ = drawn(ArgSpec(2, 300, 2, 64, 64, igate_mean=0.0, fgate_mean=8.0))
    resets = jnp.zeros((2, 300), bool).at[:, 0].set(True)
    run = jax.jit(functools.partial(mlstm, backend="mosaic"))
    assert_small(*(named(["hidden"], [x]) for x in (run(*inputs, state=state, resets=resets), run(*inputs))))


def test_gates_that_jump_between_extremes_give_the_results_of_plain_jax():
    (q, k, v, igate, _), *_ = drawn(ArgSpec(1, 300, 2, 64, 64))
    signs = jax.random.rademacher(jax.random.key(5), (2, *igate.shape), igate.dtype)
    results = (mlstm(q, k, v, *(50.0 * signs), backend=form) for form in ("mosaic", "chunkwise"))
    assert_small(*(named(["hidden"], [x]) for x in results))


def test_no_output_depends_on_a_later_token():
    inputs, *_ = drawn(ArgSpec(1, 300, 2, 64, 64, igate_mean=0.0, fgate_mean=8.0))
    run = jax.jit(functools.partial(mlstm, backend="mosaic"))
    hidden, changed = (np.asarray(run(*x), np.float32) for x in (inputs, [x.at[:, 200:].add(1.0) for x in inputs]))
    assert np.array_equal(hidden[:, :200], changed[:, :200])
    assert np.abs(hidden - changed)[:, 200].max() > 0.1
