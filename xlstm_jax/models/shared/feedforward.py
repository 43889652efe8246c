"""Gated feed-forward layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from xlstm_jax.distributed.dense import RowDense
from xlstm_jax.models.shared.projections import project


class GatedFeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))`, with hidden features sharded over the model axis.

    Attributes:
        hidden_dim: The number of hidden features.
        axis_name: The mesh axis.
        up_init: Initialises `gate` and `up`.
        down_init: Initialises `down`.
        activation: The activation of the gate.
        use_bias: Whether the three layers have biases.
        dtype: Precision of the computation.
        param_dtype: Precision of the parameters.
        float8: Whether matmuls are computed in float8.
    """

    hidden_dim: int
    axis_name: str
    up_init: Callable
    down_init: Callable
    activation: Callable = nn.silu
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    float8: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to unsharded features."""
        common = {
            "axis_name": self.axis_name,
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "float8": self.float8,
        }
        wide = {"features": self.hidden_dim, "kernel_init": self.up_init}
        gate, up = project(self, x, {"gate": wide, "up": wide}, **common)
        return RowDense(x.shape[-1], kernel_init=self.down_init, name="down", **common)(self.activation(gate) * up)


def round_up(size: float | int, multiple: int) -> int:
    """Round a size up to a multiple."""
    return -int(-size // multiple) * multiple
