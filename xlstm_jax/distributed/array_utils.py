"""Operations on sharded arrays: slicing the local shard, gathering, and random keys per device."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as bound_axis_names

from xlstm_jax.common_types import PRNGKeyArray, PyTree
from xlstm_jax.utils.partitioned import (
    AxisName,
    axes_of,
    is_partitioned,
    partition_names,
    unboxed,
    with_names,
)


class UnknownAxisError(NameError, ValueError):
    """The surrounding mesh has no axis of this name; a `NameError`, as JAX raises for unbound axes."""


def axis_size(axis_name: AxisName) -> int:
    """Return the number of devices along a mesh axis, 1 outside of any mesh.

    So a layer that calls this also runs outside of a mesh, as if each axis had one device.

    Raises:
        UnknownAxisError: The surrounding mesh has other axes, but not this one.
    """
    return math.prod(_size_of(axis) for axis in axes_of(axis_name))


def _size_of(axis: str) -> int:
    try:
        return lax.axis_size(axis)
    except NameError:
        if names := bound_axis_names():
            raise UnknownAxisError(
                f"Unknown mesh axis {axis!r}: the axes here are {', '.join(map(str, names))}. Use one of these names, "
                f"or add {axis!r} to the mesh (one device is enough)."
            ) from None
        return 1


def check_axis(axis_name: AxisName) -> None:
    """Raise `UnknownAxisError` if the surrounding mesh does not have the axis."""
    axis_size(axis_name)


def is_in_mesh() -> bool:
    """Return whether mesh axes are bound, as inside `jax.shard_map`."""
    return bool(bound_axis_names())


def axis_index(axis_name: AxisName) -> jax.Array | int:
    """Return this device's index along a mesh axis, 0 if the axis has one device or there is no mesh."""
    return lax.axis_index(axis_name) if axis_size(axis_name) > 1 else 0


def fold_rng_over_axis(rng: PRNGKeyArray, axis_name: AxisName) -> PRNGKeyArray:
    """Fold the random key over the given axis.

    This is useful for generating a different random number for each device across a certain axis (e.g. the model axis).

    Args:
        rng: The random key.
        axis_name: The mesh axis, or a tuple of axes, to fold the key over.

    Returns:
        A new key, different for each device index along the axis.
    """
    return jax.random.fold_in(rng, axis_index(axis_name))


def split_array_over_mesh(x: jax.Array, axis_name: AxisName, split_axis: int) -> jax.Array:
    """Split an array over the given mesh axis.

    Args:
        x: The array to split.
        axis_name: The mesh axis to split over.
        split_axis: The axis of the array to split.

    Returns:
        The contiguous slice of the array that belongs to this device.
    """
    num_devices = axis_size(axis_name)
    if num_devices == 1:
        return x
    size, remainder = divmod(x.shape[split_axis], num_devices)
    if remainder:
        raise ValueError(
            f"Axis {split_axis} of an array of shape {x.shape} cannot be split over the {num_devices} devices of mesh "
            f"axis {axis_name!r}: {x.shape[split_axis]} is not a multiple of {num_devices}."
        )
    return lax.dynamic_slice_in_dim(x, axis_index(axis_name) * size, size, axis=split_axis)


def slice_computed_whole(x: jax.Array, axis_name: AxisName, split_axis: int) -> jax.Array:
    """Slice this device's shard from an array that every device computes in full, such as initial parameters.

    The barrier keeps the compiler from computing only the slice: that may round differently, but the same seed must
    give bit-identical parameters on every mesh.
    """
    return split_array_over_mesh(lax.optimization_barrier(x), axis_name, split_axis)


def gather_whole(x: jax.Array, names: tuple[AxisName | None, ...]) -> jax.Array:
    """All-gather a sharded array.

    Args:
        x: This device's shard.
        names: The mesh axis of each dimension, `None` for a dimension that is not sharded.

    Returns:
        The full array, replicated over these axes.
    """
    for dim, name in enumerate(names):
        if name is not None and axis_size(name) > 1:
            x = lax.all_gather(x, name, axis=dim, tiled=True)
    return x


def slice_own(x: jax.Array, names: tuple[AxisName | None, ...]) -> jax.Array:
    """Slice this device's shard from a replicated array; the inverse of `gather_whole`."""
    for dim, name in enumerate(names):
        if name is not None:
            x = split_array_over_mesh(x, name, dim)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale_gradient(x: jax.Array, scale: float) -> jax.Array:
    """Return `x` unchanged, and multiply its gradient by `scale`."""
    del scale
    return x


scale_gradient.defvjp(lambda x, _: (x, None), lambda scale, _, gradient: (gradient * scale,))


def mean_gradient_over(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return a parameter that is sharded over an axis, with the gradient of the mean over the devices of that axis.

    The objective is the mean of the local losses over all devices, but differentiating inside `jax.shard_map` gives the
    gradient of their sum. `sync_gradients` divides by the sizes of the axes that a leaf is replicated over; this
    function divides by the size of the axis that it is sharded over.
    """
    size = axis_size(axis_name)
    return scale_gradient(x, 1.0 / size) if size > 1 else x


def mask_all_except(x: jax.Array, axis_name: AxisName, index: jax.Array | int) -> jax.Array:
    """Zero an array on all devices along a mesh axis except one.

    Args:
        x: The array.
        axis_name: The mesh axis.
        index: The index of the device that keeps its values. A traced index cannot be checked while tracing: if it is
            out of range, a floating-point result is NaN on all devices.

    Returns:
        The array on that device, zeros on the others.
    """
    size = axis_size(axis_name)
    masked = jnp.where(axis_index(axis_name) == index, x, jnp.zeros_like(x))
    if isinstance(index, Tracer):
        is_checkable = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.where((index >= 0) & (index < size), masked, jnp.nan) if is_checkable else masked
    if not 0 <= index < size:
        raise ValueError(f"mask_except is {index}, but the indices along mesh axis {axis_name!r} are 0 to {size - 1}.")
    return masked


def stack_params(
    params: PyTree, axis_name: AxisName, axis: int = 0, mask_except: jax.Array | int | None = None
) -> PyTree:
    """Stack sharded parameters along a given axis name.

    Args:
        params: PyTree of parameters.
        axis_name: Name of the mesh axis to stack along.
        axis: Index of the new array axis; counted from the end of the result if negative.
        mask_except: If not None, only the `mask_except`-th shard will be non-zero; see `mask_all_except`.

    Returns:
        PyTree of parameters with the same structure as params, but with the leaf nodes replaced by `nn.Partitioned`
        objects with sharding over axis name added to axis-th axis of parameters.

    Raises:
        ValueError: `mask_except` is not the index of a device along the axis.
    """
    check_axis(axis_name)

    def stack(x):
        value, names = unboxed(x), partition_names(x)
        position = axis if axis >= 0 else len(names) + 1 + axis
        if not 0 <= position <= len(names):
            raise ValueError(f"Cannot insert an axis at {axis} into a parameter of shape {jnp.shape(value)}.")
        if mask_except is not None:
            value = mask_all_except(value, axis_name, mask_except)
        return with_names(jnp.expand_dims(value, position), (*names[:position], axis_name, *names[position:]))

    return jax.tree.map(stack, params, is_leaf=is_partitioned)


def unstack_params(params: PyTree, axis_name: AxisName) -> PyTree:
    """Unstack parameters along a given axis name.

    Inverse operation to `stack_params`.

    Args:
        params: PyTree of parameters.
        axis_name: Name of the mesh axis to unstack along.

    Returns:
        PyTree of parameters with the same structure as params, but with the leaf nodes having the sharding over the
        axis name removed.
    """
    check_axis(axis_name)

    def unstack(x):
        names = partition_names(x)
        if axis_name not in names:
            return x
        position = names.index(axis_name)
        value = jnp.squeeze(unboxed(x), axis=position)
        return with_names(value, names[:position] + names[position + 1 :])

    return jax.tree.map(unstack, params, is_leaf=is_partitioned)
