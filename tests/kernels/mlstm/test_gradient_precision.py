"""Gradients in bfloat16 against float64, from forget gates that are almost closed to gates that keep everything.

The loss is on the outputs alone, as in training. The gradient of the forget gates is the most sensitive: it is a sum
over all later positions of differences that nearly cancel.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.mlstm.comparisons import INPUTS, drawn, named
from kernels.mlstm.recurrence import recurrence

from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.mlstm.hopper.tiling import HEAD_DIMS, Tiling
from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX, hopper_unavailable_reason

pytestmark = pytest.mark.slow

LIMIT = 1e-2
"""The largest relative error, by norm."""
FORGET_GATES = [-5.0, 0.0, 4.5, 9.0]
"""Means of the pre-activations; the 7B starts at 4.5."""
INPUT_GATES = [-10.0, 0.0]
"""With the first, which is the 7B's, denominators are at their floor; with the second, above it."""
PADDED_HEAD_DIMS = [(40, 48), (96, 192), (192, 384)]


def gradients(run, inputs, dhidden):
    """Compute both passes as programs of their own: in a single one, XLA leaves out roundings to bfloat16."""
    hidden, backward = _forward(run, inputs)
    return named(INPUTS[:5], _backward(backward, dhidden.astype(hidden.dtype)))


@functools.partial(jax.jit, static_argnums=0)
def _forward(run, inputs):
    return jax.vjp(run, *inputs)


@jax.jit
def _backward(backward, dhidden):
    return backward(dhidden)


def parallel(*inputs):
    return mlstm(*inputs, backend="parallel")


def exact_gradients(inputs, dhidden):
    """Compute the reference in float64, on a CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        inputs, dhidden = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (inputs, dhidden))
        return gradients(parallel, inputs, dhidden)


def assert_precise(run, shape, fgates, igates, record_property):
    """Assert that all gradients are precise for all gates; the shape is that of an `ArgSpec`."""
    too_large = []
    for igate in igates:
        for fgate in fgates:
            inputs, _, _, dhidden, _ = drawn(ArgSpec(*shape, igate_mean=igate, fgate_mean=fgate), with_state=False)
            actual, expected = gradients(run, inputs, dhidden), exact_gradients(inputs, dhidden)
            errors = {name: np.linalg.norm(actual[name] - x) / np.linalg.norm(x) for name, x in expected.items()}
            listed = ", ".join(f"d{name} {error:.1e}" for name, error in errors.items())
            record_property("gradient errors", f"{shape[3]}/{shape[4]} igate {igate} fgate {fgate}: {listed}")
            if max(errors.values()) > LIMIT:
                too_large.append(f"igate {igate}, fgate {fgate}: {listed}")
    assert not too_large, "; ".join(too_large)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [*HEAD_DIMS, *PADDED_HEAD_DIMS], ids=str)
def test_gradients_of_the_hopper_kernels_are_precise_for_all_gates(dims, record_property):
    def run(*inputs):
        return mlstm(*inputs, backend="mosaic")

    assert_precise(run, (1, 2048, 2, *dims), FORGET_GATES, INPUT_GATES, record_property)


@pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
@pytest.mark.skipif(hopper_unavailable_reason() is None, reason="a Hopper GPU runs the kernels themselves")
def test_gradients_of_simulated_kernels_are_precise(monkeypatch, record_property):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.mlstm.hopper.chunkwise import mlstm_mosaic

    for module in ("mosaic_gpu.schedule", "mlstm.hopper.tiling"):
        monkeypatch.setattr(f"xlstm_jax.kernels.{module}.NUM_SMS", 1)
    tiling, interpret = Tiling(64, 64, chunk_size=128), plgpu.InterpretGPUParams()

    def run(q, k, v, igate, fgate):
        return mlstm_mosaic(q, k, v, igate, jax.nn.log_sigmoid(fgate), None, None, tiling, 1e-6, interpret, False)[0]

    assert_precise(run, (1, 256, 1, 64, 64), [-5.0, 9.0], [0.0], record_property)


@pytest.mark.parametrize("with_state", [False, True], ids=["outputs", "outputs and states"])
@pytest.mark.parametrize("form", ["reference", "parallel", "chunks of 64", "chunks of 256"])
def test_gradients_of_a_form_in_plain_jax_are_precise_for_all_gates(form, with_state, record_property):
    backend, _, chunk_size = form.replace("chunks", "chunkwise").partition(" of ")

    @jax.jit
    def forward(inputs, state):
        def run(inputs, state):
            options = {"backend": backend, "chunk_size": int(chunk_size or 64)}
            return mlstm(*inputs, state=state, return_state=True, **options)

        return jax.vjp(run, inputs, state)

    too_large = []
    for igate, fgate in itertools.product(INPUT_GATES, FORGET_GATES):
        (inputs, state, dhidden, dlast), expected = _case(igate, fgate, with_state)
        _, backward = forward(inputs, state)
        dinputs, dstate = _backward(backward, (dhidden, dlast))
        actual = named(expected, [*dinputs, *(dstate or [])][: len(expected)])
        errors = {name: _relative_error(actual[name], x) for name, x in expected.items()}
        listed = ", ".join(f"d{name} {error:.1e}" for name, error in errors.items())
        record_property("gradient errors", f"igate {igate} fgate {fgate}: {listed}")
        if max(errors.values()) > LIMIT:
            too_large.append(f"igate {igate}, fgate {fgate}: {listed}")
    assert not too_large, "; ".join(too_large)


@functools.cache
def _case(igate, fgate, with_state):
    """Return the inputs and gradients of a case, with a state as a first part of the sequence could have left it."""
    spec = ArgSpec(1, 512, 2, 32, 64, igate_mean=igate, fgate_mean=fgate)
    inputs, state, _, dhidden, dlast = drawn(spec, with_state=with_state)
    if state is None:
        dlast = jax.tree.map(jnp.zeros_like, dlast)
    else:
        state = state._replace(stabilizer=state.stabilizer + igate)
    _, _, expected = recurrence(inputs, dhidden, state, dlast)
    count = len(INPUTS) if with_state else len(inputs)
    return (inputs, state, dhidden, dlast), named(INPUTS[:count], expected[:count])


def _relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)
