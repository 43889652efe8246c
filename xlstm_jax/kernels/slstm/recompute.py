"""The sLSTM with a manual backward pass that saves only the hidden states.

Backward    the pre-activations of all positions are recomputed from the hidden states in one matmul, and the cells in a
            scan without matmuls. Then one reverse scan carries the gradients of hidden state, cell and normaliser, with
            one small matmul per step, and the gradient of the recurrent kernel is one large matmul over all positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.shared.remat_names import keep
from xlstm_jax.kernels.slstm.reference import activate, preactivations, select, slstm_reference
from xlstm_jax.kernels.slstm.state import SLSTMState


@jax.custom_vjp
def slstm_recompute(
    gates: Float[Array, "b s 4 h d"],
    recurrent: Float[Array, "h d 4 d"],
    state: SLSTMState,
    resets: Bool[Array, "b s"] | None,
    mask: Bool[Array, "b s"] | None,
) -> tuple[Float[Array, "b s h d"], SLSTMState]:
    """Compute all hidden states and the last state."""
    return slstm_reference(gates, recurrent, state, resets, mask)


def _forward(gates, recurrent, state, resets, mask):
    hidden, last = slstm_reference(gates, recurrent, state, resets, mask)
    hidden = keep(hidden)
    return (hidden, last), (gates, recurrent, state, resets, mask, hidden)


class _Position(NamedTuple):
    """The inputs of the reverse scan at one position: the pre-activations and the memory before the position."""

    raw: jax.Array
    cell: jax.Array
    normalizer: jax.Array
    stabilizer: jax.Array
    begins: jax.Array | None
    counts: jax.Array | None


def _backward(residuals, cotangents):
    gates, recurrent, state, resets, mask, hidden = residuals
    dhidden, dlast = cotangents
    gates, hidden, dhidden, resets, mask = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (gates, hidden, dhidden, resets, mask)
    )
    hidden_before = jnp.concatenate([state.hidden[None], hidden[:-1]])
    if resets is not None:
        hidden_before = jnp.where(resets[..., None, None], 0.0, hidden_before)
    raw = preactivations(gates, hidden_before, recurrent)
    cell, normalizer, stabilizer = _memories_again(raw, state, resets, mask)
    positions = _Position(raw, cell, normalizer, stabilizer, resets, mask)

    def body(dstate, position):
        dhidden, position = position
        draw, dstate = _step_gradient(position, dstate._replace(hidden=dstate.hidden + dhidden), recurrent)
        return dstate, draw

    first, draws = lax.scan(body, dlast, (dhidden, positions), reverse=True)
    drecurrent = jnp.einsum(
        "sbhd,sbghe->hdge",
        hidden_before.astype(recurrent.dtype),
        draws.astype(recurrent.dtype),
        preferred_element_type=raw.dtype,
    )
    dgates = jnp.moveaxis(draws, 0, 1).astype(gates.dtype)
    return dgates, drecurrent.astype(recurrent.dtype), first, None, None


def _memories_again(raw, state: SLSTMState, resets, mask):
    """Recompute cell, normaliser and stabiliser before each position from the pre-activations."""

    def body(before, position):
        raw, begins, counts = position
        if begins is not None:
            before = select(begins, jax.tree.map(jnp.zeros_like, before), before)
        cell, normalizer, stabilizer = before
        input_gate, forget_gate, cell_input, _, stabilizer = activate(raw, stabilizer, normalizer == 0)
        after = forget_gate * cell + input_gate * cell_input, forget_gate * normalizer + input_gate, stabilizer
        return (after if counts is None else select(counts, after, before)), before

    _, memories = lax.scan(body, (state.cell, state.normalizer, state.stabilizer), (raw, resets, mask))
    return memories


def _step_gradient(position: _Position, dafter: SLSTMState, recurrent) -> tuple[jax.Array, SLSTMState]:
    """Compute the gradients of the pre-activations and of the state before, from those of the state after."""
    raw, cell_before, normalizer_before, stabilizer, begins, counts = position
    input_gate, forget_gate, cell_input, output_gate, _ = activate(raw, stabilizer, normalizer_before == 0)
    cell = forget_gate * cell_before + input_gate * cell_input
    normalizer = forget_gate * normalizer_before + input_gate
    ratio = cell / normalizer
    dratio = dafter.hidden * output_gate
    dcell = dafter.cell + dratio / normalizer
    dnormalizer = dafter.normalizer - dratio * ratio / normalizer
    draw = jnp.stack(
        [
            (dcell * cell_input + dnormalizer) * input_gate,
            (dcell * cell_before + dnormalizer * normalizer_before) * forget_gate * jax.nn.sigmoid(-raw[..., 1, :, :]),
            dcell * input_gate * (1 - jnp.square(cell_input)),
            dratio * ratio * jax.nn.sigmoid(-raw[..., 3, :, :]),
        ],
        axis=-3,
    )
    dhidden = jnp.einsum("bghe,hdge->bhd", draw.astype(recurrent.dtype), recurrent, preferred_element_type=draw.dtype)
    dbefore = SLSTMState(dhidden, dcell * forget_gate, dnormalizer * forget_gate, jnp.zeros_like(dhidden))
    if counts is not None:
        draw = jnp.where(counts[:, None, None, None], draw, 0.0)
        dbefore = select(counts, dbefore, dafter._replace(stabilizer=dbefore.stabilizer))
    if begins is not None:
        dbefore = select(begins, jax.tree.map(jnp.zeros_like, dbefore), dbefore)
    return draw, dbefore


slstm_recompute.defvjp(_forward, _backward)
