"""Norms of trees whose leaves may be sharded over a mesh."""

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.utils.partitioned import is_partitioned, partition_axes, unboxed


def get_sharded_norm_logits(x: jax.Array | object) -> jax.Array:
    """Calculate the norm of a sharded parameter or gradient.

    Args:
        x: The parameter or gradient.

    Returns:
        The norm logit, i.e. the squared norm.
    """
    return sum_over_shards(squared_sum(unboxed(x)), x)


def get_sharded_global_norm(x: PyTree) -> tuple[jax.Array, PyTree]:
    """Calculate the norm of a sharded PyTree.

    Args:
        x: The PyTree. Each leaf should be a `jax.Array` or `nn.Partitioned`.

    Returns:
        The global norm and the norm per leaf.
    """
    squares = jax.tree.map(get_sharded_norm_logits, x, is_leaf=is_partitioned)
    total = jnp.asarray(sum(jax.tree.leaves(squares)), jnp.float32)
    return jnp.sqrt(total), jax.tree.map(jnp.sqrt, squares)


def squared_sum(x: jax.Array, *, keep_leading: bool = False) -> jax.Array:
    """Sum the squares of an array in float32 at least, separately for each `x[i]` if `keep_leading`."""
    x = jnp.asarray(x)
    magnitude = jnp.abs(x) if jnp.iscomplexobj(x) else x
    wide = magnitude.astype(jnp.promote_types(magnitude.dtype, jnp.float32))
    return jnp.sum(jnp.square(wide), axis=tuple(range(1, x.ndim)) if keep_leading else None)


def sum_over_shards(value: jax.Array, like: object) -> jax.Array:
    """Sum the values of all shards over the mesh axes that the leaf `like` is sharded over."""
    axes = tuple(axis for axis in partition_axes(like) if axis_size(axis) > 1)
    return lax.psum(value, axes) if axes else value
