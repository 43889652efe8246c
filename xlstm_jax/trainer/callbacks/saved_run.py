"""What a checkpoint holds of a run: from a trainer to a store of checkpoints, and back."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xlstm_jax.checkpoint.loaders import gather_states, own_states
from xlstm_jax.checkpoint.metadata import Difference, compare_configs
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.common_types import PyTree
from xlstm_jax.trainer.callbacks.callback import Callback
from xlstm_jax.trainer.data_module import DataloaderModule

LOGGER = logging.getLogger(__name__)

CONFIGS = ("trainer", "model", "optimizer")
MODEL_PARTS = ("params", "mutable_variables")
"""The parts of a train state that another run starts from."""


def state_arrays(trainer: Any) -> dict[str, PyTree]:
    """Return all parts of the train state that hold arrays, by name."""
    state = trainer.state
    names = [field.name for field in dataclasses.fields(state) if field.metadata.get("pytree_node", True)]
    return {name: getattr(state, name) for name in names if jax.tree.leaves(getattr(state, name))}


def callback_arrays(trainer: Any) -> dict[str, PyTree]:
    """Return all arrays that callbacks keep, by name."""
    return {name: tree for callback in getattr(trainer, "callbacks", []) for name, tree in callback.arrays().items()}


def callback_states(trainer: Any) -> dict[str, Any]:
    """Return what else callbacks keep, by the names of the callbacks."""
    callbacks = _named_callbacks(getattr(trainer, "callbacks", []))
    return {name: state for name, callback in callbacks.items() if (state := callback.state_dict())}


def run_documents(trainer: Any) -> dict[str, Any]:
    """Return the configs of a run, what its callbacks keep, and what the trainer says about it."""
    run_state = getattr(trainer, "run_state", dict)
    return {"metadata": _configs(trainer), "callbacks": callback_states(trainer), "run": run_state()}


def data_document(data_module: DataloaderModule | None) -> dict[str, Any]:
    """Return where the data loaders of all processes stand."""
    return {"loaders": gather_states(named_loaders(data_module))}


def add_validated_positions(store: CheckpointStore, step: int, data_module: DataloaderModule | None) -> None:
    """Add to a checkpoint where the validation loaders stand after the validation of its step.

    They count once the checkpoint has the metrics of that validation, which are written after them. Until then a
    resumed run repeats the validation, from where its loaders stood before it.
    """
    validation = None if data_module is None else DataloaderModule(val_dataloader=data_module.val_dataloader)
    document = store.read_document(step, "data")
    store.save_document(step, "data", {**document, "validated": gather_states(named_loaders(validation))})


def load_run(store: CheckpointStore, step: int, trainer: Any, *, free: bool) -> dict[str, Any]:
    """Read all that a run goes on with.

    Args:
        store: The checkpoints.
        step: The step.
        trainer: The trainer, whose state and callbacks say how arrays have to be laid out.
        free: Whether to delete the state of the trainer before reading.

    Returns:
        The parts of the train state by name, except those that were not saved; `run`, what `run_state` of the trainer
        returned; and `callbacks`, for `restore_callbacks`.
    """
    state, of_callbacks = state_arrays(trainer), callback_arrays(trainer)
    stored = store.contents(step)
    for name in state:
        if name not in stored:
            LOGGER.warning("%s holds no %s: that of the trainer stays as it is.", store.path(step), name)
    like = {name: tree for name, tree in {**of_callbacks, **state}.items() if name in stored}
    restored = store.restore(step, like, free=[name for name in like if free and name in state])
    callbacks = {
        "states": store.read_document(step, "callbacks"),
        "arrays": {name: restored.pop(name) for name in of_callbacks if name in restored},
    }
    return {**restored, "run": store.read_document(step, "run"), "callbacks": callbacks}


def load_params(store: CheckpointStore, step: int, trainer: Any, *, free: bool) -> dict[str, Any]:
    """Read what another run starts from: `params`, and `mutable_variables` if there are any."""
    state, stored = state_arrays(trainer), store.contents(step)
    like = {name: state[name] for name in MODEL_PARTS if name in state and name in stored}
    return store.restore(step, like, free=list(like) if free else [])


def load_data(store: CheckpointStore, step: int) -> dict[str, Any]:
    """Read where the data loaders of this process stood, by name; after the validation if the step has its metrics."""
    document = store.read_document(step, "data")
    after = document.get("validated", {}) if store.read_document(step, "metrics") else {}
    return own_states({**document.get("loaders", {}), **after})


def restore_callbacks(callbacks: Sequence[Callback], state_dict: Mapping[str, Any]) -> None:
    """Let callbacks go on from what `load_run` returned, once the trainer has its state."""
    kept = state_dict.get("callbacks", {})
    for name, callback in _named_callbacks(callbacks).items():
        callback.load_state_dict(kept.get("states", {}).get(name, {}))
        callback.load_arrays(kept.get("arrays", {}))


def log_differences(store: CheckpointStore, step: int, trainer: Any) -> list[Difference]:
    """Log which settings are not those under which a checkpoint was written, and return them."""
    metadata = store.read_metadata(step)
    differences = compare_configs({name: metadata.get(name, {}) for name in CONFIGS}, _configs(trainer))
    for difference in differences:
        LOGGER.info("Since %s was written, a setting has changed: %s", store.path(step), difference)
    return differences


def named_loaders(data_module: DataloaderModule | None) -> dict[str, Any]:
    """Return all data loaders under the names that their states have: `train`, `val` or `val_<name>`, and so on."""
    named = {}
    for name in ("train", "val", "test"):
        loader = getattr(data_module, f"{name}_dataloader", None)
        if isinstance(loader, dict):
            named |= {f"{name}_{key}": value for key, value in loader.items()}
        elif loader is not None:
            named[name] = loader
    return named


def _configs(trainer: Any) -> dict[str, Any]:
    return {name: getattr(trainer, f"{name}_config").to_dict() for name in CONFIGS}


def _named_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Name callbacks by their classes; those of one class are numbered."""
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(type(other).__name__ == kind for other in named.values())
        named[f"{kind}_{number}" if number else kind] = callback
    return named
