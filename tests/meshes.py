"""Meshes of the eight simulated devices, and how tests run a device's program on them."""

import math
import os
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


EXACT = None if "optimization_level=3" in os.environ["XLA_FLAGS"] else {"xla_backend_optimization_level": 1}
"""For tests of the last bits: without any optimisation, as most tests compile, they depend on how arrays are split."""


def make_mesh(**sizes: int) -> Mesh:
    """Arrange as many devices as the sizes need; axes that are not named have one."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), AXES)


def on_mesh(function: Callable, mesh: Mesh, in_specs=P(), out_specs=P(), compiler_options=None) -> Callable:
    """Turn a device's program into one over global arrays."""
    program = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(program, compiler_options=compiler_options)


def specs_of(function: Callable, mesh: Mesh, *args, in_specs=P()):
    """Find the partition specs of a device program's boxed results."""
    shapes = jax.eval_shape(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False), *args
    )
    return nn.get_partition_spec(shapes)


def run_sharded(function: Callable, mesh: Mesh, *args, in_specs=P(), compiler_options=None):
    """Run a device's program whose results say by their boxes how they are split."""
    out_specs = specs_of(function, mesh, *args, in_specs=in_specs)
    return on_mesh(function, mesh, in_specs, out_specs, compiler_options)(*args)


def unboxed_tree(tree):
    """Open all boxes and fetch the global arrays."""
    return jax.tree.map(lambda x: np.array(unboxed(x)), tree, is_leaf=is_partitioned)
