"""Dense layers for models: whole features in and out, split over the model axis in between.

A `ColumnDense` followed by a `RowDense` is a feed-forward layer in which each device has its part of the hidden
features; the only communication is one sum at the end. With one device, or no mesh, both are plain dense layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.distributed.array_utils import axis_size, mean_gradient_over, slice_computed_whole
from xlstm_jax.kernels.float8 import float8_products
from xlstm_jax.utils.partitioned import is_partitioned, unboxed, with_names


class SplitModule(nn.Module):
    """A module with parameters that may be split over a mesh axis."""

    def split_param(
        self, name: str, init: Callable, shape: tuple[int, ...], dtype: DTypeLike, axis: int | None, axis_name: str
    ) -> jax.Array:
        """Create or read a parameter.

        Args:
            name: The name of the parameter.
            init: Its initialiser; it draws the whole parameter, so that the mesh leaves no trace in it.
            shape: The shape of the whole parameter.
            dtype: Its precision.
            axis: The dimension that is split, `None` for none.
            axis_name: The mesh axis to split over.

        Returns:
            This device's part.
        """
        size = axis_size(axis_name) if axis is not None else 1
        if axis is not None and shape[axis] % size:
            raise ValueError(
                f"Parameter {name!r} of shape {shape} cannot be split over {size} devices along axis {axis}."
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
    """The kernel of a `ColumnDense`, for those who multiply with it themselves.

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
    """Dense layer whose output features are split over a mesh axis.

    Attributes:
        features: The number of output features over all devices.
        axis_name: The mesh axis.
        use_bias: Whether to add a bias.
        kernel_init: Initialises the kernel.
        bias_init: Initialises the bias.
        dtype: Precision of the computation.
        param_dtype: Precision of the parameters.
        float8: Whether products are computed in float8.
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
        """Return this device's outputs for whole inputs."""
        (y,) = apply_to_same(x, [self])
        return y

    @nn.compact
    def own_params(self, num_inputs: int) -> tuple[jax.Array, jax.Array | None]:
        """Return this device's part of the kernel, and of the bias if there is one."""

        def own(name: str, init: Callable, shape: tuple[int, ...]) -> jax.Array:
            return self.split_param(name, init, shape, self.param_dtype, len(shape) - 1, self.axis_name)

        kernel = own("kernel", self.kernel_init, (num_inputs, self.features))
        return kernel, own("bias", self.bias_init, (self.features,)) if self.use_bias else None


def apply_to_same(x: jax.Array, layers: Sequence[ColumnDense]) -> list[jax.Array]:
    """Apply layers of one precision to the same whole inputs, whose gradient is then one product, not a sum of many."""
    params = [layer.own_params(x.shape[-1]) for layer in layers]
    dtype = jnp.dtype(layers[0].dtype)
    multiply = float8_products if layers[0].float8 else _products
    outputs: Any = multiply(x.astype(dtype), tuple(kernel for kernel, _ in params), dtype)
    return [y if bias is None else y + bias.astype(dtype) for y, (_, bias) in zip(outputs, params, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products(x: jax.Array, kernels: tuple[jax.Array, ...], dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """Multiply features by each of some kernels."""
    outputs, _ = _products_forward(x, kernels, dtype)
    return outputs


def _products_forward(x, kernels, dtype):
    return tuple(x @ kernel.astype(dtype) for kernel in kernels), (x, kernels)


def _products_backward(dtype, residuals, gradients):
    """Lay all gradients side by side: sums over layers are then those within a product.

    They are stored like that, as XLA would otherwise put them together once more for each product.
    """
    x, kernels = residuals
    dy, kernel = (jnp.concatenate(parts, axis=-1) for parts in (gradients, kernels))
    dy, kernel = lax.optimization_barrier((dy, kernel.astype(dtype)))
    dkernel = jnp.einsum("...i,...o->io", x, dy, preferred_element_type=kernels[0].dtype)
    ends = np.cumsum([part.shape[-1] for part in kernels])
    return dy @ kernel.T, tuple(jnp.split(dkernel, ends[:-1], axis=-1))


_products.defvjp(_products_forward, _products_backward)


class RowDense(SplitModule):
    """Dense layer whose input features are split over a mesh axis.

    Attributes:
        features: The number of output features.
        axis_name: The mesh axis.
        use_bias: Whether to add a bias.
        kernel_init: Initialises the kernel.
        dtype: Precision of the computation.
        param_dtype: Precision of the parameters.
        float8: Whether products are computed in float8.
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
        """Return whole outputs for this device's inputs."""
        size = axis_size(self.axis_name)
        shape = (x.shape[-1] * size, self.features)
        kernel = self.split_param("kernel", self.kernel_init, shape, self.param_dtype, 0, self.axis_name)
        x = x.astype(self.dtype)
        if self.float8:
            products: Any = float8_products(x, (kernel,), jnp.dtype(self.dtype))
            (y,) = products
        else:
            y = x @ kernel.astype(self.dtype)
        if size > 1:
            y = lax.psum(y, self.axis_name)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), self.param_dtype)
            y = y + bias.astype(self.dtype)
        return y
