"""How Orbax is asked to write and read one item of a checkpoint, and whether what it holds fits a model."""

from typing import Any

import jax
import numpy as np
from etils import epath
from flax import traverse_util

from xlstm_jax.checkpoint.layout import Path, Target
from xlstm_jax.checkpoint.orbax import ocp
from xlstm_jax.common_types import PyTree

SHOWN_NAMES = 3
"""How many parameters an error names for each way in which they do not fit."""

_WAYS_OUT = {
    "params": "They are of another model: build the one that wrote them, whose config is in {path}.",
    "opt_state": "It is of another optimizer: use the one that wrote it, whose config is in {path}, or start anew with "
    "load_pretrained_model(..., load_optimizer=False).",
}


def save_args(arrays: PyTree) -> ocp.args.CheckpointArgs:
    """Return what Orbax needs to write an array, or nested dictionaries of arrays."""
    if isinstance(arrays, dict):
        return ocp.args.StandardSave(arrays)
    return ocp.args.ArraySave(arrays if isinstance(arrays, jax.Array) else np.asarray(arrays))


def restore_args(targets: PyTree) -> ocp.args.CheckpointArgs:
    """Return what Orbax needs to read arrays that are like the given ones."""
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
    """Read which arrays an item holds."""
    return _shapes(ocp.StandardCheckpointHandler().metadata(checkpoint / item).tree)


def check_fit(checkpoint: epath.Path, item: str, stored: dict[Path, tuple[int, ...]], targets: PyTree) -> None:
    """Refuse an item whose arrays are not those that are needed.

    Args:
        checkpoint: The folder of the checkpoint.
        item: The name of the item.
        stored: The arrays that it holds.
        targets: What is needed, as nested dictionaries.

    Raises:
        ValueError: It names a few arrays that are missing, too many, or of another shape, and the way out.
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
