"""How the next token is chosen."""

import jax
import jax.numpy as jnp


def temperature_sampling(logits: jax.Array, rng: jax.Array, temperature: float = 1.0) -> jax.Array:
    """Draw tokens with the probabilities of the logits over a temperature; at 0, take the likeliest.

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
    """Draw tokens as `temperature_sampling` does, but only from the likeliest ones.

    Args:
        logits: The logits, the vocabulary last.
        rng: The random key.
        temperature: Above 1 for more variety, below 1 for less.
        top_k: How many tokens to draw from; `None` for all.
        top_p: Draw from the fewest tokens that have this probability together; `None` for all.

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
    """Take the likeliest token.

    Args:
        logits: The logits, the vocabulary last.
        rng: Not needed; here so that any function of this module can take the place of another.

    Returns:
        A token for each row.
    """
    del rng
    return jnp.argmax(logits, axis=-1)
