"""Checks of configs and of the arguments of models."""

import dataclasses
import functools
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.mesh_utils import ParallelConfig

MODULE_NAMES = ("Embed", "Block", "LMHead")
"""The valid module names in `fsdp_modules` and `remat` of a `ParallelConfig`."""


def check_dtypes(config: Any, names: tuple[str, ...]) -> None:
    """Raise if a field does not name a floating-point type."""
    for name in names:
        value = getattr(config, name)
        try:
            is_float = value is not None and jnp.issubdtype(jnp.dtype(value), jnp.floating)
        except TypeError:
            is_float = False
        if not is_float:
            raise ConfigError(f"{name} is {value!r}, but must name a floating-point type such as float32 or bfloat16.")


def check_float8(config: Any) -> None:
    """Raise if the dtype of activations lacks the range that float8 needs."""
    if config.float8 and config.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"float8 needs the range of bfloat16, but dtype is {config.dtype}: set dtype to bfloat16.")


def check_literals(config: Any) -> None:
    """Raise if the value of a field is not one of its choices."""
    for field in dataclasses.fields(config):
        options, value = typing.get_args(field.type), getattr(config, field.name)
        if typing.get_origin(field.type) is Literal and value not in options:
            raise ConfigError(f"{field.name} is {value!r}, but must be {', '.join(options)}.")


def check_parallel(parallel: ParallelConfig) -> None:
    """Raise if a setting has no effect on models."""
    for field in ("fsdp_modules", "remat"):
        unknown = [name for name in getattr(parallel, field) if name not in MODULE_NAMES]
        if unknown:
            raise ConfigError(f"{field} names {unknown[0]!r}, but the parts of a model are {', '.join(MODULE_NAMES)}.")
    if parallel.tp_async_dense:
        raise ConfigError("tp_async_dense is for layers made by `tp_dense`; those of the models have no ring to hide.")
    if parallel.pipeline_axis_size != 1:
        raise ConfigError(
            f"pipeline_axis_size is {parallel.pipeline_axis_size}, but must be 1: models have no pipeline stages yet, "
            "so all devices of that axis would compute the same. Use the data, fsdp or model (tensor) axis."
        )


def check_heads(num_heads: int, parallel: ParallelConfig) -> None:
    """Raise unless the number of heads is divisible by the size of the model axis."""
    num_devices = axis_size(parallel.model_axis_name)
    if num_heads % num_devices:
        raise ConfigError(
            f"num_heads is {num_heads}, which {num_devices} devices cannot share evenly: set parallel.model_axis_size "
            f"to a divisor of {num_heads}, or num_heads to a multiple of {num_devices}."
        )


def check_tokens(tokens: jax.Array | np.ndarray, **same_shape: jax.Array | np.ndarray | None) -> None:
    """Raise unless tokens are `[batch, length]`, not empty, and each further given array has the same shape."""
    for name, x in {"tokens": tokens, "targets": same_shape.get("targets")}.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}, but must hold integers: convert it to int32.")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens has shape {tokens.shape}, but must be [batch, length] with at least one token.")
    for name, x in same_shape.items():
        if x is not None and x.shape != tokens.shape:
            raise ValueError(f"{name} has shape {x.shape}, but tokens has shape {tokens.shape}: they must be the same.")


def check_state(state: PyTree, expected: PyTree) -> PyTree:
    """Return a state, or raise if it belongs to another model or has another number of rows."""
    describe = functools.partial(jax.tree.map, lambda x: f"{x.dtype}{list(x.shape)}")
    if jax.tree.structure(state) != jax.tree.structure(expected) or describe(state) != describe(expected):
        raise ValueError(
            f"The state is not one of this model for this number of rows. It is {describe(state)}, but must be "
            f"{describe(expected)}, as init_state makes it."
        )
    return state
