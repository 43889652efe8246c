"""A workaround for a bug of XLA on CPUs: matmuls with an operand that is a broadcast constant."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Tree = TypeVar("Tree")


def materialize(tree: Tree) -> Tree:
    """Return the same arrays, so that the compiler cannot see that one of them is a broadcast constant.

    On CPUs, XLA passes a matmul and the operations around it to YNNPACK as one fusion. If an operand of the matmul is
    the broadcast of a scalar within that fusion (the zeros of an empty memory), jaxlib 0.10 to 0.12 reads uninitialised
    memory: `jit(lambda q, x: q @ broadcast_to(max(x), ...))` returns garbage that changes from run to run. An
    optimization barrier does not prevent it, as some versions remove the barrier before they form these fusions.
    """

    def hidden(x: jax.Array) -> jax.Array:
        never = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == -1
        return jnp.where(never, jnp.nan, x)

    return jax.tree.map(hidden, tree)
