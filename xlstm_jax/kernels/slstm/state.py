"""The recurrent state of the sLSTM."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class SLSTMState(NamedTuple):
    """The state of each cell; `cell` and `normalizer` are in units of `exp(stabilizer)`.

    A normaliser of zero means that the memory is empty. The stabiliser is a choice of units: it carries no gradient.
    """

    hidden: Float[Array, "b h d"]
    cell: Float[Array, "b h d"]
    normalizer: Float[Array, "b h d"]
    stabilizer: Float[Array, "b h d"]


def empty_state(batch_size: int, num_heads: int, head_dim: int, dtype: DTypeLike = jnp.float32) -> SLSTMState:
    """Return the state before the first token, an empty memory."""
    return SLSTMState(*(jnp.zeros((batch_size, num_heads, head_dim), dtype) for _ in SLSTMState._fields))
