"""Tensor parallelism: dense layers whose kernels are sharded over a mesh axis.

In the global view, a sharded kernel is one array: column-parallel layers ("gather") shard its output axis, row-parallel
layers ("scatter") its input axis. It is initialised in full and then sliced, so a seed gives the same parameters on
every mesh. With one device, or no mesh at all, each layer is the plain dense layer.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict
from flax.core.scope import LazyRng
from jax import lax

from xlstm_jax.common_types import Parameter, PyTree
from xlstm_jax.distributed.array_utils import (
    axis_index,
    axis_size,
    fold_rng_over_axis,
    mask_all_except,
    mean_gradient_over,
    slice_computed_whole,
    split_array_over_mesh,
    stack_params,
    unstack_params,
)
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.distributed.ring import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)
from xlstm_jax.utils.partitioned import is_partitioned, map_unboxed, unboxed, with_names

__all__ = [
    "ModelParallelismWrapper",
    "TPAsyncDense",
    "TPDense",
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "scale_init",
    "tp_dense",
]

TPMode = Literal["scatter", "gather", "none"]

SPLIT_AXES: dict[str, dict[str, int | None]] = {
    "gather": {"kernel": 1, "bias": 0},
    "scatter": {"kernel": 0, "bias": None},
    "none": {"kernel": None, "bias": None},
}
"""The dimension of each parameter that a mode shards."""


class ModelParallelismWrapper(nn.Module):
    """Give each device along a mesh axis its own copy of a module, with its own parameters.

    Parameters get a leading axis that is sharded over the mesh axis, even if that has one device. It is for modules
    that are not written for a mesh; the layers below keep the shapes of their parameters instead.

    Attributes:
        model_axis_name: The mesh axis.
        module_fn: Creates the module; called with `name` and `module_kwargs`.
        mask_except_model_idx: If given, the parameters are and stay zero on all devices except this one.
        split_rngs: Whether each device draws its own parameters, or all draw the same.
        module_kwargs: Arguments of `module_fn`.
    """

    model_axis_name: str
    module_fn: Callable[..., nn.Module]
    mask_except_model_idx: int | None = None
    split_rngs: bool = True
    module_kwargs: FrozenDict[str, Any] = FrozenDict({})

    @nn.compact
    def __call__(self, *args, **kwargs):
        """Run this device's copy of the module."""
        if self.is_initializing() and self.split_rngs:
            rngs: Any = self.scope and self.scope.rngs
            rngs["params"] = LazyRng.create(fold_rng_over_axis(rngs["params"].as_jax_rng(), self.model_axis_name))
        run = nn.map_variables(
            lambda module, *args, **kwargs: module(*args, **kwargs),
            "params",
            trans_in_fn=self._own_params,
            trans_out_fn=functools.partial(
                stack_params, axis_name=self.model_axis_name, mask_except=self.mask_except_model_idx
            ),
            mutable=True,
        )
        return run(self.module_fn(name="sharded", **self.module_kwargs), *args, **kwargs)

    def _own_params(self, params: PyTree) -> PyTree:
        def own(x: jax.Array) -> jax.Array:
            if self.mask_except_model_idx is not None:
                x = mask_all_except(x, self.model_axis_name, self.mask_except_model_idx)
            return mean_gradient_over(x, self.model_axis_name)

        return map_unboxed(own, unstack_params(params, self.model_axis_name))


def scale_init(init_fn: Callable, scale_factor: float = 1.0) -> Callable:
    """Scale the output of an initialiser.

    Args:
        init_fn: The initialiser.
        scale_factor: The factor that its results are multiplied by.

    Returns:
        The scaled initialiser.
    """

    def scaled(key: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return scale_factor * init_fn(key, *args, **kwargs)

    return scaled


class TPDense(nn.Module):
    """Dense layer that is sharded over a mesh axis.

    `gather` shards the output features: the inputs are all-gathered, and each device computes its own outputs.
    `scatter` shards the input features: each device computes partial sums of all outputs, which are reduce-scattered.
    In sequence, they form a feed-forward layer without further communication. `none` is a plain layer.

    Attributes:
        dense_fn: Creates the dense layer that a device runs, e.g. `partial(nn.Dense, features=...)`, where `features`
            is the size of this device's outputs before the reduce-scatter.
        model_axis_name: The mesh axis.
        tp_mode: The sharded features.
        skip_communication: With `gather`, the inputs are replicated already; with `scatter`, partial sums are returned.
        kernel_init: Initialises the kernel; called with the shape of the full kernel.
        kernel_init_adjustment: Scale of the initial kernel.
        use_bias: Whether to add a bias.
        dense_name: Name of the parameters.
    """

    dense_fn: Any
    model_axis_name: str
    tp_mode: TPMode = "none"
    skip_communication: bool = False
    kernel_init: Callable = nn.initializers.lecun_normal()
    kernel_init_adjustment: float = 1.0
    use_bias: bool = True
    dense_name: str = "module"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return this device's outputs for its inputs."""
        communicates = not self.skip_communication and axis_size(self.model_axis_name) > 1
        if self.tp_mode == "gather" and communicates:
            x = lax.all_gather(x, self.model_axis_name, axis=-1, tiled=True)
        params, dense = _split_dense(self, num_inputs=x.shape[-1])
        y = dense(params["kernel"], x)
        if self.tp_mode == "scatter" and communicates:
            y = lax.psum_scatter(y, self.model_axis_name, scatter_dimension=y.ndim - 1, tiled=True)
        return _add_bias(self, params, y, summed=communicates)


class TPAsyncDense(nn.Module):
    """`TPDense` with communication in a ring that overlaps with the matmuls.

    It has the parameters of `TPDense` and computes the same function.

    Attributes:
        dense_fn: Creates the dense layer of a step, e.g. `partial(nn.Dense, features=...)`, where `features` is the
            size of this device's outputs, also with `scatter`.
        model_axis_name: The mesh axis.
        tp_mode: The sharded features.
        kernel_init: Initialises the kernel; called with the shape of the full kernel.
        kernel_init_adjustment: Scale of the initial kernel.
        use_bias: Whether to add a bias.
        dense_name: Name of the parameters.
        use_bidirectional_gather: Whether inputs travel in both directions around the ring.
        use_bidirectional_scatter: Whether outputs travel in both directions around the ring, half of the features each.
    """

    dense_fn: Any
    model_axis_name: str
    tp_mode: TPMode = "none"
    kernel_init: Callable = nn.initializers.lecun_normal()
    kernel_init_adjustment: float = 1.0
    use_bias: bool = True
    dense_name: str = "module"
    use_bidirectional_gather: bool = True
    use_bidirectional_scatter: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return this device's outputs for its inputs."""
        size = axis_size(self.model_axis_name)
        gathers, scatters = (self.tp_mode == mode and size > 1 for mode in ("gather", "scatter"))
        params, dense = _split_dense(
            self, num_inputs=x.shape[-1] * (size if gathers else 1), num_output_parts=size if scatters else 1
        )
        if gathers:
            y = self._gather(dense, params["kernel"], x)
        elif scatters:
            y = self._scatter(dense, params["kernel"], x)
        else:
            y = dense(params["kernel"], x)
        return _add_bias(self, params, y, summed=True)

    def _gather(self, dense: Callable, kernel: jax.Array, x: jax.Array) -> jax.Array:
        """Multiply each device's inputs, as they arrive, by the matching rows of the kernel."""
        ring = async_gather_bidirectional if self.use_bidirectional_gather else async_gather
        parts = ring(x, self.model_axis_name)
        sources = [(axis_index(self.model_axis_name) - step) % len(parts) for step in range(len(parts))]
        rows = [_block(kernel, source, len(parts), axis=0) for source in sources]
        return functools.reduce(jnp.add, map(dense, rows, parts))

    def _scatter(self, dense: Callable, kernel: jax.Array, x: jax.Array) -> jax.Array:
        """Compute the outputs for each device in turn, the farthest first, and sum them along the ring."""
        size = axis_size(self.model_axis_name)
        targets = [(axis_index(self.model_axis_name) + size - 1 - step) % size for step in range(size)]
        parts = [dense(_block(kernel, target, size, axis=-1), x) for target in targets]
        return (async_scatter_split if self.use_bidirectional_scatter else async_scatter)(parts, self.model_axis_name)


def tp_dense(
    parallel: ParallelConfig, dense_fn: Callable[..., nn.Module], features: int, tp_mode: TPMode, **kwargs: Any
) -> TPDense | TPAsyncDense:
    """Create a `TPDense` or `TPAsyncDense`, depending on the config.

    Args:
        parallel: Names the mesh axis, and determines whether to communicate in a ring.
        dense_fn: Creates a dense layer, e.g. `nn.Dense`; called with `features`.
        features: The number of output features over all devices.
        tp_mode: The sharded features.
        **kwargs: Further fields of `TPDense` and `TPAsyncDense`.

    Returns:
        The layer. Its parameters do not depend on the kind of communication.
    """
    layer = TPAsyncDense if parallel.tp_async_dense else TPDense
    splits_features = tp_mode == "gather" or (tp_mode == "scatter" and parallel.tp_async_dense)
    size = axis_size(parallel.model_axis_name) if splits_features else 1
    if features % size:
        raise ValueError(f"{features} output features cannot be split over {size} devices: change one of the two.")
    dense_fn = functools.partial(dense_fn, features=features // size)
    return layer(dense_fn, parallel.model_axis_name, tp_mode=tp_mode, **kwargs)


def _split_dense(
    module: TPDense | TPAsyncDense, num_inputs: int, num_output_parts: int = 1
) -> tuple[dict[str, Any], Callable]:
    """Create or read the parameters of a dense layer.

    Args:
        module: The layer.
        num_inputs: The number of input features of this device's kernel.
        num_output_parts: The number of output features of this device's kernel, in multiples of those of `dense_fn`.

    Returns:
        This device's parameters, and a function from a kernel and inputs to outputs without bias.
    """
    axis_name = module.model_axis_name
    if module.tp_mode not in SPLIT_AXES:
        raise ValueError(f"tp_mode is {module.tp_mode!r}, but must be {', '.join(SPLIT_AXES)}.")
    split_axes = SPLIT_AXES[module.tp_mode]

    def init(key: jax.Array) -> dict[str, Any]:
        layer = module.dense_fn(use_bias=module.use_bias, parent=None)
        shapes = jax.eval_shape(layer.init, key, jnp.zeros((1, num_inputs)))["params"]
        if not shapes.keys() <= {"kernel", "bias"}:
            raise ValueError(f"dense_fn must create a layer with a kernel and a bias, not with {', '.join(shapes)}.")
        inits = {
            "kernel": _init_as_matrix(scale_init(module.kernel_init, module.kernel_init_adjustment)),
            "bias": getattr(layer, "bias_init", nn.initializers.zeros),
        }
        return {
            name: _init_split(
                inits[name],
                jax.random.fold_in(key, index),
                (*shapes[name].shape[:-1], shapes[name].shape[-1] * num_output_parts),
                shapes[name].dtype,
                split_axes[name],
                axis_name,
            )
            for index, name in enumerate(sorted(shapes))
        }

    params = module.param(module.dense_name, init, unbox=False)
    own = jax.tree.map(
        lambda p: mean_gradient_over(unboxed(p), axis_name) if is_partitioned(p) else p, params, is_leaf=is_partitioned
    )
    layer = module.dense_fn(use_bias=False, parent=None)
    return dict(own), lambda kernel, x: layer.apply({"params": {"kernel": kernel}}, x)


def _init_as_matrix(init_fn: Callable) -> Callable:
    """Initialise a kernel with several output axes as a matrix, as flax does."""
    return lambda key, shape, dtype: init_fn(key, (shape[0], math.prod(shape[1:])), dtype).reshape(shape)


def _init_split(
    init_fn: Callable, key: jax.Array, shape: tuple[int, ...], dtype: Any, axis: int | None, axis_name: str
) -> Parameter:
    """Initialise a full parameter, and keep this device's shard; `shape` is that of the shard."""
    size = axis_size(axis_name)
    if axis is None or size == 1:
        return init_fn(key, shape, dtype)
    whole = init_fn(key, tuple(dim * size if index == axis else dim for index, dim in enumerate(shape)), dtype)
    own = slice_computed_whole(whole, axis_name, axis)
    return with_names(own, tuple(axis_name if index == axis else None for index in range(len(shape))))


def _add_bias(module: TPDense | TPAsyncDense, params: dict[str, Any], y: jax.Array, *, summed: bool) -> jax.Array:
    """Add the bias once to each output: in a row-parallel layer it is replicated."""
    if not module.use_bias:
        return y
    bias, axis_name = params["bias"].astype(y.dtype), module.model_axis_name
    if module.tp_mode == "scatter" and axis_size(axis_name) > 1:
        if summed:
            bias = split_array_over_mesh(bias, axis_name, split_axis=-1)
        else:
            bias = jnp.where(axis_index(axis_name) == 0, bias, jnp.zeros_like(bias))
    return y + bias


def _block(kernel: jax.Array, index: jax.Array | int, num_blocks: int, axis: int) -> jax.Array:
    size = kernel.shape[axis] // num_blocks
    return lax.dynamic_slice_in_dim(kernel, index * size, size, axis=axis)
