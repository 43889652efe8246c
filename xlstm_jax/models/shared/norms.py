"""Norms: statistics in float32, whatever the precision around them."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import SplitModule


class RMSNorm(nn.Module):
    """Divide features by their root mean square, and scale them.

    Attributes:
        eps: Added to the mean square.
        param_dtype: Precision of the scale.
    """

    eps: float = 1e-6
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised features, in the precision of the inputs."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * scale.astype(x.dtype)


class LayerNorm(nn.Module):
    """Subtract the mean of features, divide them by their deviation, and scale them.

    Attributes:
        eps: Added to the variance.
        param_dtype: Precision of the scale.
    """

    eps: float = 1e-5
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised features, in the precision of the inputs."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        return standardize(x, self.eps) * scale.astype(x.dtype)


class MultiHeadNorm(SplitModule):
    """`LayerNorm` over the features of each head by itself; heads may be split over a mesh axis.

    Attributes:
        axis_name: The mesh axis.
        eps: Added to the variance.
        param_dtype: Precision of the scale.
    """

    axis_name: str
    eps: float = 1e-6
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `[..., heads, features]` and return `[..., heads * features]`."""
        flat = standardize(x, self.eps).reshape(*x.shape[:-2], -1)
        shape = (flat.shape[-1] * axis_size(self.axis_name),)
        scale = self.split_param("scale", nn.initializers.ones, shape, self.param_dtype, 0, self.axis_name)
        return flat * scale.astype(x.dtype)


def standardize(x: jax.Array, eps: float) -> jax.Array:
    """Subtract the mean of the last axis and divide by its deviation, in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)
