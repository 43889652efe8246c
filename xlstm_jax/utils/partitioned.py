"""Boxes: pytree leaves that name the mesh axes they are sharded over.

A sharded parameter is a `flax.linen.Partitioned(value, names)`, a replicated one a plain array. These functions read
either kind without opening the box through `Partitioned.unbox`, which fails inside `jax.shard_map`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import linen as nn

from xlstm_jax.common_types import PyTree

AxisName = str | tuple[str, ...]
"""One mesh axis, or several that act as one, major axis first."""


def is_partitioned(x: Any) -> bool:
    """Return whether an object is a `Partitioned`.

    A parameter that is sharded by FSDP, pipeline or tensor parallelism is a `Partitioned`, a replicated one a plain
    `jax.Array`. Used as `is_leaf` of a tree map, this function keeps boxes intact.

    Args:
        x: The object to check.

    Returns:
        Whether the object is a `Partitioned`.
    """
    return isinstance(x, nn.Partitioned)


def unboxed(x: Any) -> Any:
    """Return the value in a box; anything else is returned unchanged."""
    return x.value if is_partitioned(x) else x


def reboxed(x: Any, value: Any) -> Any:
    """Return `value` in a box like that of `x`, or unboxed if `x` has none."""
    return x.replace(value=value) if is_partitioned(x) else value


def partition_names(x: Any) -> tuple[AxisName | None, ...]:
    """Return the mesh axes that each dimension of a leaf is sharded over; `None` for an unsharded dimension."""
    ndim = jax.numpy.ndim(unboxed(x))
    names = tuple(x.names) if is_partitioned(x) else ()
    return names + (None,) * (ndim - len(names))


def axes_of(name: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the mesh axes in one entry of `partition_names`, or in any other list of names."""
    if name is None:
        return ()
    return (name,) if isinstance(name, str) else tuple(name)


def partition_axes(x: Any) -> tuple[str, ...]:
    """Return all mesh axes that a leaf is sharded over."""
    return tuple(axis for name in partition_names(x) for axis in axes_of(name))


def with_names(value: Any, names: tuple[AxisName | None, ...]) -> Any:
    """Box a value with partition names, unless all of them are `None`."""
    any_names: Any = names  # flax's annotation does not allow tuples as entries
    return nn.Partitioned(value, any_names) if any(names) else value


def map_unboxed(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Map over the arrays of trees whose leaves may be boxed; the results keep the boxes of `tree`."""
    return jax.tree.map(
        lambda x, *others: reboxed(x, function(unboxed(x), *map(unboxed, others))), tree, *rest, is_leaf=is_partitioned
    )
