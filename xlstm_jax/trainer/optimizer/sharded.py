"""Gradient transformations based on norms that are summed over shards, so that they do not depend on the mesh."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from xlstm_jax.common_types import Parameter, PyTree
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.norms import get_sharded_global_norm, squared_sum, sum_over_shards
from xlstm_jax.utils.partitioned import (
    is_partitioned,
    map_unboxed,
    partition_axes,
    partition_names,
    reboxed,
    unboxed,
    with_names,
)
from xlstm_jax.utils.pytree_utils import get_param_mask_fn, pytree_key_path_to_str


def clip_by_global_norm_sharded(max_norm: float) -> optax.GradientTransformation:
    """Clip gradients by their global norm, taken over all shards.

    Args:
        max_norm: The maximum norm; larger gradients are scaled down to it.

    Returns:
        The gradient transformation.
    """

    def clip(updates: PyTree, params: PyTree | None) -> PyTree:
        del params
        norm, _ = get_sharded_global_norm(updates)
        scale = max_norm / jnp.maximum(max_norm, norm)
        return map_unboxed(lambda x: x * scale.astype(x.dtype), updates)

    return optax.stateless(clip)


def clip_by_global_norm_replicated(max_norm: float) -> optax.GradientTransformation:
    """Clip gradients by their global norm, computed on each device separately; a sharded gradient raises an error.

    Args:
        max_norm: The maximum norm; larger gradients are scaled down to it.

    Returns:
        The gradient transformation.
    """
    optax_clip = optax.clip_by_global_norm(max_norm)

    def clip(updates: PyTree, params: PyTree | None) -> PyTree:
        _refuse_split_leaves(updates)
        return optax_clip.update(updates, optax.EmptyState(), params)[0]

    return optax.stateless(clip)


def _refuse_split_leaves(tree: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_partitioned):
        axes = partition_axes(leaf)
        if axis_size(axes) > 1:
            raise ValueError(
                f"The gradient of {pytree_key_path_to_str(path)!r} is split over the mesh axes {axes}, so its norm "
                "on this device is not that of the whole. Set use_sharded_clip_norm=True."
            )


def scale_by_trust_ratio_sharded(stacked_params: Sequence[str]) -> optax.GradientTransformation:
    """Scale the update of each parameter by the norm of the parameter over that of the update, as LAMB does.

    Args:
        stacked_params: Regular expressions for the names of leaves that hold one parameter of each block along their
            first axis: every block has its own ratio.

    Returns:
        The gradient transformation. Where a norm is 0, the ratio is 1.
    """
    is_stacked = get_param_mask_fn(None, include=stacked_params)

    def scale(updates: PyTree, params: PyTree | None) -> PyTree:
        if params is None:
            raise ValueError("The trust ratio needs the parameters: call `update(updates, state, params)`.")
        return jax.tree.map(_scale_by_trust_ratio, updates, params, is_stacked(updates), is_leaf=is_partitioned)

    return optax.stateless(scale)


def _scale_by_trust_ratio(update: Parameter, param: Parameter, stacked: bool) -> Parameter:
    param_norm, update_norm = _norm(param, per_block=stacked), _norm(update, per_block=stacked)
    defined = (param_norm > 0) & (update_norm > 0)
    ratio = jnp.where(defined, param_norm / jnp.where(defined, update_norm, 1.0), 1.0)
    value = unboxed(update)
    ratio = ratio.reshape(ratio.shape + (1,) * (value.ndim - ratio.ndim))
    return reboxed(update, value * ratio.astype(value.dtype))


def _norm(leaf: Parameter, *, per_block: bool) -> jax.Array:
    """Return the norm of a leaf over all shards, or with `per_block` of each of this device's blocks."""
    value = unboxed(leaf)
    part = with_names(value[0], partition_names(leaf)[1:]) if per_block else leaf
    return jnp.sqrt(sum_over_shards(squared_sum(value, keep_leading=per_block), part))
