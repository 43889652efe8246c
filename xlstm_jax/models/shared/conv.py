"""Causal depthwise convolution over the sequence; its state is the last inputs."""

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import SplitModule


class CausalConv(SplitModule):
    """Causal depthwise convolution; channels may be sharded over a mesh axis.

    Attributes:
        kernel_size: The number of inputs that an output depends on, including its own.
        axis_name: The mesh axis.
        dtype: Precision of the computation.
        param_dtype: Precision of the parameters.
    """

    kernel_size: int
    axis_name: str
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b s c"], state: Float[Array, "b t c"], resets: Bool[Array, "b s"] | None
    ) -> tuple[Float[Array, "b s c"], Float[Array, "b t c"]]:
        """Return the outputs, which do not depend on earlier documents, and the last inputs."""
        num_channels = x.shape[-1] * axis_size(self.axis_name)
        kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=0, out_axis=())
        kernel = self.split_param(
            "kernel", kernel_init, (self.kernel_size, num_channels), self.param_dtype, 1, self.axis_name
        )
        bias = self.split_param("bias", nn.initializers.zeros, (num_channels,), self.param_dtype, 0, self.axis_name)
        num_before, length = self.kernel_size - 1, x.shape[1]
        inputs = jnp.concatenate([state.astype(self.dtype), x.astype(self.dtype)], axis=1)
        document = None
        if resets is not None:
            document = jnp.pad(jnp.cumsum(resets, axis=1), ((0, 0), (num_before, 0)))[..., None]
        y = bias.astype(self.dtype)
        for tap in range(self.kernel_size):
            seen = inputs[:, tap : tap + length]
            if document is not None:
                seen = jnp.where(document[:, tap : tap + length] == document[:, num_before:], seen, 0)
            y = y + seen * kernel[tap].astype(self.dtype)
        last = inputs[:, length:]
        if document is not None:
            last = jnp.where(document[:, length:] == document[:, -1:], last, 0)
        return y, last.astype(state.dtype)
