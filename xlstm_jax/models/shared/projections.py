"""Layers that share an input: each with its own kernel, or all kernels concatenated for a single matmul.

Models are trained and saved with separate kernels. For one token at a time, the number of matmuls determines the speed,
so decoding may concatenate them first: the kernels of the layers `q`, `k` and `v` become that of a layer `q+k+v`.
Kernels with few outputs are transposed too: for one token, a sum along the rows of a matrix is faster than one along
its short columns.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import ColumnDense, apply_to_same

GATES = ("igate", "fgate")
GROUPS = ("q", "k", "v", "ogate"), GATES, ("gate", "up")
"""The layers of a block that share an input, in the order in which `project` gets them."""


def common_arguments(config: Any) -> dict[str, Any]:
    """Return the arguments that all projections of a model share."""
    return {
        "axis_name": config.parallel.model_axis_name,
        "use_bias": config.use_bias,
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
        "float8": config.float8,
    }


class TransposedDense(ColumnDense):
    """A `ColumnDense` whose kernel is stored as `[outputs, inputs]`, for one token at a time.

    It has the attributes of `ColumnDense`. Nothing is initialised: its parameters come from other layers.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return this device's outputs for unsharded inputs."""
        if x.shape[-2] > 1:
            return super().__call__(x)
        kernel, bias = self.own_params(x.shape[-1])
        y = x.astype(self.dtype) @ kernel.astype(self.dtype)
        return y if bias is None else y + bias.astype(self.dtype)

    @nn.compact
    def own_params(self, num_inputs: int) -> tuple[jax.Array, jax.Array | None]:
        """Return this device's shard of the kernel, and of the bias if there is one."""

        def own(name: str, shape: tuple[int, ...]) -> jax.Array:
            return self.split_param(name, nn.initializers.zeros, shape, self.param_dtype, 0, self.axis_name)

        return own("kernel", (self.features, num_inputs)).T, own("bias", (self.features,)) if self.use_bias else None


def project(module: nn.Module, x: jax.Array, layers: Mapping[str, Mapping[str, Any]], **common: Any) -> list[jax.Array]:
    """Apply layers that share an input, inside a module that is being called.

    Args:
        module: The module.
        x: The input.
        layers: For each layer by name, its `features` and other arguments.
        **common: Further arguments of each `ColumnDense`.

    Returns:
        The output of each layer.
    """
    arguments = {name: {**common, **own} for name, own in layers.items()}
    groups = [group for group in GROUPS if group[0] in layers]
    if not any(module.has_variable("params", "+".join(group)) for group in groups):
        return apply_to_same(x, [ColumnDense(name=name, **own) for name, own in arguments.items()])
    return [y for group in groups for y in _project_together(x, {name: arguments[name] for name in group})]


def _project_together(x: jax.Array, layers: Mapping[str, Mapping[str, Any]]) -> list[jax.Array]:
    """Apply layers whose kernels are concatenated."""
    features = [own["features"] for own in layers.values()]
    first = next(iter(layers.values()))
    ends = np.cumsum(features) // axis_size(first["axis_name"])
    shared = {name: first[name] for name in ("axis_name", "use_bias", "dtype", "param_dtype")}
    dense = TransposedDense if tuple(layers) == GATES else ColumnDense
    return jnp.split(dense(sum(features), name="+".join(layers), **shared)(x), ends[:-1], axis=-1)


def concatenate_kernels(params: Mapping[str, Any]) -> dict[str, Any]:
    """Concatenate the kernels of each group of layers that share an input.

    Args:
        params: The parameters of a block whose layers are applied by `project`, without boxes.

    Returns:
        Parameters for the same block.
    """
    tree = {name: concatenate_kernels(x) if isinstance(x, Mapping) else x for name, x in params.items()}
    for group in GROUPS:
        if all(isinstance(tree.get(name), Mapping) for name in group):
            parts = [tree.pop(name) for name in group]
            merged = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *parts)
            if group == GATES:
                merged["kernel"] = merged["kernel"].T
            tree["+".join(group)] = merged
    return tree
