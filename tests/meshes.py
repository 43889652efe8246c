"""Meshes of the eight simulated devices, and how tests run a device's program on them."""

import math
from collections.abc import Callable

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xlstm_jax.utils.partitioned import is_partitioned, unboxed

AXES = ("dp", "fsdp", "pp", "tp")
BATCH = P(("dp", "fsdp"))
"""The rows of a batch are split over the data axes, and the same on the others."""

MESHES = {
    "dp8": {"dp": 8},
    "fsdp8": {"fsdp": 8},
    "tp8": {"tp": 8},
    "dp2-tp4": {"dp": 2, "tp": 4},
    "fsdp4-tp2": {"fsdp": 4, "tp": 2},
    "dp2-fsdp2-tp2": {"dp": 2, "fsdp": 2, "tp": 2},
}


def make_mesh(**sizes: int) -> Mesh:
    """Arrange as many devices as the sizes need; axes that are not named have one."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), AXES)


def on_mesh(function: Callable, mesh: Mesh, in_specs=P(), out_specs=P()) -> Callable:
    """Turn a device's program into one over global arrays."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def specs_of(function: Callable, mesh: Mesh, *args, in_specs=P()):
    """Find the partition specs of a device program's boxed results."""
    shapes = jax.eval_shape(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False), *args
    )
    return nn.get_partition_spec(shapes)


def run_sharded(function: Callable, mesh: Mesh, *args, in_specs=P()):
    """Run a device's program whose results say by their boxes how they are split."""
    return on_mesh(function, mesh, in_specs, specs_of(function, mesh, *args, in_specs=in_specs))(*args)


def unboxed_tree(tree):
    """Open all boxes and fetch the global arrays."""
    return jax.tree.map(lambda x: np.array(unboxed(x)), tree, is_leaf=is_partitioned)
