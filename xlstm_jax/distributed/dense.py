"""Tensor-parallel dense layers for models: inputs and outputs are replicated, hidden features are sharded.

A `ColumnDense` followed by a `RowDense` is a feed-forward layer in which each device has a shard of the hidden
features; the only communication is one all-reduce at the end. With one device, or no mesh, both are plain dense layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.array_utils import axis_size, mean_gradient_over, slice_computed_whole
from xlstm_jax.kernels.matmul.float8 import float8_products
from xlstm_jax.kernels.matmul.fused import products
from xlstm_jax.kernels.shared.remat_names import OPERAND, keep
from xlstm_jax.utils.partitioned import is_partitioned, unboxed, with_names


class SplitModule(nn.Module):
    """A module with parameters that may be sharded over a mesh axis."""

    def split_param(
        self, name: str, init: Callable, shape: tuple[int, ...], dtype: DTypeLike, axis: int | None, axis_name: str
    ) -> jax.Array:
        """Create or read a parameter.

        Args:
            name: The name of the parameter.
            init: Its initialiser; it draws the full parameter, so that the result does not depend on the mesh.
            shape: The shape of the full parameter.
            dtype: Its precision.
            axis: The dimension to shard, `None` for none.
            axis_name: The mesh axis to shard over.

        Returns:
            This device's shard.
        """
        size = axis_size(axis_name) if axis is not None else 1
        if axis is not None and shape[axis] % size:
            raise ConfigError(
                f"The parameter {'.'.join((*self.path, name))} of shape {shape} cannot be split over {size} devices "
                f"along axis {axis}: make {shape[axis]} a multiple of {size}, or parallel.model_axis_size its divisor."
            )

        def init_own(key: jax.Array) -> Any:
            whole = init(key, shape, dtype)
            if axis is None or size == 1:
                return whole
            names = tuple(axis_name if dim == axis else None for dim in range(len(shape)))
            return with_names(slice_computed_whole(whole, axis_name, axis), names)

        param: Any = self.param(name, init_own, unbox=False)
        return mean_gradient_over(unboxed(param), axis_name) if is_partitioned(param) else param


class SplitKernel(SplitModule):
    """The kernel of a `ColumnDense`, for callers that compute the matmul themselves.

    Attributes:
        features: The number of output features over all devices.
        axis_name: The mesh axis.
        kernel_init: Initialises the kernel.
        param_dtype: Precision of the kernel.
    """

    features: int
    axis_name: str
    kernel_init: Callable = nn.initializers.lecun_normal()
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, num_inputs: int) -> jax.Array:
        """Return this device's columns."""
        shape = (num_inputs, self.features)
        return self.split_param("kernel", self.kernel_init, shape, self.param_dtype, 1, self.axis_name)


class ColumnDense(SplitModule):
    """Dense layer whose output features are sharded over a mesh axis.

    Attributes:
        features: The number of output features over all devices.
        axis_name: The mesh axis.
        use_bias: Whether to add a bias.
        kernel_init: Initialises the kernel.
        bias_init: Initialises the bias.
        dtype: Precision of the computation.
        param_dtype: Precision of the parameters.
        float8: Whether matmuls are computed in float8.
    """

    features: int
    axis_name: str
    use_bias: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    float8: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return this device's outputs for replicated inputs."""
        (y,) = apply_to_same(x, [self])
        return y

    @nn.compact
    def own_params(self, num_inputs: int) -> tuple[jax.Array, jax.Array | None]:
        """Return this device's shard of the kernel, and of the bias if there is one."""

        def own(name: str, init: Callable, shape: tuple[int, ...]) -> jax.Array:
            return self.split_param(name, init, shape, self.param_dtype, len(shape) - 1, self.axis_name)

        kernel = own("kernel", self.kernel_init, (num_inputs, self.features))
        return kernel, own("bias", self.bias_init, (self.features,)) if self.use_bias else None


def apply_to_same(x: jax.Array, layers: Sequence[ColumnDense]) -> list[jax.Array]:
    """Apply layers to the same replicated inputs, whose gradient is then a single matmul, not a sum of many.

    Layers in float32 with bfloat16 inputs are part of that matmul, with 16 bits of their kernels. Layers in float8, and
    those of any other mix of precisions, have one matmul for each kind.
    """
    groups: dict[tuple[jnp.dtype, bool], list[int]] = {}
    for index, layer in enumerate(layers):
        dtype = jnp.dtype(layer.dtype)
        is_finer = x.dtype == jnp.bfloat16 and dtype == jnp.float32
        groups.setdefault((x.dtype if is_finer else dtype, layer.float8), []).append(index)
    kernels, biases = zip(*(layer.own_params(x.shape[-1]) for layer in layers), strict=True)
    outputs: dict[int, jax.Array] = {}
    for (dtype, float8), indices in groups.items():
        own = tuple(kernels[index] for index in indices)
        dtypes = tuple(jnp.dtype(layers[index].dtype) for index in indices)
        results = _multiply(x.astype(dtype), own, dtypes, float8=float8)
        outputs |= zip(indices, results, strict=True)
    return [
        outputs[index] if bias is None else outputs[index] + bias.astype(layers[index].dtype)
        for index, bias in enumerate(biases)
    ]


def _multiply(x: jax.Array, kernels: tuple[jax.Array, ...], dtypes: tuple[jnp.dtype, ...], *, float8: bool) -> Any:
    return float8_products(x, kernels, dtypes[0]) if float8 else products(x, kernels, dtypes)


class RowDense(SplitModule):
    """Dense layer whose input features are sharded over a mesh axis.

    Attributes:
        features: The number of output features.
        axis_name: The mesh axis.
        use_bias: Whether to add a bias.
        kernel_init: Initialises the kernel.
        dtype: Precision of the computation.
        param_dtype: Precision of the parameters.
        float8: Whether matmuls are computed in float8.
    """

    features: int
    axis_name: str
    use_bias: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    float8: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return replicated outputs for this device's inputs."""
        size, dtype = axis_size(self.axis_name), jnp.dtype(self.dtype)
        shape = (x.shape[-1] * size, self.features)
        kernel = self.split_param("kernel", self.kernel_init, shape, self.param_dtype, 0, self.axis_name)
        (y,) = _multiply(keep(x.astype(dtype), OPERAND), (kernel,), (dtype,), float8=self.float8)
        if size > 1:
            y = lax.psum(y, self.axis_name)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
            y = y + bias.astype(dtype)
        return y
