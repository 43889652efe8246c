"""Targets outside the vocabulary: their loss is NaN, and so is its gradient unless the loss is masked."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer


def is_in_vocabulary(targets: Integer[Array, "*tokens"], vocab_size: int) -> Bool[Array, "*tokens"]:
    """Return which targets are in `[0, vocab_size)`, for integers of any type."""
    targets = targets.astype(jnp.int32)  # ids of 2**31 and more become negative
    return (targets >= 0) & (targets < vocab_size)


@jax.custom_vjp
def nan_where_invalid(losses: Float[Array, "*tokens"], is_valid: Bool[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Replace the losses of invalid targets by NaN.

    Their gradients are NaN too, unless the gradient of the loss is 0: a masked loss has no effect.
    """
    return jnp.where(is_valid, losses, jnp.nan)


def _forward(losses: jax.Array, is_valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    return nan_where_invalid(losses, is_valid), is_valid


def _backward(is_valid: jax.Array, dlosses: jax.Array) -> tuple[jax.Array, None]:
    return jnp.where(is_valid | (dlosses == 0), dlosses, jnp.nan), None


nan_where_invalid.defvjp(_forward, _backward)
