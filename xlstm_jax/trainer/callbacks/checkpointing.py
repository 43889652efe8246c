"""Checkpoints of a training run: when they are written, and how a run resumes from one."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from xlstm_jax.checkpoint.files import checkpoint_folder
from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.soundness import is_sound
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.checkpoint.timer import CheckpointTimer
from xlstm_jax.configs import ConfigError, check_numbers, refuse_ignored
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run import saved_run
from xlstm_jax.trainer.run.trainer_like import TrainerLike

LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, frozen=False)
class ModelCheckpointConfig(CallbackConfig):
    """When to write checkpoints, what they contain and which to keep.

    They are written before the validations of every `every_n_epochs`-th epoch, every `every_n_steps` steps, by time, at
    the end of the training, and when a signal interrupts it.
    """

    max_to_keep: int | None = 1
    """The number of newest checkpoints to keep, `None` for all. The best one is kept as well."""
    monitor: str | None = None
    """The validation metric that decides which checkpoint is the best."""
    mode: str = "min"
    """Whether low (`min`) or high (`max`) values of the monitored metric are good."""
    keep_every: int | None = None
    """Keep all checkpoints whose step is a multiple of this."""
    every_n_minutes: float | None = None
    """Write a checkpoint if the last one is this old; `None` for no such checkpoints."""
    save_at_end: bool = True
    """Write a checkpoint after the last step."""
    save_optimizer_state: bool = True
    """Whether checkpoints hold the optimizer state, which resuming needs."""
    save_dataloader_state: bool = True
    """Whether checkpoints hold the position in the data."""
    enable_async_checkpointing: bool = True
    """Continue training while a checkpoint is being written."""
    checksums: bool = True
    """Store checksums with checkpoints, and verify them when one is loaded."""
    log_path: Path | str | None = None
    """The parent of the folder `checkpoints`; by default the folder of the logger. May be `gs://bucket/folder`."""

    def __post_init__(self):
        self._check_runs_in_all_processes()
        check_numbers(self, ModelCheckpointConfig)
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode is {self.mode!r}: choose min or max.")
        for name in ("max_to_keep", "keep_every", "every_n_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}, but has to be above 0, or None.")
        if self.monitor is None:
            refuse_ignored(self, {"mode": "without monitor"})

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "ModelCheckpoint":
        """Build the callback that this config describes."""
        return ModelCheckpoint(self, trainer, data_module)


class OtherSettingsError(ValueError):
    """A run cannot resume with changed settings.

    Args:
        problem: The error, up to the advice to start a new run.
        how: How to start one in Python; a command replaces this part by its own advice.
    """

    def __init__(self, problem: str, how: str):
        super().__init__(problem + how)
        self.problem = problem


class ModelCheckpoint(Callback):
    """Writes the state of a run and of its callbacks, the positions of its data loaders, configs and metrics.

    The state is saved before a validation begins, and the metrics are added after it. A state with NaN is never saved.

    Args:
        config: When to write, what to write, and which checkpoints to keep.
        trainer: The trainer.
        data_module: The data of the run, if it is known already.
    """

    saves_state = True

    def __init__(
        self, config: ModelCheckpointConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None
    ):
        super().__init__(config, trainer, data_module)
        log_path = trainer.log_path if config.log_path is None else config.log_path
        if log_path is None:
            raise ConfigError("Checkpoints need a folder: set log_path of the logger or of ModelCheckpointConfig.")
        self.config: ModelCheckpointConfig = config
        self.store = CheckpointStore(
            checkpoint_folder(log_path),
            retention=Retention(config.max_to_keep, config.keep_every, config.monitor, config.mode),
            use_async=config.enable_async_checkpointing,
            checksums=config.checksums,
        )
        self._current: set[int] = set()  # The saved steps of this run up to now.
        self._loaded: int | None = None
        self._timer = CheckpointTimer(config.every_n_minutes)

    def on_training_start(self) -> None:
        """Start the timer."""
        self._timer.restart()

    def on_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Save if the last checkpoint is too old."""
        super().on_training_step(step_metrics, epoch_idx, step_idx)
        if self._timer.is_due(step_idx):
            self.save_state(step_idx)

    def on_filtered_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Save every `every_n_steps` steps."""
        self.save_state(step_idx)

    def on_filtered_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Save before a validation, so that nothing is lost if it fails."""
        self.save_state(step_idx)

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Add the metrics of a validation to the checkpoint."""
        self.save_model(eval_metrics, step_idx)

    def on_training_end(self) -> None:
        """Save the last state."""
        if self.config.save_at_end:
            self.save_state(self.trainer.global_step)

    def on_training_interrupted(self, epoch_idx: int, step_idx: int) -> None:
        """Save, and wait until everything is written."""
        self.save_state(step_idx)
        with self._measured():
            self.store.wait()

    def set_dataset(self, data_module: DataloaderModule) -> None:
        """Set the data of the run."""
        super().set_dataset(data_module)
        for name, loader in saved_run.named_loaders(data_module).items():
            if self.config.save_dataloader_state and not hasattr(loader, "get_state"):
                LOGGER.warning("The data loader %r has no `get_state`: a resumed run will start it anew.", name)

    def save_state(self, step_idx: int) -> bool:
        """Save the state unless the step is saved; return whether it is saved now, which a state with NaN never is."""
        if step_idx in self._current:
            return True
        jax.block_until_ready(self.trainer.state.step)  # Steps that still run are not part of the time of a save.
        if not self.trainer.state_is_good():
            LOGGER.error("Step %d, or one before it, was bad, and the state is older: it is not saved.", step_idx)
            return False
        with self._measured():
            state = saved_run.state_arrays(self.trainer)
            if not self.config.save_optimizer_state:
                state.pop("opt_state", None)
            if not is_sound(state["params"], state.get("opt_state")):
                LOGGER.error("The state of step %d is not finite: it is not saved.", step_idx)
                return False
            documents = saved_run.run_documents(self.trainer)
            if self.config.save_dataloader_state:
                documents["data"] = saved_run.data_document(self.data_module)
            self.store.save(step_idx, {**saved_run.callback_arrays(self.trainer), **state}, documents)
        self._current.add(step_idx)
        self._timer.restart()
        return True

    def save_model(self, eval_metrics: Mapping[str, Any], step_idx: int) -> None:
        """Save the state unless this step is saved already, and add metrics to its checkpoint.

        Args:
            eval_metrics: The metrics of a validation; only numbers and strings are kept.
            step_idx: The step.

        Raises:
            ConfigError: The monitored metric is missing. The state is saved nevertheless.
        """
        if not self.save_state(step_idx):
            return
        with self._measured():
            plain = {name: value for name, value in eval_metrics.items() if isinstance(value, bool | int | float | str)}
            if self.config.save_dataloader_state:
                saved_run.add_validated_positions(self.store, step_idx, self.data_module)
            self.store.save_metrics(step_idx, plain)
            self.store.save_document(step_idx, "callbacks", saved_run.callback_states(self.trainer))
        if self.config.monitor is not None and self.config.monitor not in plain:
            raise ConfigError(
                f"The metric {self.config.monitor!r} to monitor is not among those of the validation, {sorted(plain)}: "
                "set `monitor` of ModelCheckpointConfig to one of them."
            )

    def has_metrics(self, step_idx: int) -> bool:
        """Check that a step either has no checkpoint, or one with the metrics of a validation."""
        return step_idx not in self.store.steps() or bool(self.load_metrics(step_idx))

    def load_metrics(self, step_idx: int) -> dict[str, Any]:
        """Read the metrics of a validation from the checkpoint of its step; empty if there are none."""
        return self.store.read_document(step_idx, "metrics") if step_idx in self.store.steps() else {}

    def save_dataloader(self, step_idx: int) -> None:
        """Write the current positions of the data loaders into the checkpoint of a step, as saving the state does."""
        self.store.save_document(step_idx, "data", saved_run.data_document(self.data_module))

    def load_model(
        self, step_idx: int = -1, load_best: bool = False, delete_params_before_loading: bool = False
    ) -> dict[str, Any]:
        """Read the state of a run to resume.

        Args:
            step_idx: The step; below 0, the newest checkpoint that is valid.
            load_best: Take the best checkpoint instead.
            delete_params_before_loading: Delete the state of the trainer before reading, to free its memory.

        Returns:
            The saved parts of the train state by name, on the mesh of the trainer; `run`, the result of `run_state` of
            the trainer; and `callbacks`, for `saved_run.restore_callbacks`.

        Raises:
            OtherSettingsError: The run cannot resume under the configs of the trainer.
            CorruptCheckpointError: The requested checkpoint is corrupt, or all are.
        """
        step = self.store.select(step_idx, best=load_best)
        differences = saved_run.log_differences(self.store, step, self.trainer)
        if forbidding := [str(difference) for difference in differences if difference.forbids_resuming]:
            raise OtherSettingsError(
                f"The run in {self.store.folder} cannot go on with other settings: {'; '.join(forbidding)}. Go back to "
                "the old ones, or start a new run from its parameters",
                ", with another log_path: load_pretrained_model(..., load_optimizer=False).",
            )
        state = saved_run.load_run(self.store, step, self.trainer, free=delete_params_before_loading)
        self.store.adopt()
        self._forget_after(step)
        self._current.add(step)
        self._loaded = step
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Forget that later steps are saved, as the trainer has another state."""
        step = self.trainer.global_step
        self._forget_after(step)
        if self._loaded != step:
            self._current.discard(step)
        self._loaded = None

    def load_dataloader(self, step_idx: int = -1, load_best: bool = False) -> dict[str, Any]:
        """Read the positions of the data loaders.

        Returns:
            The states of this process's loaders by name: `train`, `val` or `val_<name>`, `test` or `test_<name>`.
        """
        return saved_run.load_data(self.store, self.resolve_step_idx(step_idx, load_best))

    def resolve_step_idx(self, step_idx: int, load_best: bool) -> int:
        """Return the step of the checkpoint to load.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.
        """
        return self.store.resolve(step_idx, best=load_best)

    def finalize(self, status: str | None = None) -> None:
        """Wait until everything is written. The callback can be used again."""
        with self._measured():
            self.store.close()

    def _forget_after(self, step: int) -> None:
        self._current = {other for other in self._current if other <= step}

    def _measured(self) -> contextlib.AbstractContextManager:
        """Count the time of a block as that of checkpoints."""
        return self.trainer.clock.measure("checkpoint")


def check_folders(callbacks: Sequence[Callback]) -> None:
    """Refuse two callbacks that would write and delete the same checkpoints."""
    folders = [callback.store.folder for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if len(set(folders)) < len(folders):
        raise ConfigError(
            f"Two ModelCheckpointConfigs write into {folders[0]}: use one, which may save every_n_steps and monitor a "
            "metric too, or give each a log_path of its own."
        )


def load_pretrained_model(
    checkpoint_path: Path | str,
    trainer: TrainerLike,
    step_idx: int = -1,
    load_optimizer: bool = True,
    load_best: bool = False,
    delete_params_before_loading: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Read the state of another run with the same model; other settings may differ.

    Args:
        checkpoint_path: The folder of that run, with `checkpoints` in it, or that folder itself.
        trainer: The trainer; its state has the shapes and shardings of the arrays.
        step_idx: The step; below 0, the newest checkpoint that is valid.
        load_optimizer: Whether to continue that run, with its optimizer state, step and random key.
        load_best: Take the best checkpoint instead, by the metric that the run monitored.
        delete_params_before_loading: Delete the state of the trainer before reading, to free its memory.

    Returns:
        The parts of the train state by name (see `ModelCheckpoint.load_model`), the states of the data loaders by name,
        and the step.
    """
    with contextlib.closing(CheckpointStore(checkpoint_folder(checkpoint_path), read_only=True)) as store:
        items = None if load_optimizer else {*saved_run.MODEL_PARTS, "metadata", "data", "metrics"}
        step = store.select(step_idx, best=load_best, items=items)
        saved_run.log_differences(store, step, trainer)
        load = saved_run.load_run if load_optimizer else saved_run.load_params
        return load(store, step, trainer, free=delete_params_before_loading), saved_run.load_data(store, step), step
