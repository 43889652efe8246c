"""The mLSTM for all positions in parallel: quadratic in the length, like attention."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.mlstm.gates import chunk_gates, scaled_eps
from xlstm_jax.kernels.mlstm.state import MLSTMState


def mlstm_parallel(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    state: MLSTMState,
    resets: Bool[Array, "b s"] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "b s h v"], MLSTMState]:
    """Compute all hidden states and the last state with the full matrix of weights between positions."""
    dtype = state.memory.dtype
    gates = chunk_gates(log_input, log_forget, resets, state.stabilizer, chunk_size=q.shape[1])
    decay, from_state, to_state, carry, stabilizer = (
        x.squeeze(0) for x in (gates.decay(), gates.from_state, gates.to_state, gates.carry, gates.stabilizer)
    )
    # The scores are scaled, not the queries: in bfloat16, scaling would round the queries again.
    scale = q.shape[-1] ** -0.5
    from_state = scale * from_state
    scores = scale * jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=dtype) * decay
    old = jnp.einsum("bshk,bhkv->bhsv", q, state.memory.astype(q.dtype), preferred_element_type=dtype)
    new = jnp.einsum("bhst,bthv->bhsv", scores.astype(v.dtype), v, preferred_element_type=dtype)
    numerator = from_state[..., None] * old + new
    old_sum = jnp.einsum("bshk,bhk->bhs", q.astype(dtype), state.normalizer)
    denominator = from_state * old_sum + jnp.sum(scores, axis=-1)
    floor = jnp.exp(-lax.stop_gradient(stabilizer))
    hidden = numerator / (jnp.maximum(jnp.abs(denominator), floor) + scaled_eps(eps, stabilizer))[..., None]
    weighted = to_state[..., None] * jnp.moveaxis(k, 2, 1).astype(dtype)
    last = MLSTMState(
        memory=carry[..., None, None] * state.memory
        + jnp.einsum("bhsk,bshv->bhkv", weighted.astype(v.dtype), v, preferred_element_type=dtype),
        normalizer=carry[..., None] * state.normalizer + jnp.sum(weighted, axis=2),
        stabilizer=stabilizer[..., -1],
    )
    return jnp.moveaxis(hidden, 1, 2).astype(v.dtype), last
