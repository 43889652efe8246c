"""Communication volume of a training step.

`count_communication` counts the collectives of the traced step; `estimate_communication` needs only the sharding of the
parameters, to compare many meshes quickly. Both return the bytes that one device sends with ring algorithms, by the
mesh axes of the collective; axes of size 1 are left out.
"""

import collections
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from xlstm_jax.planning.memory import Parameter
from xlstm_jax.planning.setup import Setup, names_of
from xlstm_jax.utils.partitioned import axes_of

Communication = dict[tuple[str, ...], float]
"""Bytes that a device sends per step, by the mesh axes of the collective."""

RING_PASSES = {"psum": 2, "pmax": 2, "pmin": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often each part of an array travels around the ring, by collective."""

BLOCKS = "block_stack"
SUMS_PER_BLOCK = 2
"""Sums over the model axis per block: after the mixing layer and after the feed-forward layer. The second one is never
recomputed, because it ends the block."""


def count_communication(traced: jax.stages.Traced) -> Communication:
    """Count the communication of a traced step."""
    return _count(traced.jaxpr.jaxpr, {})


def estimate_communication(setup: Setup, parameters: Iterable[Parameter]) -> Communication:
    """Estimate the communication of a training step without tracing it.

    Args:
        setup: The run.
        parameters: The parameters of the run, with their shardings.

    Returns:
        The volumes of FSDP (gathered parameters, twice if blocks are recomputed, and scattered gradients), of gradients
        averaged over the axes on which parameters are replicated, and of the sums over the model axis.
    """
    parallel, sizes = setup.model.parallel, setup.axis_sizes
    fsdp, model = names_of(parallel)
    sent: Communication = collections.defaultdict(float)
    for parameter in parameters:
        num_elements = parameter.num_bytes / jnp.dtype(parameter.dtype).itemsize
        if fsdp in parameter.axes:
            gathered = jnp.dtype(parallel.fsdp_gather_dtype or parameter.dtype).itemsize
            scattered = jnp.dtype(parallel.fsdp_grad_scatter_dtype or parameter.dtype).itemsize
            is_gathered_again = BLOCKS in parameter.name and setup.shape.remat_of_blocks != "none"
            volume = gathered * (2 if is_gathered_again else 1) + scattered
            sent[(fsdp,)] += setup.accumulation * volume * num_elements * (sizes[fsdp] - 1)
        others = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in parameter.axes)
        if others:
            sent[others] += _around_ring("psum", parameter.num_bytes, math.prod(sizes[axis] for axis in others))
    if sizes[model] > 1:
        tokens = setup.rows * setup.context_length
        activations = tokens * setup.shape.embedding_dim * jnp.dtype(setup.shape.dtype).itemsize
        num_sums = 2 * SUMS_PER_BLOCK + (0 if setup.shape.remat_of_blocks == "none" else SUMS_PER_BLOCK - 1)
        volume = setup.shape.num_blocks * num_sums * activations
        sent[(model,)] += _around_ring("psum", volume, sizes[model])
    return dict(sent)


def _count(jaxpr: Jaxpr, sizes: dict[str, int]) -> Communication:
    return _total(_count_equation(equation, sizes) for equation in jaxpr.eqns)


def _count_equation(equation: JaxprEqn, sizes: dict[str, int]) -> Communication:
    name, params = equation.primitive.name, equation.params
    if name == "shard_map":
        sizes = {str(axis): size for axis, size in params["mesh"].shape.items()}
    axes = tuple(axis for axis in _collective_axes(equation) if sizes.get(axis, 1) > 1)
    if axes:
        larger = max(_num_bytes(equation.invars), _num_bytes(equation.outvars))
        return {axes: _around_ring(name, larger, math.prod(sizes[axis] for axis in axes))}
    inner = [_count(jaxpr, sizes) for jaxpr in _inner_jaxprs(equation)]
    if name == "cond":
        return max(inner, key=lambda sent: sum(sent.values()))
    length = params["length"] if name == "scan" else 1
    return {axes: length * volume for axes, volume in _total(inner).items()}


def _total(parts: Iterable[Communication]) -> Communication:
    total: Communication = collections.defaultdict(float)
    for part in parts:
        for axes, volume in part.items():
            total[axes] += volume
    return dict(total)


def _collective_axes(equation: JaxprEqn) -> tuple[str, ...]:
    if equation.primitive.name not in {*RING_PASSES, "ppermute"}:
        return ()
    names = equation.params.get("axes", equation.params.get("axis_name"))
    return tuple(axis for axis in axes_of(names) if isinstance(axis, str))


def _around_ring(name: str, num_bytes: int | float, num_devices: int) -> float:
    """Return the bytes that a device sends, given those of the whole array, sharded over `num_devices`."""
    if name == "ppermute":
        return float(num_bytes)
    return RING_PASSES[name] * num_bytes * (num_devices - 1) / num_devices


def _num_bytes(variables: Any) -> int:
    return sum(math.prod(variable.aval.shape) * variable.aval.dtype.itemsize for variable in variables)


def _inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    leaves = [leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf for leaf in jax.tree.leaves(equation.params)]
    return [leaf for leaf in leaves if isinstance(leaf, Jaxpr)]
