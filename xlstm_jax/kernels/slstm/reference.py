"""The sLSTM token by token: the reference that defines all other forms.

With the pre-activations `raw[g] = gates[g] + recurrent[g] hidden[t-1]` of the gates `g` in (i, f, z, o):

    cell[t]       = sigmoid(raw[f]) cell[t-1] + exp(raw[i]) tanh(raw[z])
    normalizer[t] = sigmoid(raw[f]) normalizer[t-1] + exp(raw[i])
    hidden[t]     = sigmoid(raw[o]) cell[t] / normalizer[t]

Cell and normaliser are stored in units of `exp(stabilizer[t])`, `stabilizer[t] = max(stabilizer[t-1] + log f, raw[i])`,
which changes no result; an empty memory has no units yet, so its first token sets them.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.slstm.state import SLSTMState


def preactivations(
    gates: Float[Array, "... 4 h d"], hidden: Float[Array, "... h d"], recurrent: Float[Array, "h d 4 d"]
) -> Float[Array, "... 4 h d"]:
    """Add the contribution of the previous hidden state to the pre-activations of the gates."""
    from_hidden = jnp.einsum(
        "...hd,hdge->...ghe", hidden.astype(recurrent.dtype), recurrent, preferred_element_type=gates.dtype
    )
    return gates + from_hidden


def activate(
    raw: Float[Array, "... 4 h d"], stabilizer: Float[Array, "... h d"], is_empty: Bool[Array, "... h d"]
) -> tuple[Float[Array, "... h d"], ...]:
    """Compute the stabilised input and forget gates, the cell input, the output gate and the next stabiliser."""
    raw_input, raw_forget, raw_cell, raw_output = (raw[..., gate, :, :] for gate in range(4))
    # Select before the exponential: an overflow in the unselected branch would turn its zero gradient into NaN.
    log_kept = jnp.where(is_empty, -jnp.inf, jax.nn.log_sigmoid(raw_forget) + stabilizer)
    next_stabilizer = lax.stop_gradient(jnp.maximum(log_kept, raw_input))
    input_gate, forget_gate = jnp.exp(raw_input - next_stabilizer), jnp.exp(log_kept - next_stabilizer)
    return input_gate, forget_gate, jnp.tanh(raw_cell), jax.nn.sigmoid(raw_output), next_stabilizer


def step(state: SLSTMState, gates: Float[Array, "b 4 h d"], recurrent: Float[Array, "h d 4 d"]) -> SLSTMState:
    """Update the memory with one token."""
    raw = preactivations(gates, state.hidden, recurrent)
    stabilizer = lax.stop_gradient(state.stabilizer)
    input_gate, forget_gate, cell_input, output_gate, stabilizer = activate(raw, stabilizer, state.normalizer == 0)
    cell = forget_gate * state.cell + input_gate * cell_input
    normalizer = forget_gate * state.normalizer + input_gate
    return SLSTMState(output_gate * cell / normalizer, cell, normalizer, stabilizer)


def slstm_reference(
    gates: Float[Array, "b s 4 h d"],
    recurrent: Float[Array, "h d 4 d"],
    state: SLSTMState,
    resets: Bool[Array, "b s"] | None,
    mask: Bool[Array, "b s"] | None,
) -> tuple[Float[Array, "b s h d"], SLSTMState]:
    """Compute all hidden states and the last state, one token after the other."""
    # The scan accumulates gradients in the precision of its inputs, so the kernel is rounded inside the body.
    wide = recurrent.astype(jnp.promote_types(recurrent.dtype, gates.dtype))

    def body(state, token):
        gates, begins, counts = token
        before = state if begins is None else select(begins, jax.tree.map(jnp.zeros_like, state), state)
        after = step(before, gates, wide.astype(recurrent.dtype))
        state = after if counts is None else select(counts, after, before)
        return state, state.hidden

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (gates, resets, mask))
    state = state._replace(stabilizer=lax.stop_gradient(state.stabilizer))
    state, hidden = lax.scan(body, state, tokens)
    return jnp.moveaxis(hidden, 0, 1), state


State = TypeVar("State", bound=tuple[jax.Array, ...])


def select(rows: Bool[Array, " b"], chosen: State, other: State) -> State:
    """Select the states of the given rows from `chosen`, and those of the other rows from `other`."""
    return jax.tree.map(lambda c, o: jnp.where(rows[:, None, None], c, o), chosen, other)
