"""The sLSTM with a backward pass by hand that keeps nothing but the hidden states.

Backward    the hidden states give the pre-activations of all positions in one matrix product; a scan without matrix
            products gives the cells again. Then one reverse scan carries the gradients of hidden state, cell and
            normaliser, with one small matrix product a step, and the gradient of the recurrent kernel is one large
            product over all positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

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
    return (hidden, last), (gates, recurrent, state, resets, mask, hidden)


class _Position(NamedTuple):
    """What the reverse scan needs of one position."""

    raw: jax.Array
    before: SLSTMState
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
    befores = _cells_again(raw, hidden_before, state, resets, mask)

    def body(dstate, position):
        (dhidden, position) = position
        draw, dstate = _step_gradient(position, dstate._replace(hidden=dstate.hidden + dhidden), recurrent)
        return dstate, draw

    first, draws = lax.scan(body, dlast, (dhidden, _Position(raw, befores, resets, mask)), reverse=True)
    drecurrent = jnp.einsum(
        "sbhd,sbghe->hdge",
        hidden_before.astype(recurrent.dtype),
        draws.astype(recurrent.dtype),
        preferred_element_type=raw.dtype,
    )
    dgates = jnp.moveaxis(draws, 0, 1).astype(gates.dtype)
    return dgates, drecurrent.astype(recurrent.dtype), first, None, None


def _cells_again(raw, hidden_before, state: SLSTMState, resets, mask) -> SLSTMState:
    """Compute the state before each position, as the position sees it, from the pre-activations."""

    def body(state, position):
        raw, hidden, begins, counts = position
        before = state if begins is None else select(begins, jax.tree.map(jnp.zeros_like, state), state)
        input_gate, forget_gate, cell_input, _, stabilizer = activate(raw, before.stabilizer, before.normalizer == 0)
        after = SLSTMState(
            hidden,
            forget_gate * before.cell + input_gate * cell_input,
            forget_gate * before.normalizer + input_gate,
            stabilizer,
        )
        return (after if counts is None else select(counts, after, before)), before._replace(hidden=hidden)

    _, befores = lax.scan(body, state, (raw, hidden_before, resets, mask))
    return befores


def _step_gradient(position: _Position, dafter: SLSTMState, recurrent) -> tuple[jax.Array, SLSTMState]:
    """Compute the gradients of the pre-activations and of the state before, from those of the state after."""
    before = position.before
    is_empty = before.normalizer == 0
    input_gate, forget_gate, cell_input, output_gate, _ = activate(position.raw, before.stabilizer, is_empty)
    cell = forget_gate * before.cell + input_gate * cell_input
    normalizer = forget_gate * before.normalizer + input_gate
    ratio = cell / normalizer
    dratio = dafter.hidden * output_gate
    dcell = dafter.cell + dratio / normalizer
    dnormalizer = dafter.normalizer - dratio * ratio / normalizer
    draw = jnp.stack(
        [
            (dcell * cell_input + dnormalizer) * input_gate,
            (dcell * before.cell + dnormalizer * before.normalizer)
            * forget_gate
            * jax.nn.sigmoid(-position.raw[..., 1, :, :]),
            dcell * input_gate * (1 - jnp.square(cell_input)),
            dafter.hidden * ratio * output_gate * (1 - output_gate),
        ],
        axis=-3,
    )
    dhidden = jnp.einsum("bghe,hdge->bhd", draw.astype(recurrent.dtype), recurrent, preferred_element_type=draw.dtype)
    dbefore = SLSTMState(dhidden, dcell * forget_gate, dnormalizer * forget_gate, jnp.zeros_like(dhidden))
    if position.counts is not None:
        draw = jnp.where(position.counts[:, None, None, None], draw, 0.0)
        dbefore = select(position.counts, dbefore, dafter._replace(stabilizer=dbefore.stabilizer))
    if position.begins is not None:
        dbefore = select(position.begins, jax.tree.map(jnp.zeros_like, dbefore), dbefore)
    return draw, dbefore


slstm_recompute.defvjp(_forward, _backward)
