"""Norms in plain JAX: statistics in float32 at least, results in the precision of the inputs."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows d"], scale: Float[Array, " d"], *, eps: float) -> Float[Array, "*rows d"]:
    """Divide features by their root mean square, and scale them."""
    return _over_root_mean_square(x, eps) * scale.astype(x.dtype)


def head_norm(hidden: Float[Array, "*rows h d"], scale: Float[Array, " c"], *, eps: float) -> Float[Array, "*rows c"]:
    """Standardise the features of each head separately, then scale the features of all heads."""
    flat = standardize(hidden, eps).reshape(*hidden.shape[:-2], -1)
    return flat * scale.astype(hidden.dtype)


def head_rms_norm(
    hidden: Float[Array, "*rows h d"], scale: Float[Array, " c"], *, eps: float
) -> Float[Array, "*rows c"]:
    """Divide the features of each head by their root mean square, then scale the features of all heads."""
    flat = _over_root_mean_square(hidden, eps).reshape(*hidden.shape[:-2], -1)
    return flat * scale.astype(hidden.dtype)


def gated_head_norm(
    hidden: Float[Array, "*rows h d"], gate: Float[Array, "*rows c"], scale: Float[Array, " c"], *, eps: float
) -> Float[Array, "*rows c"]:
    """Compute `sigmoid(gate) * head_norm(hidden)`."""
    return jax.nn.sigmoid(gate) * head_norm(hidden, scale, eps=eps)


def standardize(x: Float[Array, "*rows d"], eps: float) -> Float[Array, "*rows d"]:
    """Subtract the mean of the last axis and divide by its standard deviation, in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def _over_root_mean_square(x: Float[Array, "*rows d"], eps: float) -> Float[Array, "*rows d"]:
    """Divide by the root mean square of the last axis, in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)
