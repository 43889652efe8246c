"""Running sums and maxima in a few reductions that compile and run fast everywhere.

`jnp.cumsum` and `lax.cummax` become a chain of small kernels on GPUs, and on CPUs XLA repeats the last step of a sum
for every pair of positions. Here, each block of positions is reduced for each of its positions, then the ends of all
blocks before it are.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 16
OPERATIONS = {"sum": (jnp.sum, jnp.add, 0.0), "max": (jnp.max, jnp.maximum, -jnp.inf)}


def scan(
    x: Float[Array, "... n"],
    operation: Literal["sum", "max"],
    documents: Int[Array, "... n"] | None = None,
    *,
    reverse: bool = False,
) -> Float[Array, "... n"]:
    """Sum, or take the maximum of, everything up to each position, itself included.

    Args:
        x: The numbers.
        operation: Sum or maximum.
        documents: The document of each position, in any order without gaps; what belongs to others does not count.
        reverse: Whether to go from each position to the end.
    """
    if reverse:
        documents = None if documents is None else jnp.flip(documents, axis=-1)
        return jnp.flip(scan(jnp.flip(x, axis=-1), operation, documents), axis=-1)
    reduce, join, nothing = OPERATIONS[operation]
    length = x.shape[-1]
    size = min(BLOCK, length)

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % size)], mode="edge")
        return x.reshape(*x.shape[:-1], -1, size)

    def total(seen: jax.Array, x: jax.Array) -> jax.Array:
        return reduce(jnp.where(seen, x, nothing), axis=-1)

    x, positions = blocks(x), jnp.arange(size)
    number = jnp.arange(x.shape[-2])
    within, before = positions[:, None] >= positions, number[:, None, None] > number
    if documents is not None:
        documents = blocks(documents)
        within = within & (documents[..., :, None] == documents[..., None, :])
        before = before & (documents[..., None] == documents[..., None, None, :, -1])
    result = total(within, x[..., None, :])
    if len(number) > 1:
        result = join(result, total(before, result[..., None, None, :, -1]))
    return result.reshape(*result.shape[:-2], -1)[..., :length]
