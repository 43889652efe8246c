"""The recurrent state of the mLSTM."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class MLSTMState(NamedTuple):
    """The state of each head, in units of `exp(stabilizer)`.

    The true memory is `exp(stabilizer) * memory`, the true normaliser `exp(stabilizer) * normalizer`. Only these
    products are meaningful, so the stabiliser of a state is a choice of units: it carries no gradient. Outputs depend
    on it only through `eps`, so a gradient across a state has a relative error of the order of `eps`.
    """

    memory: Float[Array, "b h k v"]
    normalizer: Float[Array, "b h k"]
    stabilizer: Float[Array, "b h"]


def empty_state(batch_size: int, num_heads: int, qk_dim: int, v_dim: int, dtype: DTypeLike = jnp.float32) -> MLSTMState:
    """Return the state before the first token, an empty memory."""
    return MLSTMState(
        memory=jnp.zeros((batch_size, num_heads, qk_dim, v_dim), dtype),
        normalizer=jnp.zeros((batch_size, num_heads, qk_dim), dtype),
        stabilizer=jnp.zeros((batch_size, num_heads), dtype),
    )


def state_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the precision of gates, sums and states: float32, or that of the inputs if it is higher."""
    return jax.dtypes.canonicalize_dtype(jnp.promote_types(dtype, jnp.float32))
