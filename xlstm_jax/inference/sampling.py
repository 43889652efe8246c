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
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, but must not be negative.")
    return greedy_sampling(logits) if temperature == 0 else jax.random.categorical(rng, logits / temperature)


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
