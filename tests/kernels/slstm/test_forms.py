"""All forms of the sLSTM against the recurrence in float64, with the gradients of every input and of the states."""

import dataclasses
import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.kernels.shared.log_once import log_once
from xlstm_jax.kernels.slstm import SLSTMState, empty_state, slstm, slstm_step
from xlstm_jax.kernels.slstm.arg_specs import SMALL, ArgSpec

pytestmark = pytest.mark.slow

FORMS = ["reference", "recompute"]
compiled = jax.jit(slstm, static_argnames=("return_state", "backend"))


def outputs_and_gradients(arguments, state, resets, mask, projections, form):
    def loss(arguments, state):
        outputs, last = slstm(*arguments, state=state, resets=resets, mask=mask, return_state=True, backend=form)
        parts = (outputs, *last)
        return sum(jnp.sum(x * projection) for x, projection in zip(parts, projections, strict=True)), parts

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments, state)


# Nobody trains in float64: where the rest is compiled as users have it, these programs still are not optimised.
OPTIONS = {"float32": None, "float64": {"xla_backend_optimization_level": 0}}
PROGRAMS = {
    dtype: jax.jit(outputs_and_gradients, static_argnames="form", compiler_options=options)
    for dtype, options in OPTIONS.items()
}


@functools.cache
def everything(spec, form, dtype="float64", with_state=True, reset_rate=0.0, mask_rate=0.0):
    """Return outputs and the last state, and the gradients of a random projection of all of them.

    The inputs are float32 numbers, whatever the precision of the computation.
    """
    with jax.enable_x64(True):
        arguments = spec.arguments(jax.random.key(0), "float32")
        state = spec.state(jax.random.key(1), "float32") if with_state else None
        draw = np.random.default_rng(0)
        rows, cells = (spec.batch_size, spec.length), (spec.num_heads, spec.head_dim)
        resets = draw.random(rows) < reset_rate if reset_rate else None
        mask = draw.random(rows) > mask_rate if mask_rate else None
        shapes = [(*rows, *cells)] + [(spec.batch_size, *cells)] * 4
        projections = [draw.standard_normal(shape, "float32") for shape in shapes]
        inputs = jax.tree.map(lambda x: jnp.asarray(x, dtype), (arguments, state, projections))
        (arguments, state, projections) = inputs
        gradients, outputs = PROGRAMS[dtype](arguments, state, resets, mask, projections, form)
        named = dict(zip(["outputs", *SLSTMState._fields], outputs, strict=True))
        named |= dict(zip(["dgates", "drecurrent"], gradients[0], strict=True))
        if with_state:
            named |= {f"dstate.{name}": x for name, x in gradients[1]._asdict().items()}
        return jax.device_get(named)


VARIANTS = {
    "plain": {},
    "from an empty state": {"with_state": False},
    "documents": {"reset_rate": 0.2},
    "masked": {"mask_rate": 0.3},
    "masked documents": {"reset_rate": 0.2, "mask_rate": 0.3},
    "masked documents from an empty state": {"with_state": False, "reset_rate": 0.2, "mask_rate": 0.3},
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, "plain") for name in SMALL] + [("several tokens", variant) for variant in VARIANTS if variant != "plain"],
)
def test_recomputing_gives_the_reference_and_all_its_gradients(name, variant):
    expected = everything(SMALL[name], "reference", **VARIANTS[variant])
    assert_close(everything(SMALL[name], "recompute", **VARIANTS[variant]), expected, dtype="float64")


@pytest.mark.parametrize(
    ("name", "variant"), [(name, "plain") for name in SMALL] + [("several tokens", "masked documents")]
)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_in_float32_is_within_1e_4_of_float64_in_every_gradient(form, name, variant):
    actual = everything(SMALL[name], form, dtype="float32", **VARIANTS[variant])
    assert_close_by_norm(actual, everything(SMALL[name], "reference", **VARIANTS[variant]), relative=1e-4)


def test_the_gradients_of_the_reference_are_the_slopes_of_its_outputs(float64, key):
    """Central differences along a random direction."""
    spec, draw = SMALL["several tokens"], np.random.default_rng(0)
    inputs = *spec.arguments(key, float64), spec.state(key, float64)
    direction = jax.tree.map(lambda x: draw.standard_normal(x.shape), inputs)
    # The stabiliser has no gradient, as it is the choice of units and not part of a value: it stays.
    direction[2].stabilizer[:] = 0.0

    @jax.jit
    @jax.value_and_grad
    def loss(inputs):
        gates, recurrent, state = inputs
        return jnp.sum(jnp.sin(slstm(gates, recurrent, state=state, backend="reference")))

    _, gradients = loss(inputs)
    above, _ = loss(jax.tree.map(lambda x, d: x + 1e-5 * d, inputs, direction))
    below, _ = loss(jax.tree.map(lambda x, d: x - 1e-5 * d, inputs, direction))
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), gradients, direction)))
    np.testing.assert_allclose(slope, (above - below) / 2e-5, rtol=1e-7)


@pytest.mark.parametrize("border", [1, 8, 16])
@pytest.mark.parametrize("form", FORMS)
def test_a_split_sequence_gives_the_same_result_as_a_whole_one(form, border, float64, key):
    spec = SMALL["several tokens"]
    gates, recurrent = spec.arguments(key, float64)
    options = {"return_state": True, "backend": form}
    whole, end = compiled(gates, recurrent, **options)
    first, middle = compiled(gates[:, :border], recurrent, **options)
    second, end_of_second = compiled(gates[:, border:], recurrent, state=middle, **options)
    assert_close(jnp.concatenate([first, second], axis=1), whole, dtype=float64)
    assert_close(end_of_second, end, dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow_through_the_state_between_two_parts(form, float64, key):
    spec = SMALL["several tokens"]
    arguments = spec.arguments(key, float64)

    def loss(arguments, borders):
        (gates, recurrent), state, total = arguments, None, 0.0
        for start, stop in zip((0, *borders), (*borders, spec.length), strict=True):
            hidden, state = slstm(gates[:, start:stop], recurrent, state=state, return_state=True, backend=form)
            total += jnp.sum(jnp.sin(hidden))
        return total

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_close(gradient(arguments, (3, 10)), gradient(arguments, ()), dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_give_the_results_of_separate_ones(form, float64, key):
    spec = SMALL["several tokens"]
    arguments = spec.arguments(key, float64)
    borders = (0, 4, 5, spec.length)
    resets = jnp.zeros((spec.batch_size, spec.length), bool).at[:, jnp.array(borders[1:-1])].set(True)
    run = functools.partial(slstm, return_state=True, backend=form)

    def packed(arguments):
        hidden, state = run(*arguments, resets=resets)
        return jnp.sum(jnp.sin(hidden)), (hidden, state)

    def separate(arguments):
        gates, recurrent = arguments
        parts = [run(gates[:, a:b], recurrent) for a, b in itertools.pairwise(borders)]
        hidden = jnp.concatenate([hidden for hidden, _ in parts], axis=1)
        return jnp.sum(jnp.sin(hidden)), (hidden, parts[-1][1])

    actual, expected = (jax.jit(jax.grad(f, has_aux=True))(arguments) for f in (packed, separate))
    assert_close(actual, expected, dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_document_that_begins_at_once_drops_the_initial_state(form, key):
    spec = SMALL["several tokens"]
    arguments, state = spec.arguments(key), spec.state(key)
    resets = jnp.zeros((spec.batch_size, spec.length), bool).at[:, 0].set(True)
    options = {"return_state": True, "backend": form}
    assert_close(compiled(*arguments, state=state, resets=resets, **options), compiled(*arguments, **options))


@pytest.mark.parametrize("form", FORMS)
def test_masked_positions_count_as_if_they_were_cut_out(form, float64, key):
    spec = SMALL["several tokens"]
    (gates, recurrent), state = spec.arguments(key, float64), spec.state(key, float64)
    kept = jnp.array([1, 2, 5, 7, 13])
    mask = jnp.zeros((spec.batch_size, spec.length), bool).at[:, kept].set(True)
    run = functools.partial(slstm, recurrent=recurrent, state=state, return_state=True, backend=form)

    def loss(gates, mask):
        hidden, last = run(gates, mask=mask)
        return jnp.sum(jnp.sin(hidden)) + jnp.sum(last.cell), (hidden, last)

    gradient_of = jax.jit(jax.grad(loss, has_aux=True))
    gradient, (hidden, last) = gradient_of(gates, mask)
    gradient_of_cut, (hidden_of_cut, last_of_cut) = gradient_of(gates[:, kept], None)
    assert_close(last, last_of_cut, dtype=float64)
    for whole, cut in ((hidden, hidden_of_cut), (gradient, gradient_of_cut)):
        assert_close(whole, jnp.zeros_like(whole).at[:, kept].set(cut), dtype=float64)


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_masked_positions_reaches_no_result_and_no_gradient(form, key):
    spec = SMALL["several tokens"]
    arguments, state = spec.arguments(key), spec.state(key)
    mask = jax.random.bernoulli(key, 0.6, (spec.batch_size, spec.length))

    @jax.jit
    def gradients(arguments, state):
        def loss(arguments, state):
            hidden, last = slstm(*arguments, state=state, mask=mask, return_state=True, backend=form)
            return jnp.sum(jnp.sin(hidden)) + jnp.sum(last.cell), (hidden, last)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments, state)

    gates, recurrent = arguments
    poisoned = jnp.where(mask[..., None, None, None], gates, jnp.nan), recurrent
    assert not mask.all()
    assert_close(gradients(poisoned, state), gradients(arguments, state))


@pytest.mark.parametrize("form", FORMS)
def test_a_masked_position_can_begin_a_document(form, key):
    spec = SMALL["several tokens"]
    arguments, state = spec.arguments(key), spec.state(key)
    begins = jnp.zeros((spec.batch_size, spec.length), bool).at[:, 0].set(True)
    run = functools.partial(slstm, *arguments, backend=form, mask=~begins)
    assert_close(run(state=state, resets=begins), run())
    assert np.abs(run(state=state) - run()).max() > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_of_masked_positions_returns_its_state(form, key):
    spec = SMALL["several tokens"]
    state = spec.state(key)
    mask = jnp.zeros((spec.batch_size, spec.length), bool)
    hidden, last = slstm(*spec.arguments(key), state=state, mask=mask, return_state=True, backend=form)
    assert_close(last, state)
    assert not hidden.any()


@pytest.mark.parametrize("form", FORMS)
def test_steps_one_by_one_give_the_whole_sequence(form, key):
    spec = SMALL["several tokens"]
    (gates, recurrent), state = spec.arguments(key), spec.state(key)
    whole, end = slstm(gates, recurrent, state=state, return_state=True, backend=form)
    step, steps = jax.jit(slstm_step), []
    for position in range(spec.length):
        hidden, state = step(gates[:, position], recurrent, state)
        steps.append(hidden)
    assert_close(jnp.stack(steps, axis=1), whole)
    assert_close(state, end)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("igate", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("fgate", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("form", FORMS)
def test_extreme_gates_give_the_finite_results_of_float64(form, fgate, igate, with_state):
    spec = dataclasses.replace(SMALL["several tokens"], igate_mean=igate, fgate_mean=fgate)
    expected = everything(spec, "reference", with_state=with_state)
    actual = everything(spec, form, dtype="float32", with_state=with_state)
    assert all(np.isfinite(x).all() for x in actual.values())
    assert_close_by_norm(actual, expected, relative=1e-4, at_least=1.0)


@pytest.mark.parametrize("form", FORMS)
def test_gates_that_jump_between_extremes_give_the_results_of_float64(form, key):
    gates, recurrent = SMALL["several tokens"].arguments(key)
    gates = 50.0 * jnp.sign(gates.at[:, :, 1].add(-3.0))
    actual = slstm(gates, recurrent, backend=form)
    with jax.enable_x64(True):
        expected = slstm(gates.astype("float64"), recurrent.astype("float64"), backend="reference")
    assert_close(actual, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_first_token_beyond_the_range_of_the_exponential_has_finite_gradients(form, key):
    gates, recurrent = SMALL["several tokens"].arguments(key)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(gates, recurrent):
        return jnp.sum(jnp.sin(slstm(gates, recurrent, backend=form)))

    for gate in (-1e4, -100.0, 100.0, 1e4):
        for gradient in gradients(gates.at[:, 0, 0].add(gate), recurrent):
            assert np.isfinite(gradient).all(), gate
            assert np.abs(gradient).max() > 1e-3, gate


@pytest.mark.parametrize("form", FORMS)
def test_a_form_in_bfloat16_has_small_errors_beside_float32(form, key):
    arguments = ArgSpec(2, 48, 2, 16).arguments(key, jnp.bfloat16)

    def gradients(arguments, form):
        def loss(arguments):
            hidden = slstm(*arguments, backend=form)
            return jnp.sum(jnp.sin(hidden.astype(jnp.float32))), hidden

        return jax.jit(jax.grad(loss, has_aux=True))(arguments)

    actual = gradients(arguments, form)
    expected = gradients(tuple(x.astype(jnp.float32) for x in arguments), "reference")
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(actual))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        error = np.asarray(a, np.float64) - np.asarray(e, np.float64)
        assert np.sqrt(np.mean(error**2)) < 2e-2 * np.sqrt(np.mean(np.asarray(e, np.float64) ** 2))


@pytest.mark.parametrize("fgate", [-5.0, 9.0])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_bfloat16_are_within_1e_2_of_float64(form, fgate, key):
    arguments = ArgSpec(1, 128, 1, 64, fgate_mean=fgate).arguments(key, jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (1, 128, 1, 64), jnp.bfloat16)

    def gradients(arguments, weights):
        run = functools.partial(slstm, backend=form if weights.dtype == jnp.bfloat16 else "reference")
        hidden, backward = jax.vjp(run, *arguments)
        return backward(weights.astype(hidden.dtype))

    actual = jax.jit(gradients)(arguments, weights)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype("float64"), (arguments, weights))
        expected = jax.jit(gradients)(*exact)
    names = ["gates", "recurrent"]
    named = (dict(zip(names, x, strict=True)) for x in (actual, expected))
    assert_close_by_norm(*named, relative=1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_or_head_full_of_nan_stays_alone(form, key):
    spec = SMALL["several tokens"]
    gates, recurrent = spec.arguments(key)

    def outputs_and_gradient(gates):
        def loss(gates):
            hidden = slstm(gates, recurrent, backend=form)
            return jnp.sum(jnp.sin(hidden)), hidden

        gradient, hidden = jax.grad(loss, has_aux=True)(gates)
        return hidden, jnp.moveaxis(gradient, 2, -1)

    clean, poisoned = outputs_and_gradient(gates), outputs_and_gradient(gates.at[1, :, :, 1].set(jnp.nan))
    assert np.isnan(poisoned[0][1, :, 1]).all()
    others = jnp.ones((spec.batch_size, spec.num_heads), bool).at[1, 1].set(False)
    assert_close(*([jnp.moveaxis(x, 1, 2)[others] for x in results] for results in (poisoned, clean)))


@pytest.mark.parametrize("form", FORMS)
def test_no_output_depends_on_a_later_token(form, key):
    gates, recurrent = SMALL["several tokens"].arguments(key)
    changed, unchanged = (compiled(x, recurrent, backend=form) for x in (gates.at[:, 11:].add(1.0), gates))
    assert_close(changed[:, :11], unchanged[:, :11])
    assert np.abs(changed[:, 11] - unchanged[:, 11]).max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_heads_do_not_see_each_other(form, key):
    gates, recurrent = SMALL["several tokens"].arguments(key)
    changed, unchanged = (compiled(x, recurrent, backend=form) for x in (gates.at[:, :, :, 1].add(1.0), gates))
    assert_close(changed[:, :, 0], unchanged[:, :, 0])
    assert np.abs(changed[:, :, 1] - unchanged[:, :, 1]).max() > 0.1


def test_recomputing_keeps_nothing_but_the_inputs_and_the_hidden_states(key):
    spec = SMALL["several tokens"]
    arguments = *spec.arguments(key), spec.state(key)

    def kept_beside_inputs(form):
        def forward(gates, recurrent, state):
            return jax.vjp(lambda *a: slstm(a[0], a[1], state=a[2], backend=form), gates, recurrent, state)[1]

        kept = sum(x.size for x in jax.tree.leaves(jax.eval_shape(forward, *arguments)))
        return kept - sum(x.size for x in jax.tree.leaves(arguments))

    hidden_states = spec.batch_size * spec.length * spec.num_heads * spec.head_dim
    assert kept_beside_inputs("recompute") == hidden_states
    assert kept_beside_inputs("reference") > 5 * hidden_states


def test_auto_is_a_form_that_works_everywhere(key):
    arguments = SMALL["several tokens"].arguments(key)
    assert_close(slstm(*arguments), slstm(*arguments, backend="reference"))


def test_auto_says_once_what_it_picks(caplog, key):
    arguments = SMALL["several tokens"].arguments(key)
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="xlstm_jax.kernels.slstm.api"):
        for backend in ("reference", "auto", "auto"):
            slstm(*arguments, backend=backend)
    (record,) = caplog.records
    assert record.message.startswith("sLSTM: a scan that keeps only hidden states")


def test_the_law_is_the_equation(key):
    """Two tokens by hand, without a stabiliser."""
    arguments = ArgSpec(1, 2, 1, 3).arguments(key)
    gates, recurrent = np.asarray(arguments[0][0, :, :, 0], np.float64), np.asarray(arguments[1][0], np.float64)
    hidden, cell, normalizer, expected = np.zeros(3), np.zeros(3), np.zeros(3), []
    for token in gates:
        igate, fgate, cell_input, output = token + np.einsum("d,dge->ge", hidden, recurrent)
        forget, write = 1 / (1 + np.exp(-fgate)), np.exp(igate)
        cell = forget * cell + write * np.tanh(cell_input)
        normalizer = forget * normalizer + write
        hidden = cell / normalizer / (1 + np.exp(-output))
        expected.append(hidden)
    assert_close(slstm(*arguments, backend="reference")[0, :, 0], np.stack(expected))


def call(**changes):
    return slstm(**({"gates": jnp.zeros((2, 5, 4, 3, 4)), "recurrent": jnp.zeros((3, 4, 4, 4))} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": jnp.zeros((2, 5, 3, 3, 4))}, r"gates has shape \(2, 5, 3, 3, 4\), but must be"),
        ({"gates": jnp.zeros((2, 5, 4, 4))}, r"gates has shape \(2, 5, 4, 4\), but must be"),
        ({"gates": jnp.zeros((2, 0, 4, 3, 4))}, "no positions"),
        ({"recurrent": jnp.zeros((3, 4, 4, 5))}, r"recurrent has shape \(3, 4, 4, 5\).* need \(3, 4, 4, 4\)"),
        ({"state": empty_state(1, 3, 4)}, r"state.hidden has shape \(1, 3, 4\).* need \(2, 3, 4\)"),
        ({"resets": jnp.zeros((1, 5), bool)}, r"resets has shape \(1, 5\).* need \(2, 5\)"),
        ({"mask": jnp.zeros((2, 4), bool)}, r"mask has shape \(2, 4\).* need \(2, 5\)"),
        ({"backend": "other"}, "no sLSTM backend 'other'"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": jnp.zeros((2, 1, 4, 3, 4))}, r"gates has shape \(2, 1, 4, 3, 4\), but must be .* for one token"),
        ({"recurrent": jnp.zeros((3, 4, 4, 5))}, r"recurrent has shape \(3, 4, 4, 5\).* need \(3, 4, 4, 4\)"),
        ({"state": empty_state(1, 3, 4)}, r"state.hidden has shape \(1, 3, 4\).* need \(2, 3, 4\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_token_that_does_not_fit_is_refused(changes, message):
    arguments = {"gates": jnp.zeros((2, 4, 3, 4)), "recurrent": jnp.zeros((3, 4, 4, 4)), "state": empty_state(2, 3, 4)}
    with pytest.raises(ValueError, match=message):
        slstm_step(**(arguments | changes))


def test_the_state_is_a_tree_of_four_arrays():
    state = empty_state(2, 3, 4, jnp.float32)
    assert isinstance(state, SLSTMState)
    assert [x.shape for x in jax.tree.leaves(state)] == [(2, 3, 4)] * 4
