"""Conversion between live trees and the canonical layout of checkpoints.

A checkpoint stores nested dictionaries of unboxed arrays, named by their key paths; fields of named tuples and indices
of tuples are names too. Each block has an entry of its own, `block_stack.block_<i>`, whether or not the model scans
over its blocks. So the layout depends neither on the mesh nor on how the model is run, and the moments of the optimizer
have the same layout as the parameters.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import PyTree
from xlstm_jax.utils.partitioned import axes_of, is_partitioned, reboxed, unboxed
from xlstm_jax.utils.pytree_utils import pytree_key_path_to_str

Path = tuple[str, ...]
SCANNED_BLOCKS = ("block_stack", "block")
HOST_MEMORY = "pinned_host"


class Stack(NamedTuple):
    """A scanned stack: a pattern of `num_places` blocks, repeated `num_repetitions` times."""

    num_places: int
    num_repetitions: int


Stacks = dict[Path, Stack]
"""The stacks of a model, by the path to their parameters."""


def find_stacks(params: PyTree) -> Stacks:
    """Find the scanned stacks among the parameters of a model; `models.shared.stack` documents their layout."""
    places: dict[Path, set[str]] = {}
    lengths: dict[Path, set[tuple[int, ...]]] = {}
    for path, leaf in named_leaves(params):
        if end := _end_of_stack(path):
            places.setdefault(path[:end], set()).add(path[end] if path[end].isdecimal() else "")
            lengths.setdefault(path[:end], set()).add(np.shape(leaf)[:1])
    return {
        path: Stack(len(places[path]), *next(iter(found)))
        for path, found in lengths.items()
        if len(found) == 1 and () not in found
    }


def named_leaves(tree: PyTree) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each leaf, without boxes."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_partitioned)[0]:
        yield tuple(pytree_key_path_to_str((key,)) for key in path), unboxed(leaf)


@dataclasses.dataclass(frozen=True)
class Target:
    """The properties that an array must have after it is read; for a random key, those of its data."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None = None
    """The sharding; `None` for a NumPy array on the host."""
    is_weak: bool = False
    """Whether the dtype is weak, as that of a Python number is."""
    key_kind: str | None = None
    """The kind of random key; `None` for all other arrays."""
    number: type | None = None
    """The type of a Python number."""


def describe(tree: PyTree) -> PyTree:
    """Replace each array of a tree by its `Target`, and keep the boxes."""
    return jax.tree.map(_describe, tree)


def _describe(leaf: Any) -> Target:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return dataclasses.replace(_describe(jax.random.key_data(leaf)), key_kind=str(jax.random.key_impl(leaf)))
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return Target(leaf.shape, leaf.dtype, leaf.sharding, is_weak=leaf.weak_type)
    number = type(leaf) if isinstance(leaf, bool | int | float) else None
    return Target(np.shape(leaf), np.asarray(leaf).dtype, number=number)


def to_canonical(tree: PyTree, stacks: Stacks) -> PyTree:
    """Convert a live tree to the canonical layout.

    Args:
        tree: Parameters, the state of an optimizer, any other tree of arrays, or a single array.
        stacks: The stacks of the model.

    Returns:
        Nested dictionaries of arrays. Stacked arrays are copied to host memory block by block, so the devices need no
        memory for a second copy.
    """

    def split(path: Path, leaf: Any, blocks: list[Path]) -> dict[Path, Any]:
        if not blocks:
            return {path: jax.random.key_data(leaf) if _describe(leaf).key_kind else leaf}
        if not isinstance(leaf, jax.Array):
            return dict(zip(blocks, leaf, strict=True))
        sharding = _spread_on_host(_block_sharding(leaf.sharding), leaf.shape[1:])
        return dict(zip(blocks, _splitter(len(blocks), sharding)(leaf), strict=True))

    return _canonical(tree, stacks, split)


def canonical_targets(targets: PyTree, stacks: Stacks) -> PyTree:
    """Lay out a tree of `Target` as the arrays are stored, each with its own shape and sharding."""

    def split(path: Path, target: Target, blocks: list[Path]) -> dict[Path, Target]:
        if not blocks:
            return {path: target}
        sharding = target.sharding and _block_sharding(target.sharding)
        block = dataclasses.replace(target, shape=target.shape[1:], sharding=sharding)
        return dict.fromkeys(blocks, block)

    return _canonical(targets, stacks, split)


def from_canonical(stored: PyTree, targets: PyTree, stacks: Stacks) -> PyTree:
    """Convert stored arrays to a live tree; the inverse of `to_canonical`.

    Args:
        stored: The arrays, in the layout of `canonical_targets`; those of stacked blocks are deleted.
        targets: The properties of each array of the tree.
        stacks: The stacks of the model.

    Returns:
        The tree, with the types, boxes, shardings and dtypes that `targets` describes.
    """
    flat: dict[Path, Any] = traverse_util.flatten_dict(stored) if isinstance(stored, dict) else {(): stored}

    def read(path: Path, target: Target) -> Any:
        blocks = _block_paths(path, target.shape, stacks)
        return _finish(_join([flat[block] for block in blocks], target) if blocks else flat[path], target)

    paths = [path for path, _ in named_leaves(targets)]
    leaves, structure = jax.tree.flatten(targets, is_leaf=is_partitioned)
    read_leaves = [reboxed(leaf, read(path, unboxed(leaf))) for path, leaf in zip(paths, leaves, strict=True)]
    return jax.tree.unflatten(structure, read_leaves)


def _canonical(tree: PyTree, stacks: Stacks, split: Callable[[Path, Any, list[Path]], dict[Path, Any]]) -> PyTree:
    flat = {}
    for path, leaf in named_leaves(tree):
        flat |= split(path, leaf, _block_paths(path, np.shape(leaf), stacks))
    return flat[()] if () in flat else traverse_util.unflatten_dict(flat)


def _end_of_stack(path: Path) -> int:
    """Return the length of the path to the scanned stack that a leaf belongs to; 0 if it belongs to none."""
    return next((i + 2 for i in range(len(path) - 2) if path[i : i + 2] == SCANNED_BLOCKS), 0)


def _block_paths(path: Path, shape: tuple[int, ...], stacks: Stacks) -> list[Path]:
    """Return the paths under which the blocks of a stacked leaf are stored; empty if the leaf is not stacked.

    In the state of an optimizer, further names precede the path of the parameter.
    """
    end = _end_of_stack(path)
    stack = next((stack for known, stack in stacks.items() if end and path[:end][-len(known) :] == known), None)
    if stack is None or shape[:1] != (stack.num_repetitions,):
        return []
    place, rest = (int(path[end]), path[end + 1 :]) if stack.num_places > 1 else (0, path[end:])
    indices = range(place, stack.num_places * stack.num_repetitions, stack.num_places)
    return [(*path[: end - 1], f"block_{index}", *rest) for index in indices]


def _block_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of one block of a stacked array."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]), memory_kind=sharding.memory_kind)


def _spread_on_host(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Return a sharding in host memory with one copy instead of one per device, where a dimension divides evenly."""
    memories = {memory.kind for device in sharding.addressable_devices for memory in device.addressable_memories()}
    on_host = sharding.with_memory_kind(HOST_MEMORY) if HOST_MEMORY in memories else sharding
    if not isinstance(on_host, NamedSharding):
        return on_host
    mesh, spec = on_host.mesh, [*on_host.spec, *(None,) * (len(shape) - len(on_host.spec))]
    used = {axis for names in spec for axis in axes_of(names)}
    free = tuple(axis for axis in mesh.axis_names if axis not in used)
    for i, size in enumerate(shape):
        axes = (*axes_of(spec[i]), *free)
        if size % math.prod(mesh.shape[axis] for axis in axes) == 0:
            spec[i] = axes
            break
    return NamedSharding(mesh, P(*spec), memory_kind=on_host.memory_kind)


@functools.cache
def _splitter(num_blocks: int, sharding: Sharding) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return jax.jit(lambda stacked: tuple(stacked[i] for i in range(num_blocks)), out_shardings=(sharding,) * num_blocks)


@functools.cache
def _joiner(sharding: Sharding) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(jnp.stack, out_shardings=sharding)


def _join(blocks: list[Any], target: Target) -> Any:
    if target.sharding is None:
        return np.stack(blocks)
    stacked = _joiner(target.sharding)(blocks)
    for block in blocks:
        block.delete()
    return stacked


def _finish(array: Any, target: Target) -> Any:
    """Restore what storage does not preserve: the kind of a random key, a weak dtype, the type of a Python number."""
    if target.key_kind is not None:
        return jax.random.wrap_key_data(array, impl=target.key_kind)
    if target.number is not None:
        return target.number(array)
    if target.is_weak and target.shape == ():
        return jax.device_put(array.item(), target.sharding)
    return array
