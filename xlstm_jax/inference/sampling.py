"""Sampling of the next token."""

import jax
import jax.numpy as jnp


def temperature_sampling(logits: jax.Array, rng: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Sample tokens from the softmax of the logits divided by a temperature; 0 takes the most likely token.

    Args:
        logits: The logits, the vocabulary last.
        rng: The random key.
        temperature: Above 1 for more variety, below 1 for less.

    Returns:
        A token for each row.
    """
    if not temperature >= 0:  # NaN too
        raise ValueError(f"temperature is {temperature}, but must be a number of at least 0.")
    return greedy_sampling(logits) if temperature == 0 else jax.random.categorical(rng, logits / temperature)


def filtered_sampling(
    logits: jax.Array,
    rng: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """Sample tokens like `temperature_sampling`, but only from the most likely ones.

    Args:
        logits: The logits, the vocabulary last.
        rng: The random key.
        temperature: Above 1 for more variety, below 1 for less.
        top_k: The number of tokens to sample from; `None` for all.
        top_p: Sample from the smallest set of tokens with at least this total probability; `None` for all.

    Returns:
        A token for each row.
    """
    if top_k is not None and (top_k < 1 or top_k != int(top_k)):
        raise ValueError(f"top_k is {top_k}, but must be a whole number of at least 1.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, but must be above 0 and at most 1.")
    if temperature > 0 and (top_k is not None or top_p is not None):
        ordered = jnp.sort(logits / temperature, axis=-1, descending=True)
        likelier = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        rank = jnp.arange(logits.shape[-1])
        is_taken = (rank < (top_k or logits.shape[-1])) & ((likelier < (1.0 if top_p is None else top_p)) | (rank == 0))
        least = jnp.min(jnp.where(is_taken, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits / temperature >= least, logits, -jnp.inf)
    return temperature_sampling(logits, rng, temperature)


def greedy_sampling(logits: jax.Array, rng: jax.Array | None = None) -> jax.Array:
    """Take the most likely token.

    Args:
        logits: The logits, the vocabulary last.
        rng: Unused; accepted so that all functions of this module have the same signature.

    Returns:
        A token for each row.
    """
    del rng
    return jnp.argmax(logits, axis=-1)
