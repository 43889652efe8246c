"""All forms of the mLSTM against the recurrence in float64, with the gradients of every input and of the states."""

import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.mlstm.recurrence import recurrence
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.kernels.mlstm import MLSTMState, empty_state, mlstm, mlstm_step
from xlstm_jax.kernels.mlstm.arg_specs import SMALL, ArgSpec
from xlstm_jax.kernels.shared.log_once import log_once

pytestmark = pytest.mark.slow

FORMS = ["reference", "parallel", "chunkwise"]
FAST_FORMS = ["parallel", "chunkwise"]
PARTS = ["hidden", "memory", "normalizer", "stabilizer"]
INPUTS = ["q", "k", "v", "igate", "fgate"]
compiled = jax.jit(mlstm, static_argnames=("return_state", "chunk_size", "backend", "input_gate"))


def outputs_and_gradients(arguments, state, resets, projections, form, chunk_size, input_gate):
    def loss(arguments, state):
        hidden, last = mlstm(
            *arguments,
            state=state,
            return_state=True,
            resets=resets,
            chunk_size=chunk_size,
            backend=form,
            input_gate=input_gate,
        )
        parts = zip((hidden, last.memory, last.normalizer), projections, strict=True)
        return sum(jnp.sum(part * projection) for part, projection in parts), (hidden, *last)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments, state)


# Nobody trains in float64: where the rest is compiled as users have it, these programs still are not optimised.
OPTIONS = {"float32": None, "float64": {"xla_backend_optimization_level": 0}}
PROGRAMS = {
    dtype: jax.jit(
        outputs_and_gradients, static_argnames=("form", "chunk_size", "input_gate"), compiler_options=options
    )
    for dtype, options in OPTIONS.items()
}


@functools.cache
def everything(spec, form, dtype="float64", input_gate="exp", with_state=True, reset_rate=0.0, chunk_size=None):
    """Return outputs and the last state, and the gradients of a random projection of all of them.

    The inputs are float32 numbers, whatever the precision of the computation.
    """
    with jax.enable_x64(True):
        arguments, state = spec.arguments(jax.random.key(0)), spec.state(jax.random.key(1))
        shape = (spec.batch_size, spec.length)
        resets = jax.random.bernoulli(jax.random.key(2), reset_rate, shape) if reset_rate else None
        projections = [
            jax.random.normal(jax.random.key(3 + i), x.shape, "float32")
            for i, x in enumerate((arguments[2], state.memory, state.normalizer))
        ]
        inputs = jax.tree.map(lambda x: x.astype(dtype), (arguments, state if with_state else None, projections))
        arguments, state, projections = inputs
        gradients, outputs = PROGRAMS[dtype](
            arguments, state, resets, projections, form, chunk_size or spec.chunk_size, input_gate
        )
        named = dict(zip(PARTS, outputs, strict=True)) | dict(zip(INPUTS, gradients[0], strict=True))
        if with_state:
            named |= {f"state.{name}": x for name, x in gradients[1]._asdict().items()}
        return jax.device_get(named)


VARIANTS = {
    "plain": {},
    "sigmoid input gate": {"input_gate": "sigmoid"},
    "from an empty state": {"with_state": False},
    "documents": {"reset_rate": 0.2},
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, "plain") for name in SMALL]
    + [(name, variant) for name in ("prime length", "much is forgotten") for variant in VARIANTS if variant != "plain"],
)
@pytest.mark.parametrize("form", FAST_FORMS)
def test_a_form_computes_the_reference_and_all_its_gradients(form, name, variant):
    expected = everything(SMALL[name], "reference", **VARIANTS[variant])
    assert_close(everything(SMALL[name], form, **VARIANTS[variant]), expected, dtype="float64")


@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("form", FAST_FORMS)
def test_a_form_in_float32_is_within_1e_4_of_float64_in_every_gradient(form, spec):
    assert_close_by_norm(everything(spec, form, dtype="float32"), everything(spec, "reference"), relative=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 16, 23, 100])
def test_the_chunk_size_changes_nothing(chunk_size):
    spec = SMALL["prime length"]
    expected = everything(spec, "reference", reset_rate=0.2)
    actual = everything(spec, "chunkwise", reset_rate=0.2, chunk_size=chunk_size)
    assert_close(actual, expected, dtype="float64")


@pytest.mark.parametrize("has_documents", [False, True])
def test_how_much_was_forgotten_long_ago_does_not_make_what_is_kept_inexact(has_documents, key):
    spec, middle = ArgSpec(1, 2048, 2, 8, 8, igate_mean=-10.0), 1024
    *inputs, fgate = spec.arguments(key)
    inputs = *inputs, fgate + jnp.where(jnp.arange(2048) < middle, -6.0, 5.0)[:, None]
    resets = (jnp.arange(2048) == middle)[None] if has_documents else None
    actual = compiled(*inputs, resets=resets, chunk_size=64, backend="chunkwise")
    with jax.enable_x64(True):
        expected = compiled(*(x.astype("float64") for x in inputs), resets=resets, backend="reference")
    kept = slice(middle + 64, None)
    assert_close_by_norm({"hidden": actual[:, kept]}, {"hidden": expected[:, kept]}, relative=1e-5)


@pytest.mark.parametrize(("form", "chunk_size"), [("parallel", 64), ("chunkwise", 100)])
def test_strong_forgetting_within_a_chunk_does_not_make_results_inexact(form, chunk_size, key):
    arguments = ArgSpec(1, 707, 2, 4, 4, fgate_mean=-60.0).arguments(key)
    expected, _, _ = recurrence(arguments, jnp.zeros_like(arguments[2]), eps=1e-6)
    actual = compiled(*arguments, backend=form, chunk_size=chunk_size)
    assert_close(actual, expected)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_exact_for_a_large_eps(form, float64, key):
    spec = SMALL["prime length"]
    arguments, state, weights = spec.arguments(key, float64), spec.state(key, float64), jnp.ones((1, 23, 2, 6), float64)
    run = functools.partial(mlstm, state=state, backend=form, chunk_size=8, eps=0.1)
    hidden, backward = jax.vjp(run, *arguments)
    expected_hidden, _, expected = recurrence(arguments, weights, state, eps=0.1)
    assert_close(hidden, expected_hidden, dtype=float64)
    assert_close(backward(weights), tuple(expected[:5]), dtype=float64)


@pytest.mark.parametrize("border", [1, 8, 13])
@pytest.mark.parametrize("form", FORMS)
def test_a_split_sequence_gives_the_same_result_as_a_whole_one(form, border, float64, key):
    spec = SMALL["prime length"]
    arguments = spec.arguments(key, float64)
    options = {"return_state": True, "backend": form, "chunk_size": 8}
    whole, end = compiled(*arguments, **options)
    first, middle = compiled(*(x[:, :border] for x in arguments), **options)
    second, end_of_second = compiled(*(x[:, border:] for x in arguments), state=middle, **options)
    assert_close(jnp.concatenate([first, second], axis=1), whole, dtype=float64)
    assert_close(end_of_second, end, dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow_through_the_state_between_two_parts(form, float64, key):
    spec = SMALL["prime length"]
    arguments = spec.arguments(key, float64)
    # The gradient of the stabiliser, which only `eps` makes matter, ends at a state.
    run = functools.partial(mlstm, return_state=True, backend=form, chunk_size=8, eps=0.0)

    def loss(arguments, borders):
        state, total = None, 0.0
        for start, stop in zip((0, *borders), (*borders, spec.length), strict=True):
            hidden, state = run(*(x[:, start:stop] for x in arguments), state=state)
            total += jnp.sum(jnp.sin(hidden))
        return total

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_close(gradient(arguments, (3, 14)), gradient(arguments, ()), dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_give_the_results_of_separate_ones(form, float64, key):
    spec = SMALL["prime length"]
    arguments = spec.arguments(key, float64)
    borders = (0, 4, 5, 16, spec.length)
    resets = jnp.zeros((1, spec.length), bool).at[0, jnp.array(borders[1:-1])].set(True)
    run = functools.partial(mlstm, return_state=True, backend=form, chunk_size=8)

    def packed(arguments):
        hidden, state = run(*arguments, resets=resets)
        return jnp.sum(jnp.sin(hidden)), (hidden, state)

    def separate(arguments):
        parts = [run(*(x[:, a:b] for x in arguments)) for a, b in itertools.pairwise(borders)]
        hidden = jnp.concatenate([hidden for hidden, _ in parts], axis=1)
        return jnp.sum(jnp.sin(hidden)), (hidden, parts[-1][1])

    actual, expected = (jax.jit(jax.grad(f, has_aux=True))(arguments) for f in (packed, separate))
    assert_close(actual, expected, dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_document_that_begins_at_once_drops_the_initial_state(form, key):
    spec = SMALL["several chunks"]
    arguments, state = spec.arguments(key), spec.state(key)
    resets = jnp.zeros((spec.batch_size, spec.length), bool).at[:, 0].set(True)
    options = {"return_state": True, "backend": form, "chunk_size": 8}
    assert_close(compiled(*arguments, state=state, resets=resets, **options), compiled(*arguments, **options))


@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_steps_one_by_one_give_the_whole_sequence(input_gate, key):
    spec = SMALL["several chunks"]
    arguments, state = spec.arguments(key), spec.state(key)
    whole, end = mlstm(*arguments, state=state, return_state=True, input_gate=input_gate)
    step = jax.jit(functools.partial(mlstm_step, input_gate=input_gate))
    steps = []
    for position in range(spec.length):
        hidden, state = step(*(x[:, position] for x in arguments), state)
        steps.append(hidden)
    assert_close(jnp.stack(steps, axis=1), whole)
    assert_close(state, end)


@pytest.mark.parametrize("igate", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("fgate", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("form", FAST_FORMS)
def test_extreme_gates_give_the_finite_results_of_the_reference(form, fgate, igate):
    spec = ArgSpec(1, 20, 2, 4, 8, chunk_size=8, igate_mean=igate, fgate_mean=fgate)
    expected = everything(spec, "reference")
    actual = everything(spec, form, dtype="float32")
    assert all(np.isfinite(x).all() for x in actual.values())
    assert_close_by_norm(actual, expected, relative=1e-4, at_least=1.0)


@pytest.mark.parametrize("form", FAST_FORMS)
def test_gates_that_jump_between_extremes_give_the_results_of_the_reference(form, key):
    q, k, v, igate, _ = SMALL["prime length"].arguments(key)
    signs = jax.random.rademacher(key, (2, *igate.shape))
    arguments = q, k, v, 50.0 * signs[0], 50.0 * signs[1]
    actual, expected = (
        compiled(*arguments, return_state=True, chunk_size=8, backend=name) for name in (form, "reference")
    )
    assert_close(actual, expected, dtype="float16")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_in_bfloat16_has_small_errors_beside_float32(form, key):
    spec = ArgSpec(2, 96, 2, 16, 32, chunk_size=32, igate_mean=-3.0, fgate_mean=4.0)
    exact = spec.arguments(key)
    rounded = tuple(x.astype(jnp.bfloat16) for x in exact[:3]) + exact[3:]

    def gradients(arguments, form):
        def loss(arguments):
            hidden = mlstm(*arguments, backend=form, chunk_size=spec.chunk_size)
            return jnp.sum(jnp.sin(hidden.astype(jnp.float32))), hidden

        return jax.jit(jax.grad(loss, has_aux=True))(arguments)

    actual, expected = gradients(rounded, form), gradients(tuple(x.astype(jnp.float32) for x in rounded), "reference")
    assert actual[1].dtype == jnp.bfloat16
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        error = np.asarray(a, np.float64) - np.asarray(e, np.float64)
        assert np.sqrt(np.mean(error**2)) < 2e-2 * np.sqrt(np.mean(np.asarray(e, np.float64) ** 2))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_or_head_full_of_nan_stays_alone(form, key):
    spec = ArgSpec(2, 13, 2, 4, 6, chunk_size=8)
    arguments = spec.arguments(key)
    clean = compiled(*arguments, backend=form, chunk_size=8)
    poisoned = compiled(*(x.at[1, :, 1].set(jnp.nan) for x in arguments), backend=form, chunk_size=8)
    assert np.isnan(poisoned[1, :, 1]).all()
    assert_close(poisoned[0], clean[0])
    assert_close(poisoned[1, :, 0], clean[1, :, 0])


@pytest.mark.parametrize("form", FORMS)
def test_no_output_depends_on_a_later_token(form, key):
    arguments = SMALL["prime length"].arguments(key)
    whole = compiled(*arguments, backend=form, chunk_size=8)
    changed = compiled(*(x.at[:, 11:].add(1.0) for x in arguments), backend=form, chunk_size=8)
    assert_close(changed[:, :11], whole[:, :11])
    assert np.abs(changed[:, 11] - whole[:, 11]).max() > 0.1


def test_auto_is_a_form_that_works_everywhere(key):
    arguments = SMALL["prime length"].arguments(key)
    assert_close(mlstm(*arguments), mlstm(*arguments, backend="reference"))


def test_auto_says_once_what_it_picks(caplog, key):
    arguments = SMALL["prime length"].arguments(key)
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="xlstm_jax.kernels.mlstm.api"):
        for backend in ("reference", "auto", "auto"):
            mlstm(*arguments, backend=backend)
    (record,) = caplog.records
    assert record.message.startswith("mLSTM: the chunkwise form")


def test_the_law_is_the_equation(key):
    """Two tokens by hand, without a stabiliser."""
    q, k, v, igate, fgate = (np.asarray(x[0, :, 0], np.float64) for x in ArgSpec(1, 2, 1, 3, 2).arguments(key))
    forget, write = 1 / (1 + np.exp(-fgate)), np.exp(igate)
    memory = forget[1] * write[0] * np.outer(k[0], v[0]) + write[1] * np.outer(k[1], v[1])
    normalizer = forget[1] * write[0] * k[0] + write[1] * k[1]
    query = q[1] / np.sqrt(3)
    expected = query @ memory / max(abs(query @ normalizer), 1.0)
    arguments = ArgSpec(1, 2, 1, 3, 2).arguments(key)
    assert_close(mlstm(*arguments, backend="reference", eps=0.0)[0, 1, 0], expected)


def call(**changes):
    values = ArgSpec(2, 5, 3, 4, 6).arguments(jax.random.key(0))
    arguments = dict(zip(["q", "k", "v", "igate", "fgate"], values, strict=True))
    return mlstm(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"k": jnp.zeros((2, 5, 3, 3))}, r"k has shape \(2, 5, 3, 3\)"),
        ({"q": jnp.zeros((2, 5, 12))}, r"q has shape \(2, 5, 12\), but must be \[batch, positions, heads, head_dim\]"),
        ({"v": jnp.zeros((2, 5, 18))}, r"v has shape \(2, 5, 18\), but must be \[batch, positions, heads, head_dim\]"),
        ({"v": jnp.zeros((2, 4, 3, 6))}, r"v has shape \(2, 4, 3, 6\).* need \(2, 5, 3, 6\)"),
        ({"resets": jnp.zeros((5, 2), bool)}, r"resets has shape \(5, 2\).* need \(2, 5\)"),
        ({"igate": jnp.zeros((2, 5, 1))}, r"igate has shape \(2, 5, 1\)"),
        ({"state": empty_state(2, 3, 4, 5)}, r"state.memory has shape \(2, 3, 4, 5\).* need \(2, 3, 4, 6\)"),
        ({"input_gate": "tanh"}, "input_gate is 'tanh', but must be exp or sigmoid"),
        ({"eps": float("nan")}, "eps is nan, but must be a number of at least 0"),
        ({"eps": -1.0}, r"eps is -1\.0"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 1, 3, 4))}, r"q has shape \(2, 1, 3, 4\), but must be \[batch, heads, head_dim\]"),
        ({"k": jnp.zeros((2, 3, 6))}, r"k has shape \(2, 3, 6\).* need \(2, 3, 4\)"),
        ({"fgate": jnp.zeros((2, 1))}, r"fgate has shape \(2, 1\).* need \(2, 3\)"),
        ({"state": empty_state(1, 3, 4, 6)}, r"state.memory has shape \(1, 3, 4, 6\).* need \(2, 3, 4, 6\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_token_that_does_not_fit_is_refused(changes, message):
    shapes = {"q": (2, 3, 4), "k": (2, 3, 4), "v": (2, 3, 6), "igate": (2, 3), "fgate": (2, 3)}
    arguments = {name: jnp.zeros(shape) for name, shape in shapes.items()} | {"state": empty_state(2, 3, 4, 6)}
    with pytest.raises(ValueError, match=message):
        mlstm_step(**(arguments | changes))


def test_a_sequence_without_positions_is_refused():
    with pytest.raises(ValueError, match="no positions"):
        mlstm(*ArgSpec(2, 0, 3, 4, 6).arguments(jax.random.key(0)))


def test_the_state_is_a_tree_of_three_arrays():
    state = empty_state(2, 3, 4, 5, jnp.float32)
    assert isinstance(state, MLSTMState)
    assert [x.shape for x in jax.tree.leaves(state)] == [(2, 3, 4, 5), (2, 3, 4), (2, 3)]


@pytest.mark.parametrize("form", FAST_FORMS)
def test_long_chunks_are_right_when_compiled(form, key):
    """Large products take other paths through the compiler than those of small shapes."""
    arguments = ArgSpec(8, 256, 4, 32, 64, igate_mean=-3.0, fgate_mean=4.0).arguments(key)
    actual, expected = (compiled(*arguments, chunk_size=256, backend=backend) for backend in (form, "reference"))
    assert_close(actual, expected)
