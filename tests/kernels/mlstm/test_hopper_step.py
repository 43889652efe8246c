"""The step of the mLSTM for Hopper GPUs: lowered for them, simulated on a CPU, and run where there is one."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.kernels.mlstm import MLSTMState, api, empty_state, mlstm_step, reference
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
from xlstm_jax.kernels.shared.log_once import log_once

if jax.__version_info__ < (0, 11):
    pytest.skip(f"The kernels for Hopper GPUs need jax 0.11 or newer, not {jax.__version__}", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from xlstm_jax.kernels.mlstm.hopper import step as hopper_step
from xlstm_jax.kernels.mlstm.hopper.step import mosaic_step, step_problem

HEAD_DIMS = [(64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512)]
SMALL = {
    "one head": ArgSpec(1, 1, 1, 64, 64),
    "more keys than values": ArgSpec(1, 1, 2, 96, 32),
    "rows and heads": ArgSpec(2, 1, 3, 32, 64),
    "much is forgotten": ArgSpec(2, 1, 3, 32, 64, igate_mean=4.0, fgate_mean=-8.0),
    "nothing is written": ArgSpec(2, 1, 3, 32, 64, igate_mean=-60.0, fgate_mean=8.0),
}
on_a_simulated_gpu = pytest.mark.skipif(hopper_unavailable_reason() is None, reason="the kernel itself is tested here")
simulated = functools.partial(mosaic_step, eps=1e-6, interpret=plgpu.InterpretGPUParams())
simulate = jax.jit(simulated)  # Tests share what is compiled for a shape.
compute_reference = jax.jit(functools.partial(reference.step, eps=1e-6))


def token_of(spec, dtype="float32", seed=0):
    """Draw a state and a token, with the logarithms of its gates; by NumPy, as nothing is compiled for that."""
    draw = functools.partial(np.random.default_rng(seed).standard_normal, dtype=np.float32)
    heads = spec.batch_size, spec.num_heads
    q, k, v = (jnp.asarray(draw((*heads, dim))).astype(dtype) for dim in (spec.qk_dim, spec.qk_dim, spec.v_dim))
    log_input, fgate = draw(heads) + np.float32(spec.igate_mean), draw(heads) + np.float32(spec.fgate_mean)
    log_forget = -np.logaddexp(np.float32(0), -fgate)
    state = MLSTMState(draw((*heads, spec.qk_dim, spec.v_dim)), draw((*heads, spec.qk_dim)), draw(heads))
    return jax.tree.map(jnp.asarray, (state, q, k, v, log_input, log_forget))


def exact_step(*arguments):
    """Compute the step in float64."""
    with jax.enable_x64(True):
        return jax.device_get(compute_reference(*jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)))


def lowered_for_hopper(function, *arguments, **options):
    return jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("batch_size", "dtype"), [(1, "bfloat16"), (64, "float32")])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_the_kernel_is_lowered_with_memory_and_normalizer_in_place(dims, batch_size, dtype):
    qk_dim, v_dim = dims
    vectors = [jax.ShapeDtypeStruct((batch_size, 8, dim), dtype) for dim in (qk_dim, qk_dim, v_dim)]
    gate = jax.ShapeDtypeStruct((batch_size, 8), "float32")
    state = jax.eval_shape(lambda: empty_state(batch_size, 8, qk_dim, v_dim))
    step = functools.partial(mosaic_step, eps=1e-6)
    text = lowered_for_hopper(step, state, *vectors, gate, gate, donate_argnums=0)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("output_operand_alias<") == 2


@on_a_simulated_gpu
@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
def test_a_simulated_step_is_that_of_the_reference(spec):
    arguments = token_of(spec)
    assert_close(simulate(*arguments), exact_step(*arguments))


@on_a_simulated_gpu
def test_the_width_of_blocks_changes_nothing(monkeypatch):
    arguments = token_of(ArgSpec(1, 1, 2, 32, 128))
    narrow = simulate(*arguments)
    monkeypatch.setattr(hopper_step, "ENOUGH_BLOCKS", 1)
    wide = jax.jit(functools.partial(simulated))(*arguments)
    assert_close(wide, narrow)
    assert_close(wide, exact_step(*arguments))


@on_a_simulated_gpu
def test_inputs_in_bfloat16_are_used_as_they_are():
    arguments = token_of(SMALL["rows and heads"], "bfloat16")
    hidden, state = simulate(*arguments)
    assert hidden.dtype == jnp.float32
    assert_close((hidden, state), exact_step(*arguments))


@on_a_simulated_gpu
def test_steps_in_a_scan_are_those_of_the_reference():
    state, *tokens = zip(*(token_of(SMALL["rows and heads"], seed=seed) for seed in range(3)), strict=True)
    stacked = [np.stack(x) for x in tokens]
    last, hidden = jax.jit(lambda s, t: jax.lax.scan(lambda s, t: simulated(s, *t)[::-1], s, t))(state[0], stacked)
    expected = state[0]
    for position, token in enumerate(zip(*tokens, strict=True)):
        expected_hidden, expected = exact_step(expected, *token)
        assert_close(hidden[position], expected_hidden)
    assert_close(last, expected)


@on_a_simulated_gpu
def test_mapped_steps_are_separate_ones():
    tokens = [token_of(SMALL["rows and heads"], seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *tokens)
    expected = jax.tree.map(lambda *x: np.stack(x), *(exact_step(*token) for token in tokens))
    assert_close(jax.jit(jax.vmap(simulated))(*stacked), expected)


@on_a_simulated_gpu
def test_a_step_has_the_gradients_of_the_reference():
    state, *token = token_of(SMALL["rows and heads"])

    def loss(step, state, *token):
        hidden, last = step(state, *token)
        return jnp.sum(jnp.sin(hidden)) + jnp.sum(jnp.cos(last.memory)) + jnp.sum(jnp.sin(last.normalizer))

    actual, expected = (
        jax.jit(jax.grad(functools.partial(loss, step), argnums=range(6)))(state, *token)
        for step in (simulated, functools.partial(reference.step, eps=1e-6))
    )
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("dims", "state_dtype", "message"),
    [
        ((24, 64), "float32", "24 and 64 features"),
        ((64, 48), "float32", "64 and 48 features"),
        ((512, 64), "float32", "512 and 64 features"),
        ((64, 64), "bfloat16", "its state is bfloat16"),
    ],
)
def test_what_the_kernel_cannot_take_is_named(dims, state_dtype, message):
    state, q, k, v, *_ = token_of(ArgSpec(1, 1, 1, *dims))
    problem = step_problem(q, k, v, MLSTMState(*(x.astype(state_dtype) for x in state)))
    assert problem is not None
    assert message in problem


@pytest.mark.parametrize(
    ("dims", "backend", "num_kernels", "message"),
    [
        ((64, 128), "auto", 1, "the kernel for Hopper GPUs"),
        ((64, 128), "mosaic", 1, "the kernel for Hopper GPUs"),
        ((8, 16), "auto", 0, "plain JAX, as its keys and values have 8 and 16 features"),
        ((64, 128), "chunkwise", 0, "plain JAX, as chunkwise is the backend"),
        ((80, 160), "mosaic", 0, "plain JAX, as its keys and values have 80 and 160 features"),  # sequences fill up
    ],
)
def test_the_api_takes_the_kernel_where_it_fits_and_says_so(dims, backend, num_kernels, message, monkeypatch, caplog):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    log_once.cache_clear()
    state, *token = token_of(ArgSpec(1, 1, 2, *dims), "bfloat16")
    with caplog.at_level(logging.INFO, logger=api.LOGGER.name):
        text = lowered_for_hopper(functools.partial(mlstm_step, backend=backend), *token, state)
    assert text.count("custom_call @mosaic_gpu") == num_kernels
    assert [record.message.removeprefix("mLSTM, token by token: ")[: len(message)] for record in caplog.records] == [
        message
    ]


def test_the_api_does_not_step_in_plain_jax_where_the_kernel_is_asked_for(monkeypatch):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    state, *token = token_of(ArgSpec(1, 1, 1, 8, 16))
    with pytest.raises(ValueError, match="cannot take a token here: its keys and values have 8 and 16 features"):
        mlstm_step(*token, state, backend="mosaic")


def named(hidden, state):
    return {"hidden": hidden, **state._asdict()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "heads", "dtype"), [(1, 8, "bfloat16"), (5, 3, "float32"), (64, 8, "bfloat16")], ids=str
)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_step_on_the_gpu_is_that_of_the_reference_and_in_place(dims, rows, heads, dtype):
    state, *token = token_of(ArgSpec(rows, 1, heads, *dims), dtype)
    expected = exact_step(state, *token)
    # JAX gives what is donated to the first result of its shape: to the hidden state, if keys are as wide as values.
    step = jax.jit(lambda *arguments: mosaic_step(*arguments, eps=1e-6)[::-1], donate_argnums=0)
    pointers = [state.memory.unsafe_buffer_pointer(), state.normalizer.unsafe_buffer_pointer()]
    last, hidden = step(state, *token)
    assert [last.memory.unsafe_buffer_pointer(), last.normalizer.unsafe_buffer_pointer()] == pointers
    assert_close_by_norm(named(hidden, last), named(*expected), relative=1e-5)


@pytest.mark.gpu
def test_many_steps_on_the_gpu_are_those_of_the_reference():
    spec = ArgSpec(3, 40, 4, 256, 512, igate_mean=-1.0, fgate_mean=4.0)
    q, k, v, igate, fgate = (jnp.moveaxis(x, 1, 0) for x in spec.arguments(jax.random.key(0)))
    state = spec.state(jax.random.key(1))

    def run(step):
        return jax.jit(lambda state, tokens: jax.lax.scan(lambda s, t: step(*t, s)[::-1], state, tokens))

    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (state, (q, k, v, igate, fgate)))
        expected = jax.device_get(run(functools.partial(mlstm_step, backend="reference"))(*exact))
    actual = run(mlstm_step)(state, (q, k, v, igate, fgate))
    assert_close_by_norm(named(*actual[::-1]), named(*expected[::-1]), relative=1e-5)
