"""Norms, with statistics in float32 whatever the precision of the inputs."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import SplitModule
from xlstm_jax.kernels.norms import gated_head_norm, rms_norm, rms_norm_with_skip
from xlstm_jax.kernels.norms.reference import head_norm, head_rms_norm, standardize


class RMSNorm(nn.Module):
    """Divide features by their root mean square, and scale them.

    Attributes:
        eps: Added to the mean square.
        param_dtype: Precision of the scale.
    """

    eps: float = 1e-6
    param_dtype: DTypeLike = jnp.float32

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised features, in the precision of the inputs."""
        return rms_norm(x, self._scale(x.shape[-1]), eps=self.eps)

    def with_skip(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the unchanged features, for the residual stream, and the normalised ones."""
        return rms_norm_with_skip(x, self._scale(x.shape[-1]), eps=self.eps)

    @nn.compact
    def _scale(self, width: int) -> jax.Array:
        return self.param("scale", nn.initializers.ones, (width,), self.param_dtype)


class LayerNorm(nn.Module):
    """Subtract the mean of features, divide by their standard deviation, and scale them.

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

    def with_skip(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the unchanged features, for the residual stream, and the normalised ones."""
        return x, self(x)


def create_norm(norm: str, eps: float, param_dtype: DTypeLike, name: str | None = None) -> RMSNorm | LayerNorm:
    """Create a norm over all features, `rmsnorm` or `layernorm`."""
    return {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[norm](eps, param_dtype, name=name)


class MultiHeadNorm(SplitModule):
    """A norm over the features of each head; heads may be sharded over a mesh axis.

    Attributes:
        axis_name: The mesh axis.
        eps: Added to the variance, or to the mean square.
        param_dtype: Precision of the scale.
        norm: `layernorm` or `rmsnorm`.
    """

    axis_name: str
    eps: float = 1e-6
    param_dtype: DTypeLike = jnp.float32
    norm: str = "layernorm"

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `[..., heads, features]` and return `[..., heads * features]`."""
        norm = {"layernorm": head_norm, "rmsnorm": head_rms_norm}[self.norm]
        return norm(x, self._scale(x), eps=self.eps)

    def gated(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalise `[..., heads, features]` and multiply by the sigmoid of `[..., heads * features]`."""
        assert self.norm == "layernorm"
        return gated_head_norm(x, gate, self._scale(x), eps=self.eps)

    @nn.compact
    def _scale(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-2] * x.shape[-1] * axis_size(self.axis_name),)
        return self.split_param("scale", nn.initializers.ones, shape, self.param_dtype, 0, self.axis_name)
