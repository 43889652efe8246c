"""Soft cap of logits."""

import jax
import jax.numpy as jnp


def soft_cap_logits(logits: jax.Array, cap_value: float | jax.Array | None) -> jax.Array:
    """Squash logits into (-cap, cap) with `cap * tanh(logits / cap)`; `None` returns them unchanged."""
    return logits if cap_value is None else cap_value * jnp.tanh(logits / cap_value)
