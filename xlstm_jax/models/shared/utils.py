"""Wrappers for FSDP and rematerialisation, and helpers for logits and the residual stream."""

import functools
from collections.abc import Callable

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_policies

from xlstm_jax.distributed.data_parallel import shard_module_params
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.kernels.shared.remat_names import SMALL, STREAM, keep
from xlstm_jax.kernels.shared.soft_cap import soft_cap_logits

__all__ = ["add_branch", "prepare_module", "soft_cap_logits"]


def prepare_module(
    layer: Callable[..., nn.Module], layer_name: str, config: ParallelConfig | None
) -> Callable[..., nn.Module]:
    """Wrap a module class for FSDP sharding and rematerialisation, if the config lists its name.

    Args:
        layer: The module class, or a `functools.partial` of one.
        layer_name: The name of the module in `fsdp_modules` and `remat` of the config.
        config: The config; `None` leaves the module unchanged.

    Returns:
        The wrapped class. The names of its parameters do not change.
    """
    if config is None:
        return layer
    if layer_name in config.fsdp_modules:
        layer = shard_module_params(
            layer,
            axis_name=config.fsdp_axis_name,
            min_weight_size=config.fsdp_min_weight_size,
            gather_dtype=config.fsdp_gather_dtype,
            grad_scatter_dtype=config.fsdp_grad_scatter_dtype,
        )
    return _remat(layer) if layer_name in config.remat else layer


def add_branch(x: jax.Array, branch: jax.Array) -> jax.Array:
    """Add the output of a branch to the residual stream, and save the sum for the backward pass.

    On GPUs, XLA fuses the addition into the last matmul of the branch if both arrays are matrices. With more axes, it
    would first copy the stream.
    """
    assert x.shape == branch.shape, f"{branch.shape} is added to {x.shape}"
    rows = -1, x.shape[-1]
    return keep((x.reshape(rows) + branch.reshape(rows)).reshape(x.shape), STREAM)


def _remat(layer: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    if isinstance(layer, functools.partial):
        return functools.partial(_remat(layer.func), *layer.args, **layer.keywords)
    wrapped = nn.remat(layer, prevent_cse=False, policy=checkpoint_policies.save_only_these_names(SMALL))
    wrapped.__name__ = layer.__name__
    return wrapped
