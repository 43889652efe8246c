"""Counts, norms, masks and tables of parameter trees."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from rich import box
from rich.console import Console
from rich.table import Table

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.norms import get_sharded_global_norm, get_sharded_norm_logits
from xlstm_jax.utils.partitioned import is_partitioned, partition_names, unboxed
from xlstm_jax.utils.pytree_utils import flatten_pytree, get_param_mask_fn

__all__ = [
    "get_grad_norms",
    "get_num_params",
    "get_param_mask_fn",
    "get_param_norms",
    "get_sharded_global_norm",
    "get_sharded_norm_logits",
    "is_partitioned",
    "tabulate_params",
]

TABLE_WIDTH = 120


def get_num_params(params: PyTree) -> int:
    """Count the parameters of a tree over all devices.

    Inside `jax.shard_map`, boxes hold the local shard of an array, and the shards of other devices are counted too.

    Args:
        params: The tree. Leaves that are not arrays are not counted.

    Returns:
        The number of parameters.
    """
    return sum(_num_elements(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_partitioned))


def tabulate_params(
    state: TrainState | dict[str, Any] | FrozenDict,
    show_weight_decay: bool = False,
    weight_decay_exclude: Sequence[str | re.Pattern] | None = None,
    weight_decay_include: Sequence[str | re.Pattern] | None = None,
) -> str:
    """Summarize parameters in a table of at most 120 columns, sorted by name.

    Args:
        state: The train state, or the parameters alone; shapes instead of arrays suffice.
        show_weight_decay: Whether to show which parameters weight decay applies to.
        weight_decay_exclude: Patterns of the parameters without weight decay, as in the optimizer config.
        weight_decay_include: Patterns of the parameters with weight decay, as in the optimizer config.

    Returns:
        The table, under a line with the total number of parameters.
    """
    params = getattr(state, "params", state)
    leaves = flatten_pytree(params, is_leaf=is_partitioned)
    rows = {name: _describe(leaf) for name, leaf in leaves.items()}
    columns = ["Name", "Shape", "Count", "Dtype", "Sharding"]
    if show_weight_decay:
        mask = flatten_pytree(get_param_mask_fn(weight_decay_exclude, weight_decay_include)(params))
        rows = {name: (*row, str(mask[name])) for name, row in rows.items()}
        columns.append("Weight Decay")
    table = _render(columns, [(name, *rows[name]) for name in sorted(rows)])
    return f"Total number of global parameters: {get_num_params(params):_}\n\n{table}"


def get_grad_norms(grads: PyTree, return_per_param: bool = False) -> dict[str, Any]:
    """Determine the norms of gradients, over all devices.

    Args:
        grads: The gradients.
        return_per_param: Whether to add the norm of each gradient to that of all.

    Returns:
        The norm of all under `grad_norm`, that of one under `grad_norm_<name>`.
    """
    return _named_norms("grad_norm", grads, return_per_param)


def get_param_norms(params: PyTree, return_per_param: bool = False) -> dict[str, Any]:
    """Determine the norms of parameters, over all devices.

    Args:
        params: The parameters.
        return_per_param: Whether to add the norm of each parameter to that of all.

    Returns:
        The norm of all under `param_norm`, that of one under `param_norm_<name>`.
    """
    return _named_norms("param_norm", params, return_per_param)


def _named_norms(prefix: str, tree: PyTree, return_per_param: bool) -> dict[str, Any]:
    total, norms = get_sharded_global_norm(tree)
    each = flatten_pytree(norms) if return_per_param else {}
    return {prefix: total, **{f"{prefix}_{name}": norm for name, norm in each.items()}}


def _global_shape(leaf: Any) -> tuple[int, ...]:
    return tuple(
        dim * axis_size(name or ()) for dim, name in zip(unboxed(leaf).shape, partition_names(leaf), strict=True)
    )


def _num_elements(leaf: Any) -> int:
    return math.prod(_global_shape(leaf)) if hasattr(unboxed(leaf), "shape") else 0


def _describe(leaf: Any) -> tuple[str, str, str, str]:
    """Return shape, count, dtype and sharding of a leaf as text."""
    value = unboxed(leaf)
    if not hasattr(value, "shape"):
        return "-", "0", type(value).__name__, "-"
    return str(_global_shape(leaf)), f"{_num_elements(leaf):_}", str(value.dtype), _describe_sharding(leaf)


def _describe_sharding(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    names = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else partition_names(leaf)
    names += (None,) * (unboxed(leaf).ndim - len(names))
    return f"P({', '.join(map(repr, names))})" if any(names) else "-"


def _render(columns: list[str], rows: list[tuple[str, ...]]) -> str:
    table = Table(box=box.ASCII2)
    for column in columns:
        is_number = column == "Count"
        table.add_column(
            column, justify="right" if is_number else "left", no_wrap=column in ("Count", "Dtype"), overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    output = io.StringIO()
    # Plain text: no colours, and brackets in names are no markup.
    console = Console(file=output, width=TABLE_WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    console.print(table)
    return output.getvalue().rstrip()
