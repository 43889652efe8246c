"""One item of a checkpoint: the arguments with which Orbax writes and reads it, and whether its arrays fit a model."""

from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from xlstm_jax.checkpoint.layout import Path, Target
from xlstm_jax.checkpoint.orbax import ocp
from xlstm_jax.common_types import PyTree

SHOWN_NAMES = 3
"""The number of parameters that an error names for each kind of mismatch."""

_WAYS_OUT = {
    "params": "They are of another model: build the one that wrote them, whose config is in {path}.",
    "opt_state": "It is of another optimizer: use the one that wrote it, whose config is in {path}, or start anew with "
    "load_pretrained_model(..., load_optimizer=False).",
}


def save_args(arrays: PyTree) -> ocp.args.CheckpointArgs:
    """Return the arguments with which Orbax writes an array, or nested dictionaries of arrays."""
    if isinstance(arrays, dict):
        return ocp.args.StandardSave(arrays)
    return ocp.args.ArraySave(arrays if isinstance(arrays, jax.Array) else np.asarray(arrays))


def restore_args(targets: PyTree) -> ocp.args.CheckpointArgs:
    """Return the arguments with which Orbax reads arrays of the given shapes, dtypes and shardings."""
    if isinstance(targets, dict):
        return ocp.args.StandardRestore(jax.tree.map(_placeholder, targets))
    if targets.sharding is None:
        return ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray, dtype=targets.dtype))
    return ocp.args.ArrayRestore(restore_args=ocp.ArrayRestoreArgs(sharding=targets.sharding, dtype=targets.dtype))


def _placeholder(target: Target) -> Any:
    if target.sharding is None:
        return np.empty(target.shape, target.dtype)
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)


def stored_shapes(checkpoint: epath.Path, item: str) -> dict[Path, tuple[int, ...]]:
    """Read the shapes of the arrays of an item."""
    return _shapes(ocp.StandardCheckpointHandler().metadata(checkpoint / item).tree)


def check_fit(checkpoint: epath.Path, item: str, stored: dict[Path, tuple[int, ...]], targets: PyTree) -> None:
    """Raise unless an item has exactly the required arrays.

    Args:
        checkpoint: The folder of the checkpoint.
        item: The name of the item.
        stored: The shapes of its arrays.
        targets: The required arrays, as nested dictionaries.

    Raises:
        ValueError: Arrays are missing, unexpected, or have another shape; the message names a few, and a way out.
    """
    wanted = _shapes(targets)
    problems = {
        "not in the checkpoint": [_name(path) for path in wanted if path not in stored],
        "only in the checkpoint": [_name(path) for path in stored if path not in wanted],
        "of another shape": [
            f"{_name(path)} {list(stored[path])} instead of {list(shape)}"
            for path, shape in wanted.items()
            if stored.get(path, shape) != shape
        ],
    }
    found = [f"{len(names)} arrays are {problem} ({_shorten(names)})" for problem, names in problems.items() if names]
    if found:
        way_out = _WAYS_OUT.get(item, "").format(path=checkpoint / "metadata" / "metadata")
        raise ValueError(f"Cannot load {item} of {checkpoint}: {'; '.join(found)}. {way_out}".rstrip())


def _shapes(tree: PyTree) -> dict[Path, tuple[int, ...]]:
    flat: dict[Path, Any] = traverse_util.flatten_dict(tree)
    return {path: tuple(array.shape) for path, array in flat.items()}


def _name(path: Path) -> str:
    return ".".join(path)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
