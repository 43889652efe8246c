"""Cumulative sums and maxima within documents.

`jnp.cumsum` and `lax.cummax` do not support documents, and on CPUs XLA repeats their last step for every pair of
positions. Here, each position is combined with the earlier ones of its block of positions. Blocks are then combined in
the same way, by their ends.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

BLOCK = 16
OPERATIONS = {"sum": (jnp.sum, jnp.add, 0.0), "max": (jnp.max, jnp.maximum, -jnp.inf)}


def scan(
    x: Float[Array, "... n"],
    operation: Literal["sum", "max"],
    documents: Int[Array, "... n"] | None = None,
    *,
    reverse: bool = False,
    unroll: bool = False,
) -> Float[Array, "... n"]:
    """Compute the inclusive cumulative sum or maximum.

    Args:
        x: The numbers.
        operation: Sum or maximum.
        documents: The document of each position, in any order without gaps; other documents are excluded.
        reverse: Whether to accumulate from the end.
        unroll: Whether the positions of a block are combined one by one instead of by a reduction. That is two to five
            times as fast on GPUs, and slower on CPUs.
    """
    reduce, join, nothing = OPERATIONS[operation]
    length = x.shape[-1]
    size = length if length <= 2 * BLOCK else BLOCK
    end = 0 if reverse else -1

    def padded(x: jax.Array, *, behind: int = 0, ahead: int = 0, **options: Any) -> jax.Array:
        sides = (ahead, behind) if reverse else (behind, ahead)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [sides], **options)

    def in_blocks(x: jax.Array) -> jax.Array:
        return padded(x, ahead=-length % size, mode="edge").reshape(*x.shape[:-1], -1, size)

    def of_block_before(ends: jax.Array, **options: Any) -> jax.Array:
        ends = padded(ends, behind=1, **options)
        return (ends[..., 1:] if reverse else ends[..., :-1])[..., None]

    x, positions = in_blocks(x), jnp.arange(size)
    seen = positions[:, None] <= positions if reverse else positions[:, None] >= positions
    if documents is not None:
        documents = in_blocks(documents)
        seen = seen & (documents[..., :, None] == documents[..., None, :])
    if unroll:
        x = _apart(x) if length > size else x
        result = functools.reduce(join, (jnp.where(seen[..., n], x[..., n, None], nothing) for n in range(size)))
        result = _apart(result)
    else:
        result = reduce(jnp.where(seen, x[..., None, :], nothing), axis=-1)
    if result.shape[-2] > 1:
        ends = None if documents is None else documents[..., end]
        carried = scan(result[..., end], operation, ends, reverse=reverse, unroll=unroll)
        carried = of_block_before(carried, constant_values=nothing)
        if ends is not None:
            carried = jnp.where(documents == of_block_before(ends, mode="edge"), carried, nothing)
        result = join(result, carried)
    result = result.reshape(*result.shape[:-2], -1)
    return result[..., -length:] if reverse else result[..., :length]


def _apart(x: jax.Array) -> jax.Array:
    """Keep XLA from recomputing an array for each of its uses, and from transposing it slice by slice."""
    return lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
