"""The table of token embeddings."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike


class Embedding(nn.Module):
    """The embedding table: models look up its rows, and with tied weights also multiply by its transpose.

    Attributes:
        vocab_size: The number of tokens.
        features: The number of features of a token.
        init_fn: Initialises the table.
        param_dtype: Precision of the table.
    """

    vocab_size: int
    features: int
    init_fn: Callable
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the table, `[vocab_size, features]`."""
        table = self.param("embedding", self.init_fn, (self.vocab_size, self.features), self.param_dtype)
        return jnp.asarray(table)  # a NumPy array cannot be indexed with traced tokens
