"""Placement on a mesh: `jax.shard_map` over global arrays, and the sharding of states, batches and metrics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import PyTree
from xlstm_jax.dataset.batch import Batch


def on_mesh(function: Callable, mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable:
    """Map a per-device function over a mesh, so that it takes and returns global arrays."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def find_specs(function: Callable, mesh: Mesh | AbstractMesh, in_specs: Any, *arguments: Any) -> PyTree:
    """Return the partition specs of the results of a per-device function, from their `nn.Partitioned` boxes."""
    return nn.get_partition_spec(jax.eval_shape(on_mesh(function, mesh, in_specs, P()), *arguments))


def init_sharded(function: Callable, mesh: Mesh, in_specs: Any, *arguments: Any) -> tuple[PyTree, PyTree]:
    """Initialise a pytree directly in its final sharding, which is read from its `nn.Partitioned` boxes.

    Args:
        function: The per-device function.
        mesh: The mesh.
        in_specs: The partition specs of the arguments.
        *arguments: The arguments.

    Returns:
        The results and their partition specs.
    """
    specs = find_specs(function, mesh, in_specs, *arguments)
    return jax.jit(on_mesh(function, mesh, in_specs, specs))(*arguments), specs


def check_rows(batch: Batch, mesh: Mesh | AbstractMesh) -> None:
    """Raise unless the rows of a batch are divisible by the number of devices."""
    num_rows = {x.shape[0] for x in jax.tree.leaves(batch)}
    if any(rows % mesh.size for rows in num_rows):
        raise ValueError(
            f"A batch of {min(num_rows)} rows cannot be split over {mesh.size} devices: the number of rows has to be a "
            f"multiple of it. Use {mesh.size} rows or a multiple, or a mesh of fewer devices."
        )


def place_batch(batch: Batch, mesh: Mesh | AbstractMesh, specs: P) -> Batch:
    """Shard an example batch over a mesh; shapes are replaced by arrays of zeros."""
    if isinstance(mesh, AbstractMesh) or mesh.size == 0:
        raise ValueError(
            f"The mesh {', '.join(mesh.axis_names)} has no devices, so a trainer cannot run on it: pass a "
            "jax.sharding.Mesh of devices, or None for all of them."
        )
    check_rows(batch, mesh)
    sharding = NamedSharding(mesh, specs)

    def place(x: Any) -> jax.Array:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jnp.zeros(x.shape, x.dtype, device=sharding)
        return x if isinstance(x, jax.Array) and x.sharding == sharding else jax.device_put(x, sharding)

    return jax.tree.map(place, batch)


def shapes_on_mesh(shapes: PyTree, mesh: Mesh | AbstractMesh, spec: P) -> PyTree:
    """Return the shapes of arrays that all have the same sharding over a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def zeros_on_mesh(shapes: PyTree, mesh: Mesh) -> FrozenDict:
    """Return replicated zeros of the given shapes."""
    sharding = NamedSharding(mesh, P())
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        out_shardings=jax.tree.map(lambda _: sharding, shapes),
    )
    return FrozenDict(zeros())


def compile_step(
    step: Callable, *, donate: Sequence[int], debug: bool, options: Mapping[str, Any] | None = None
) -> Callable:
    """Compile a step that donates some of its arguments; in a debugging run, return it uncompiled.

    Args:
        step: The step.
        donate: The arguments to donate.
        debug: Whether this is a debugging run.
        options: The compiler options.
    """
    return step if debug else jax.jit(step, donate_argnums=tuple(donate), compiler_options=dict(options or {}) or None)
