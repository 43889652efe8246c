"""Check that a train state may be saved."""

import functools

import jax
import jax.numpy as jnp

from xlstm_jax.common_types import PyTree


@jax.jit
def is_sound(params: PyTree, opt_state: PyTree) -> jax.Array:
    """Return whether all parameters are finite and the state of the optimizer has no NaN.

    Infinity is allowed in the optimizer state: some optimizers start with an infinite lowest loss.
    """
    checks = [jnp.all(jnp.isfinite(x)) for x in _floats(params)] + [~jnp.any(jnp.isnan(x)) for x in _floats(opt_state)]
    return functools.reduce(jnp.logical_and, checks, jnp.bool_(True))


def _floats(tree: PyTree) -> list[jax.Array]:
    return [x for x in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(x.dtype, jnp.inexact)]
