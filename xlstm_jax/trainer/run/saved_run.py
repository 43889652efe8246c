"""The content of a checkpoint: from a trainer to a checkpoint store and back."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xlstm_jax.checkpoint.loaders import gather_states, own_states
from xlstm_jax.checkpoint.metadata import Difference, compare_configs
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import fixed_settings
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import SavedCallback, TrainerLike

LOGGER = logging.getLogger(__name__)

CONFIGS = ("trainer", "model", "optimizer")
MODEL_PARTS = ("params", "mutable_variables")
"""The parts of a train state that a new run can start from."""


def state_arrays(trainer: TrainerLike) -> dict[str, PyTree]:
    """Return all parts of the train state that hold arrays, by name."""
    state = trainer.state
    names = [field.name for field in dataclasses.fields(state) if field.metadata.get("pytree_node", True)]
    return {name: getattr(state, name) for name in names if jax.tree.leaves(getattr(state, name))}


def callback_arrays(trainer: TrainerLike) -> dict[str, PyTree]:
    """Return all arrays that callbacks save, by name."""
    return {name: tree for callback in trainer.callbacks for name, tree in callback.arrays().items()}


def callback_states(trainer: TrainerLike) -> dict[str, Any]:
    """Return the JSON state of callbacks, by the names of the callbacks."""
    callbacks = _named_callbacks(trainer.callbacks)
    return {name: state for name, callback in callbacks.items() if (state := callback.state_dict())}


def run_documents(trainer: TrainerLike) -> dict[str, Any]:
    """Return the JSON documents of a checkpoint: configs, states of callbacks, and progress and clock of the run."""
    return {"metadata": _configs(trainer), "callbacks": callback_states(trainer), "run": trainer.run_state()}


def data_document(data_module: DataloaderModule | None) -> dict[str, Any]:
    """Return the positions of the data loaders of all processes."""
    return {"loaders": gather_states(named_loaders(data_module))}


def add_validated_positions(store: CheckpointStore, step: int, data_module: DataloaderModule | None) -> None:
    """Add the positions of the validation loaders after the validation of a step to its checkpoint.

    They take effect once the checkpoint has the metrics of that validation, which are written after them. Until then a
    resumed run repeats the validation, from the positions before it.
    """
    validation = None if data_module is None else DataloaderModule(val_dataloader=data_module.val_dataloader)
    document = store.read_document(step, "data")
    store.save_document(step, "data", {**document, "validated": gather_states(named_loaders(validation))})


def load_run(store: CheckpointStore, step: int, trainer: TrainerLike, *, free: bool) -> dict[str, Any]:
    """Read everything that a resumed run needs.

    Args:
        store: The checkpoints.
        step: The step.
        trainer: The trainer; its state and callbacks have the shapes and shardings of the arrays.
        free: Whether to delete the state of the trainer before reading.

    Returns:
        The parts of the train state that were saved, by name; `run`, the result of `run_state` of the trainer; and
        `callbacks`, for `restore_callbacks`.
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


def load_params(store: CheckpointStore, step: int, trainer: TrainerLike, *, free: bool) -> dict[str, Any]:
    """Read the parts that a new run starts from: `params`, and `mutable_variables` if there are any."""
    state, stored = state_arrays(trainer), store.contents(step)
    like = {name: state[name] for name in MODEL_PARTS if name in state and name in stored}
    return store.restore(step, like, free=list(like) if free else [])


def load_data(store: CheckpointStore, step: int) -> dict[str, Any]:
    """Read the positions of this process's data loaders by name, after the validation if the step has its metrics."""
    document = store.read_document(step, "data")
    after = document.get("validated", {}) if store.read_document(step, "metrics") else {}
    return own_states({**document.get("loaders", {}), **after})


def restore_callbacks(callbacks: Sequence[SavedCallback], state_dict: Mapping[str, Any]) -> None:
    """Restore callbacks from the result of `load_run`, once the trainer has its state."""
    kept = state_dict.get("callbacks", {})
    for name, callback in _named_callbacks(callbacks).items():
        callback.load_state_dict(kept.get("states", {}).get(name, {}))
        callback.load_arrays(kept.get("arrays", {}))


def log_differences(store: CheckpointStore, step: int, trainer: TrainerLike) -> list[Difference]:
    """Log the settings that have changed since a checkpoint was written, and return them."""
    metadata = store.read_metadata(step)
    differences = compare_configs(
        {name: metadata.get(name, {}) for name in CONFIGS}, _configs(trainer), _fixed_settings(trainer)
    )
    for difference in differences:
        LOGGER.info("Since %s was written, a setting has changed: %s", store.path(step), difference)
    return differences


def set_loaders(data_module: DataloaderModule, states: Mapping[str, Any]) -> None:
    """Set data loaders to saved positions, and warn about those that stay at their beginning.

    Args:
        data_module: The loaders; `None` in place of a loader leaves it out.
        states: The positions by the names of `named_loaders`.
    """
    for name, loader in named_loaders(data_module).items():
        if name not in states:
            LOGGER.warning("The checkpoint has no state of the loader %r: it starts from its beginning.", name)
        elif not hasattr(loader, "set_state"):
            LOGGER.warning("The loader %r has no `set_state`: it starts from its beginning.", name)
        else:
            loader.set_state(states[name])


def named_loaders(data_module: DataloaderModule | None) -> dict[str, Any]:
    """Return all data loaders by the names of their states: `train`, `val` or `val_<name>`, `test` or `test_<name>`."""
    named = {}
    for name in ("train", "val", "test"):
        loader = getattr(data_module, f"{name}_dataloader", None)
        if isinstance(loader, dict):
            named |= {f"{name}_{key}": value for key, value in loader.items()}
        elif loader is not None:
            named[name] = loader
    return named


def _configs(trainer: TrainerLike) -> dict[str, Any]:
    configs = trainer.trainer_config, trainer.model_config, trainer.optimizer_config
    return {name: config.to_dict() for name, config in zip(CONFIGS, configs, strict=True)}


def _fixed_settings(trainer: TrainerLike) -> set[str]:
    """Return the settings that a resumed run may not change: of a model, all that are not declared to be free."""
    return {
        setting
        for name in CONFIGS
        for setting in fixed_settings(getattr(trainer, f"{name}_config"), name, may_change=name != "model")
    }


def _named_callbacks(callbacks: Sequence[SavedCallback]) -> dict[str, SavedCallback]:
    """Name callbacks by their classes; several of one class are numbered."""
    named = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(type(other).__name__ == kind for other in named.values())
        named[f"{kind}_{number}" if number else kind] = callback
    return named
