"""Layers that share an input: each with a kernel of its own, or all kernels side by side in one product.

Models are trained and saved with separate kernels. For one token at a time it is the number of products that counts, so
decoding may lay them side by side first: those of the layers `q`, `k` and `v` are then the kernel of a layer `q+k+v`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import ColumnDense

GROUPS = ("q", "k", "v", "ogate"), ("igate", "fgate"), ("gate", "up")
"""The layers of an `mlstm` block that share an input, in the order in which `project` gets them."""


def project(module: nn.Module, x: jax.Array, layers: Mapping[str, Mapping[str, Any]], **common: Any) -> list[jax.Array]:
    """Apply layers that share an input, inside a module that is being called.

    Args:
        module: The module.
        x: The input.
        layers: By the name of each layer, its `features` and how its parameters are initialised.
        **common: Further arguments of each `ColumnDense`.

    Returns:
        The output of each layer.
    """
    together = "+".join(layers)
    if not module.has_variable("params", together):
        return [ColumnDense(name=name, **arguments, **common)(x) for name, arguments in layers.items()]
    features = [arguments["features"] for arguments in layers.values()]
    ends = np.cumsum(features) // axis_size(common["axis_name"])
    return jnp.split(ColumnDense(sum(features), name=together, **common)(x), ends[:-1], axis=-1)


def lay_side_by_side(params: Mapping[str, Any]) -> dict[str, Any]:
    """Make one layer of each group of layers.

    Args:
        params: The parameters of an `mlstm` block, without boxes.

    Returns:
        Parameters for the same block.
    """
    tree = {name: lay_side_by_side(x) if isinstance(x, Mapping) else x for name, x in params.items()}
    for group in GROUPS:
        if all(isinstance(tree.get(name), Mapping) for name in group):
            parts = [tree.pop(name) for name in group]
            tree["+".join(group)] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *parts)
    return tree
