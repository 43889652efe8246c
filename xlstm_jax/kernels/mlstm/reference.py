"""The mLSTM token by token: the reference that defines all other forms.

With `q` scaled by `1/sqrt(qk_dim)`, `i = exp(igate)` (or its sigmoid) and `f = sigmoid(fgate)`:

    memory[t]     = f[t] memory[t-1] + i[t] k[t] v[t]^T
    normalizer[t] = f[t] normalizer[t-1] + i[t] k[t]
    hidden[t]     = memory[t]^T q[t] / max(|normalizer[t] . q[t]|, 1)

The state is stored in units of `exp(stabilizer[t])`, `stabilizer[t] = max(stabilizer[t-1] + log f[t], log i[t])`, so
that nothing overflows; `eps` is added to the denominator in these units. Without them, the denominator is

    max(|normalizer[t] . q[t]|, 1) + eps exp(stabilizer[t])

Only this last term depends on the stabiliser, so the stabiliser has a gradient only there; as a choice of units it has
none.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.mlstm.gates import scaled_eps
from xlstm_jax.kernels.mlstm.state import MLSTMState


def step(
    state: MLSTMState,
    q: Float[Array, "b h k"],
    k: Float[Array, "b h k"],
    v: Float[Array, "b h v"],
    log_input: Float[Array, "b h"],
    log_forget: Float[Array, "b h"],
    *,
    eps: float,
) -> tuple[Float[Array, "b h v"], MLSTMState]:
    """Update the memory with one token, and read out the hidden state."""
    q = q * q.shape[-1] ** -0.5
    stabilizer = jnp.maximum(state.stabilizer + log_forget, log_input)
    units_before, units = lax.stop_gradient((state.stabilizer, stabilizer))
    keep = jnp.exp(log_forget + units_before - units)[..., None]
    write = jnp.exp(log_input - units)[..., None]
    memory = keep[..., None] * state.memory + (write * k)[..., :, None] * v[..., None, :]
    normalizer = keep * state.normalizer + write * k
    numerator = jnp.einsum("bhk,bhkv->bhv", q, memory)
    overlap = jnp.abs(jnp.sum(q * normalizer, axis=-1))
    denominator = jnp.maximum(overlap, jnp.exp(-units)) + scaled_eps(eps, stabilizer)
    return numerator / denominator[..., None], MLSTMState(memory, normalizer, stabilizer)


def mlstm_reference(
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
    """Compute all hidden states and the last state, one token after the other."""
    dtype = state.memory.dtype

    def body(state, token):
        *token, begins = token
        if begins is not None:
            state = jax.tree.map(lambda x: jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0.0, x), state)
        hidden, state = step(state, *token, eps=eps)
        return state, hidden

    tokens = (*(x.astype(dtype) for x in (q, k, v)), log_input, log_forget, resets)
    state, hidden = lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(hidden, 0, 1).astype(v.dtype), state
