"""The checkpoints of a run: how a trainer finds, reads and restores them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from xlstm_jax.checkpoint.files import checkpoint_folder
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.common_types import PyTree, TrainState
from xlstm_jax.configs import ConfigDict
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.callbacks.callback import Callback
from xlstm_jax.trainer.callbacks.checkpointing import ModelCheckpoint
from xlstm_jax.trainer.data_module import DataIterator, is_resumable
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.optimizer.schedule_free import started_from
from xlstm_jax.trainer.run.clock import Clock, Heartbeat
from xlstm_jax.trainer.run.progress import Progress
from xlstm_jax.trainer.run.saved_run import MODEL_PARTS, restore_callbacks
from xlstm_jax.utils.partitioned import is_partitioned, reboxed, unboxed

STATE_PARTS = ("step", "params", "opt_state", "mutable_variables", "rng", "guard")
NO_CHECKPOINTS = "This trainer saves no checkpoints: add a ModelCheckpointConfig to its callbacks"
Config = TypeVar("Config", bound=TrainerConfig)


class RunCheckpoints:
    """Reads the checkpoints of a run and restores what the run counts.

    The first `ModelCheckpoint` among the callbacks writes them.

    Args:
        callbacks: The callbacks of the run.
        progress: The progress of the run.
        clock: The clock of the run.
        heartbeat: The file from which the end of an earlier start of the run is known.
    """

    def __init__(self, callbacks: Sequence[Callback], progress: Progress, clock: Clock, heartbeat: Heartbeat):
        self._callbacks = callbacks
        self._progress = progress
        self._clock = clock
        self._heartbeat = heartbeat

    @property
    def callback(self) -> ModelCheckpoint | None:
        """The callback that writes the checkpoints; `None` if the run saves none."""
        return next((callback for callback in self._callbacks if isinstance(callback, ModelCheckpoint)), None)

    def read_state(self, step_idx: int = -1) -> dict[str, Any]:
        """Read the parts of a train state, and what `restore_run` needs, from a checkpoint.

        Args:
            step_idx: The step; -1 for the newest valid checkpoint.
        """
        if self.callback is None:
            raise ValueError(f"{NO_CHECKPOINTS}, or load those of another run with load_pretrained_model.")
        return self.callback.load_model(step_idx)

    def read_data(self, step_idx: int = -1) -> dict[str, Any]:
        """Read the positions of the data loaders from a checkpoint."""
        if self.callback is None:
            raise ValueError(f"{NO_CHECKPOINTS}.")
        return self.callback.load_dataloader(step_idx)

    def has_any(self) -> bool:
        """Check whether the run has a checkpoint."""
        return self.callback is not None and self.callback.store.has_any()

    def latest_step(self) -> int | None:
        """Return the step of the latest checkpoint; `None` if there is none."""
        return None if self.callback is None else self.callback.store.latest()

    def validation_metrics(self, step: int) -> dict[str, Any]:
        """Return the metrics of the validation after a step, as its checkpoint has them; empty if it has none."""
        return {} if self.callback is None else self.callback.load_metrics(step)

    def lacks_validation(self, step: int) -> bool:
        """Check whether a step has a checkpoint without the metrics of a validation."""
        return self.callback is not None and not self.callback.has_metrics(step)

    def prepare_rollbacks(self, train_loader: DataIterator) -> None:
        """Save the state to roll back to, and check that the train loader can go back too."""
        if self.callback is None:
            return
        if not is_resumable(train_loader):
            raise ValueError("To roll back, the train loader needs `get_state` and `set_state`.")
        if not self.callback.config.save_dataloader_state:
            raise ValueError("To roll back, checkpoints need save_dataloader_state: the data goes back too.")
        self.callback.save_state(self._progress.step)

    def run_state(self) -> dict[str, Any]:
        """Return the progress and the clock of the run, for a checkpoint."""
        return {**self._progress.to_document(), "clock": self._clock.id, "seconds": self._clock.seconds}

    def restore_run(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Restore progress, clock and callbacks from what `read_state` returned, once the trainer has its state.

        Args:
            state_dict: The result of `read_state`.
            step: The step of the train state.
        """
        run = state_dict.get("run") or {}
        self._progress.restore(run, step=step)
        if run:
            self._restore_clock(run["clock"], run["seconds"])
        restore_callbacks(self._callbacks, state_dict)

    def _restore_clock(self, clock_id: str, seconds: Mapping[str, float]) -> None:
        saved, lost = sum(seconds.values()), self._clock.elapsed
        if clock_id == self._clock.id:
            lost -= saved
        else:
            lost += max(self._heartbeat.read().get("elapsed", 0.0) - saved, 0.0)
        self._clock.resume(seconds, lost=lost)


def read_configs(
    checkpoint: str | Path, config_class: type[Config], step_idx: int, *, best: bool
) -> tuple[Config, ModelConfig, OptimizerConfig, int]:
    """Read the configs of a checkpoint, for a trainer that neither logs nor has callbacks.

    Args:
        checkpoint: The folder of the run, with `checkpoints` in it.
        config_class: The class of the config of the trainer.
        step_idx: The step; -1 for the newest valid checkpoint.
        best: Whether to take the best checkpoint instead.

    Returns:
        The configs of trainer, model and optimizer, and the step of the checkpoint.
    """
    store = CheckpointStore(checkpoint_folder(checkpoint), read_only=True)
    step = store.select(step_idx, best=best, items={*MODEL_PARTS, "metadata"})
    metadata = store.read_metadata(step)
    # Only a training run needs these: a rollback, for example, needs the callback that saves.
    left_out = ("logger", "callbacks", "bad_steps")
    trainer_dict = {key: value for key, value in metadata["trainer"].items() if key not in left_out}
    return (
        ConfigDict.from_dict(config_class, {**trainer_dict, "logger": None}),
        ModelConfig.from_metadata(json.dumps(metadata)),
        ConfigDict.from_dict(OptimizerConfig, metadata["optimizer"]),
        step,
    )


def replace_parts(state: TrainState, state_dict: Mapping[str, Any]) -> TrainState:
    """Return a train state with the parts that a dictionary has, placed like those that they replace."""
    if "params" not in state_dict:
        raise ValueError(f"A state needs 'params', but has only: {', '.join(state_dict) or 'nothing'}.")
    given = {name: state_dict[name] for name in STATE_PARTS if state_dict.get(name) is not None}
    state = state.replace(**{name: _place_like(part, getattr(state, name)) for name, part in given.items()})
    return state if "opt_state" in given else state.replace(opt_state=started_from(state.opt_state, state.params))


def _place_like(tree: PyTree, like: PyTree) -> PyTree:
    """Shard the arrays of a tree like those of another tree, in the same boxes."""

    def place(old: Any, new: Any) -> Any:
        value, target = unboxed(new), unboxed(old)
        if value.shape != target.shape:
            raise ValueError(f"An array of shape {value.shape} cannot take the place of one of shape {target.shape}.")
        is_in_place = isinstance(value, jax.Array) and value.sharding == target.sharding
        return reboxed(old, value if is_in_place else jax.device_put(value, target.sharding))

    return jax.tree.map(place, like, tree, is_leaf=is_partitioned)
