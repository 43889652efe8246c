"""The base class of callbacks: the hooks, and when they run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike


@dataclasses.dataclass(kw_only=True, frozen=False)
class CallbackConfig(ConfigDict):
    """When a callback runs."""

    target_example: ClassVar[str] = "xlstm_jax.trainer.callbacks.ModelCheckpointConfig"
    """Settings have to name the class of a callback: an example of one."""
    every_n_epochs: int = 1
    """Run the filtered hooks of epochs and validations every this many epochs; below 1, never."""
    every_n_steps: int = -1
    """Run the filtered hook of steps every this many steps; below 1, never."""
    main_process_only: bool = False
    """Whether filtered hooks run in the first process only."""

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "Callback":
        """Build the callback that this config describes."""
        raise NotImplementedError(f"{type(self).__name__} has no `create`, which builds its callback.")

    def _check_runs_in_all_processes(self) -> None:
        if self.main_process_only:
            raise ConfigError(
                f"{type(self).__name__} has main_process_only=True, but all processes have to take part: leave it out."
            )


class Callback:
    """Acts at certain points of a training run.

    A subclass overrides the hooks it needs. Hooks named `on_filtered_*` run every few epochs or steps, as the config
    says; the other hooks always run. Validations are filtered by their epoch.

    Args:
        config: When to run.
        trainer: The trainer.
        data_module: The data of the run, if it is known already.

    Attributes:
        saves_state: Whether the callback saves the state of the others. It then runs after them, to save their new
            state, but before them where a validation starts, which may fail.
        vocabulary: The vocabulary of callbacks that tokenize texts; it has to be that of the data.
    """

    saves_state: bool = False
    vocabulary: Vocabulary | None = None

    def __init__(self, config: CallbackConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        self.config = config
        self.trainer = trainer
        self.data_module = data_module
        self._every_n_epochs = config.every_n_epochs
        self._every_n_steps = config.every_n_steps
        self._main_process_only = config.main_process_only
        is_active = not config.main_process_only or jax.process_index() == 0
        self._active_on_epochs = is_active and config.every_n_epochs > 0
        self._active_on_steps = is_active and config.every_n_steps > 0

    def on_training_start(self) -> None:
        """Run before the first step."""

    def on_training_end(self) -> None:
        """Run after the last step."""

    def on_training_interrupted(self, epoch_idx: int, step_idx: int) -> None:
        """Run after the step in which a signal interrupted the run."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before each epoch; epochs count from 1."""
        if self._is_due_on_epoch(epoch_idx):
            self.on_filtered_training_epoch_start(epoch_idx)

    def on_filtered_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before every n-th epoch."""

    def on_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Run after each epoch."""
        if self._is_due_on_epoch(epoch_idx):
            self.on_filtered_training_epoch_end(train_metrics, epoch_idx)

    def on_filtered_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Run after every n-th epoch."""

    def on_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after each step; the metrics are still on the device, and reading them waits for it."""
        if self._active_on_steps and step_idx % self._every_n_steps == 0:
            self.on_filtered_training_step(step_metrics, epoch_idx, step_idx)

    def on_filtered_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after every n-th step."""

    def on_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Run before each validation."""
        if self._is_due_on_epoch(epoch_idx):
            self.on_filtered_validation_epoch_start(epoch_idx, step_idx)

    def on_filtered_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Run before the validations of every n-th epoch."""

    def on_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after each validation."""
        if self._is_due_on_epoch(epoch_idx):
            self.on_filtered_validation_epoch_end(eval_metrics, epoch_idx, step_idx)

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after the validations of every n-th epoch."""

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Run before each test."""

    def on_test_epoch_end(self, test_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Run after each test."""

    def set_dataset(self, data_module: DataloaderModule) -> None:
        """Set the data of the run."""
        self.data_module = data_module

    def finalize(self, status: str | None = None) -> None:
        """Run once the run has ended; `status` is `success`, `nan`, `interrupted` or `error`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this callback that a checkpoint saves as JSON."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` from a checkpoint; empty if it has none."""

    def arrays(self) -> dict[str, PyTree]:
        """Return the trees of arrays that a checkpoint saves of this callback, by unique names.

        They are also the template to restore into, with shapes, dtypes and shardings.
        """
        return {}

    def load_arrays(self, arrays: Mapping[str, PyTree]) -> None:
        """Restore the arrays of a checkpoint, once the trainer has its state; empty if it has none."""

    def _is_due_on_epoch(self, epoch_idx: int) -> bool:
        return self._active_on_epochs and epoch_idx % self._every_n_epochs == 0
