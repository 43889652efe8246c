"""The mLSTM of all positions at once: quadratic in the length, as attention is. It is one chunk of the whole length."""

import jax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.mlstm.chunkwise import mlstm_chunkwise
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
) -> tuple[jax.Array, MLSTMState]:
    """Compute all hidden states and the last state with one matrix of weights between all positions."""
    return mlstm_chunkwise(q, k, v, log_input, log_forget, state, resets, q.shape[1], eps)
