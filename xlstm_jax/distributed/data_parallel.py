"""Data parallelism: FSDP, which shards parameters and gathers them for use, and averaging of gradients."""

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.common_types import Parameter, PyTree
from xlstm_jax.distributed.array_utils import axis_size, check_axis, is_in_mesh, slice_computed_whole
from xlstm_jax.utils.partitioned import (
    AxisName,
    axes_of,
    is_partitioned,
    partition_axes,
    partition_names,
    reboxed,
    unboxed,
    with_names,
)

LOGGER = logging.getLogger(__name__)


def shard_params(params: PyTree, axis_name: AxisName, min_weight_size: int = 2**18) -> PyTree:
    """Shard parameters over a mesh axis, each along its largest evenly divisible dimension that is not sharded yet.

    The boxes do not depend on the number of devices: inside a mesh, they also name an axis with one device.

    Args:
        params: The parameters, replicated over the axis.
        axis_name: The mesh axis to shard over.
        min_weight_size: Parameters with at most this many elements stay replicated.

    Returns:
        The parameters, with this device's shards in `nn.Partitioned` boxes; unchanged outside of any mesh.
    """
    size = axis_size(axis_name)

    def shard(x: Parameter) -> Parameter:
        value, names = unboxed(x), partition_names(x)
        if set(axes_of(axis_name)) & set(partition_axes(x)):
            LOGGER.warning("A parameter of shape %s is split over %s already.", value.shape, axis_name)
            return x
        if not is_in_mesh() or value.size <= min_weight_size:
            return x
        by_size = sorted(range(value.ndim), key=lambda dim: (value.shape[dim], dim), reverse=True)
        dim = next((dim for dim in by_size if names[dim] is None and value.shape[dim] % size == 0), None)
        if dim is None:
            LOGGER.warning(
                "No dimension of a parameter of shape %s, split as %s, divides over %d devices: %s leaves it whole.",
                value.shape,
                names,
                size,
                axis_name,
            )
            return x
        own = slice_computed_whole(value, axis_name, split_axis=dim)
        return with_names(own, (*names[:dim], axis_name, *names[dim + 1 :]))

    return jax.tree.map(shard, params, is_leaf=is_partitioned)


def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: str,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
) -> jax.Array:
    """All-gather an array over a mesh axis; its gradient is averaged over the devices with a reduce-scatter.

    Args:
        x: This device's shard.
        axis: The sharded dimension.
        axis_name: The mesh axis to gather over.
        gather_dtype: Precision of the gathered array; that of `x` by default.
        grad_scatter_dtype: Precision in which gradients are summed; that of `x` by default.

    Returns:
        The full array.
    """
    gather_dtype = jnp.dtype(gather_dtype or x.dtype)
    scatter_dtype = jnp.dtype(grad_scatter_dtype or x.dtype)
    size, axis = axis_size(axis_name), axis % x.ndim

    @jax.custom_vjp
    def gather(x):
        return (
            lax.all_gather(x.astype(gather_dtype), axis_name, axis=axis, tiled=True)
            if size > 1
            else x.astype(gather_dtype)
        )

    def backward(_, gradient):
        gradient = gradient.astype(scatter_dtype)
        if size > 1:
            gradient = lax.psum_scatter(gradient, axis_name, scatter_dimension=axis, tiled=True) / size
        return (gradient.astype(x.dtype),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather(x)


def gather_params(
    params: PyTree,
    axis_name: str,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
) -> PyTree:
    """All-gather the parameters that are sharded over a mesh axis; the inverse of `shard_params`.

    Args:
        params: The parameters.
        axis_name: The mesh axis to gather over.
        gather_dtype: Precision of the gathered parameters; their own by default.
        grad_scatter_dtype: Precision in which gradients are summed; that of the parameters by default.

    Returns:
        The parameters, replicated over that axis. Boxes that name no other axis are removed.
    """
    check_axis(axis_name)

    def gather(x: Parameter) -> Parameter:
        names = partition_names(x)
        if axis_name not in names:
            return x
        dim = names.index(axis_name)
        value = gather_array_with_mean_grads(unboxed(x), dim, axis_name, gather_dtype, grad_scatter_dtype)
        return with_names(value, (*names[:dim], None, *names[dim + 1 :]))

    return jax.tree.map(gather, params, is_leaf=is_partitioned)


def shard_module_params(
    target: nn.Module | Callable,
    axis_name: str,
    min_weight_size: int = 2**18,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
) -> nn.Module | Callable:
    """Shard the parameters of a module over a mesh axis (FSDP): gather them for each call, slice them after init.

    Args:
        target: The module class, or a `functools.partial` of one.
        axis_name: The mesh axis to shard over.
        min_weight_size: Parameters with at most this many elements stay replicated.
        gather_dtype: Precision of the gathered parameters; their own by default.
        grad_scatter_dtype: Precision in which gradients are summed; that of the parameters by default.

    Returns:
        The wrapped class. It has the name of `target`, so names in the parameter tree do not change.
    """
    if isinstance(target, functools.partial):
        wrapped = shard_module_params(target.func, axis_name, min_weight_size, gather_dtype, grad_scatter_dtype)
        return functools.partial(wrapped, *target.args, **target.keywords)
    wrapped = nn.map_variables(
        target,
        "params",
        trans_in_fn=functools.partial(
            gather_params, axis_name=axis_name, gather_dtype=gather_dtype, grad_scatter_dtype=grad_scatter_dtype
        ),
        trans_out_fn=functools.partial(shard_params, axis_name=axis_name, min_weight_size=min_weight_size),
        mutable=True,
    )
    if isinstance(wrapped, type):
        wrapped.__name__ = target.__name__
    return wrapped


def sync_gradients(grads: PyTree, axis_names: str | Sequence[str]) -> PyTree:
    """Average gradients over the mesh axes that their parameters are replicated over.

    Args:
        grads: The gradients of this device; boxes name the axes that a parameter is sharded over.
        axis_names: The mesh axes to average over.

    Returns:
        The gradients of the mean of all devices' losses.
    """
    shared = tuple(axis for axis in axes_of(axis_names) if axis_size(axis) > 1)

    def sync(x: Parameter) -> Parameter:
        own_axes = partition_axes(x)
        axes = tuple(axis for axis in shared if axis not in own_axes)
        return reboxed(x, lax.pmean(unboxed(x), axes)) if axes else x

    return jax.tree.map(sync, grads, is_leaf=is_partitioned)
