"""Names, masks, shapes and differences of pytrees."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import ConfigError
from xlstm_jax.utils.partitioned import is_partitioned

MAX_DIFF_DEPTH = 20
"""The maximum nesting depth that `pytree_diff` compares."""


@dataclasses.dataclass(frozen=True)
class RecursionLimit:
    """The marker in a result of `pytree_diff` for parts that are nested too deeply to compare."""


def pytree_diff(tree1: PyTree, tree2: PyTree) -> PyTree:
    """Find where two trees differ.

    Arrays differ if they are not close (`numpy.allclose`; two NaN in one place are equal), whatever their dtypes.

    Args:
        tree1: The first tree.
        tree2: The second tree.

    Returns:
        `None` if the trees are equal, else the differing parts under their keys and indices: pairs of leaves,
        differences of arrays, `length_mismatch`, `shape_mismatch`, `only_in_tree1` and `only_in_tree2`, and a
        `RecursionLimit` for what is nested more than 20 levels deep.

    Examples:
        >>> pytree_diff({"a": 1, "b": [2, 3]}, {"a": 1, "b": [2, 3]}) is None
        True
        >>> pytree_diff({"a": 1, "b": [2, 3]}, {"a": 4, "b": [2, 5]})
        {'a': (1, 4), 'b': {1: (3, 5)}}
        >>> pytree_diff({"a": 1, "b": 2}, {"b": 2, "c": 3})
        {'a': {'only_in_tree1': 1}, 'c': {'only_in_tree2': 3}}
        >>> pytree_diff([1, 2], [1, 2, 3])
        {'length_mismatch': (2, 3)}
        >>> pytree_diff(np.zeros(3), np.zeros((2, 2)))
        {'shape_mismatch': ((3,), (2, 2))}
        >>> pytree_diff({"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 1.5])})
        {'a': array([0. , 0.5])}
    """
    return _diff(tree1, tree2, depth=0)


def _diff(tree1: Any, tree2: Any, *, depth: int) -> Any:
    if depth > MAX_DIFF_DEPTH:
        return RecursionLimit()
    if isinstance(tree1, Mapping) and isinstance(tree2, Mapping):
        return _diff_children(tree1, tree2, depth=depth)
    if isinstance(tree1, list | tuple) and isinstance(tree2, list | tuple):
        if len(tree1) != len(tree2):
            return {"length_mismatch": (len(tree1), len(tree2))}
        return _diff_children(dict(enumerate(tree1)), dict(enumerate(tree2)), depth=depth)
    if _is_number(tree1) and _is_number(tree2):
        return _diff_numbers(tree1, tree2)
    if type(tree1) is type(tree2) and not jax.tree_util.all_leaves([tree1, tree2]):
        return _diff_nodes(tree1, tree2, depth=depth)
    return None if type(tree1) is type(tree2) and tree1 == tree2 else (tree1, tree2)


def _diff_children(tree1: Mapping, tree2: Mapping, *, depth: int) -> dict | None:
    differences = {}
    for key in [*tree1, *(key for key in tree2 if key not in tree1)]:
        if key not in tree2:
            differences[key] = {"only_in_tree1": tree1[key]}
        elif key not in tree1:
            differences[key] = {"only_in_tree2": tree2[key]}
        elif (difference := _diff(tree1[key], tree2[key], depth=depth + 1)) is not None:
            differences[key] = difference
    return differences or None


def _diff_nodes(tree1: Any, tree2: Any, *, depth: int) -> Any:
    """Compare two nodes of one registered type, such as train states or boxes."""
    children1, structure1 = jax.tree_util.tree_flatten_with_path(tree1, is_leaf=lambda x: x is not tree1)
    children2, structure2 = jax.tree_util.tree_flatten_with_path(tree2, is_leaf=lambda x: x is not tree2)
    if structure1 != structure2:
        return tree1, tree2
    named1, named2 = ({pytree_key_path_to_str(path): x for path, x in children} for children in (children1, children2))
    return _diff_children(named1, named2, depth=depth)


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _diff_numbers(x: Any, y: Any) -> Any:
    if np.shape(x) != np.shape(y):
        return {"shape_mismatch": (np.shape(x), np.shape(y))}
    wide_x, wide_y = _widened(x), _widened(y)
    are_arrays = isinstance(x, jax.Array | np.ndarray) or isinstance(y, jax.Array | np.ndarray)
    are_inexact = any(np.issubdtype(wide.dtype, np.inexact) for wide in (wide_x, wide_y))
    # Only floating-point arrays have a tolerance: steps, keys and settings are compared exactly.
    tolerance = {} if are_arrays and are_inexact else {"rtol": 0, "atol": 0}
    if np.allclose(wide_x, wide_y, equal_nan=True, **tolerance):
        return None
    if are_arrays:
        with np.errstate(invalid="ignore"):
            return wide_x - wide_y
    return x, y


def _widened(x: Any) -> np.ndarray:
    """Return an array whose dtype NumPy can subtract and compare: no booleans, no bfloat16, no random keys."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(np.promote_types(x.dtype, np.float32))
    return x if jnp.issubdtype(x.dtype, jnp.complexfloating) else x.astype(np.int64)


def pytree_key_path_to_str(path: jax.tree_util.KeyPath, separator: str = ".") -> str:
    """Join the keys, indices and attribute names on the path to a leaf.

    Args:
        path: The path, as returned by the `*_with_path` functions of `jax.tree_util`.
        separator: The separator between names.

    Returns:
        The name of the leaf.
    """
    return separator.join(_key_to_str(key) for key in path)


def _key_to_str(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def flatten_pytree(
    pytree: PyTree, separator: str = ".", is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """Flatten a tree into a dictionary from names to leaves.

    Args:
        pytree: The tree.
        separator: The separator between the keys of a path.
        is_leaf: Where to stop; `is_partitioned` keeps boxes intact, so that names do not end in `.value`.

    Returns:
        The leaves under their names, in the order of the tree.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_leaf)
    return _as_unique_dict((pytree_key_path_to_str(path, separator), leaf) for path, leaf in leaves)


def flatten_dict(d: dict | FrozenDict, separator: str = ".") -> dict[str, Any]:
    """Flatten nested dictionaries; anything else is a leaf, including `None`, lists and boxes.

    Args:
        d: The dictionary.
        separator: The separator between the keys of a path.

    Returns:
        The leaves under their names.
    """
    if not isinstance(d, dict | FrozenDict):
        raise ConfigError(
            f"Only a dict or a FrozenDict can be flattened, got a {type(d).__name__}: use flatten_pytree."
        )
    return _as_unique_dict(_walk_dict(d, (), separator))


def _walk_dict(d: Any, path: tuple[str, ...], separator: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(d, dict | FrozenDict):
        yield separator.join(path), d
        return
    for key, value in d.items():
        yield from _walk_dict(value, (*path, str(key)), separator)


def _as_unique_dict(items: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    flat = {}
    for name, leaf in items:
        if name in flat:
            raise ValueError(f"Two leaves are named {name!r}: choose a separator that no key contains.")
        flat[name] = leaf
    return flat


def get_shape_dtype_pytree(x: PyTree) -> PyTree:
    """Replace every `jax.Array` of a tree by its shape, dtype and sharding; keep other leaves unchanged."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = getattr(leaf, "sharding", None)  # a tracer has none
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(describe, x)


def delete_arrays_in_pytree(x: PyTree) -> None:
    """Free the device memory of every `jax.Array` of a tree immediately; the arrays cannot be used afterwards."""
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, jax.Array):
            leaf.delete()


def get_param_mask_fn(
    exclude: Sequence[str | re.Pattern] | None, include: Sequence[str | re.Pattern] | None = None
) -> Callable[[PyTree], PyTree]:
    """Return a function that builds a mask of parameters by name, for instance for weight decay.

    A pattern matches the parameters in whose name it is found (`re.search`). The name joins the keys with dots and
    never includes boxes, so a mask is the same on every mesh. A box gets one value, which optax applies to all of it.

    Args:
        exclude: Patterns of the parameters to exclude.
        include: Patterns of the parameters to include; all parameters by default.

    Returns:
        A function from a tree of parameters to a tree of booleans: `True` for parameters that are included and not
        excluded.
    """
    excluded, included = _compiled("exclude", exclude), _compiled("include", include)

    def is_in(path: jax.tree_util.KeyPath, _: Any) -> bool:
        name = pytree_key_path_to_str(path)
        is_included = include is None or _is_found(included, name)
        return is_included and not _is_found(excluded, name)

    return lambda params: jax.tree_util.tree_map_with_path(is_in, params, is_leaf=is_partitioned)


def _is_found(patterns: Sequence[re.Pattern], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _compiled(name: str, patterns: Sequence[str | re.Pattern] | None) -> list[re.Pattern]:
    if isinstance(patterns, str | re.Pattern):
        raise ValueError(f"{name} is {patterns!r}, but must be a list of patterns: write [{patterns!r}].")
    return [_compile(pattern) for pattern in patterns or ()]


def _compile(pattern: str | re.Pattern) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}.") from error
