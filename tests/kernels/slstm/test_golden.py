"""Our sLSTM against the cell of the package `xlstm`, whose outputs and gradients are kept in tests/golden."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.kernels.slstm import SLSTMState, slstm

GOLDEN = Path(__file__).parents[2] / "golden" / "slstm_cell.npz"
NUM_HEADS = 3


@functools.cache
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def run(arrays, initial_state, backend):
    """Run our cell on their arrays: gates and biases by gate and head, the kernel by head, gate, out, in."""
    gates = arrays["input"] + arrays["_bias_"]
    gates = gates.reshape(*gates.shape[:2], 4, NUM_HEADS, -1)
    kernel = arrays["_recurrent_kernel_"]
    recurrent = kernel.reshape(NUM_HEADS, 4, -1, kernel.shape[-1]).transpose(0, 3, 1, 2)
    state = SLSTMState(*(x.reshape(x.shape[0], NUM_HEADS, -1) for x in initial_state))
    return slstm(gates, recurrent, state=state, return_state=True, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "recompute"])
@pytest.mark.parametrize("suffix", ["", "_from_zero"])
def test_outputs_states_and_gradients_are_those_of_the_public_cell(suffix, backend):
    peer = golden()
    arrays = {"input": peer["input"]} | {k.removeprefix("param/"): v for k, v in peer.items() if k.startswith("param/")}
    initial = jnp.asarray(peer["initial_state"]) if not suffix else jnp.zeros_like(peer["initial_state"])

    def loss(arrays, initial):
        hidden, last = run(arrays, initial, backend)
        return jnp.sum(jnp.moveaxis(hidden, 1, 2) * peer["projection"]), (hidden, last)

    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    (gradients, initial_gradient), (hidden, last) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        arrays, initial
    )
    assert_close(jnp.moveaxis(hidden, 1, 2), peer[f"output{suffix}"])
    last = jnp.stack([x.reshape(x.shape[0], -1) for x in last])
    assert_close(last, peer[f"states{suffix}"][:, -1])
    expected = {name: peer[f"grad{suffix}/{name}"] for name in gradients}
    if not suffix:
        # The stabiliser is a choice of units and carries no gradient.
        gradients["state"], expected["state"] = initial_gradient[:3], peer["grad/initial_state"][:3]
    assert_close_by_norm(gradients, expected, relative=5e-5)
