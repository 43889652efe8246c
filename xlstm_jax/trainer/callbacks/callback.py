"""The base of all callbacks: which hooks there are, and when they run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.trainer.data_module import DataloaderModule


@dataclasses.dataclass(kw_only=True, frozen=False)
class CallbackConfig(ConfigDict):
    """When a callback runs."""

    every_n_epochs: int = 1
    """How many epochs lie between two runs of the hooks of epochs; below 1, they never run."""
    every_n_steps: int = -1
    """How many steps lie between two runs of the hook of steps; below 1, it never runs."""
    main_process_only: bool = False
    """Whether only the first process runs hooks that are filtered."""

    def create(self, trainer: Any, data_module: DataloaderModule | None = None) -> "Callback":
        """Build the callback that this config describes."""
        raise NotImplementedError(f"{type(self).__name__} has no `create`, which builds its callback.")

    def _check_runs_in_all_processes(self) -> None:
        if self.main_process_only:
            raise ConfigError(
                f"{type(self).__name__} has main_process_only=True, but all processes have to take part: leave it out."
            )


class Callback:
    """Acts at certain points of a training run.

    A subclass overrides the hooks it needs. Those named `on_filtered_*` run only every few epochs or steps, as the
    config says; the hooks that they belong to run always. A validation counts by its epoch.

    Args:
        config: When to run.
        trainer: The trainer, with its state, its logger and all else.
        data_module: The data of the run, if it is known already.

    Attributes:
        saves_state: Whether the callback saves the state of the others. It then runs after them, so that it saves what
            they have become, but before them where a validation starts, which may fail.
        vocabulary: The tokenizer, for callbacks that make texts into tokens: it has to be that of the data.
    """

    saves_state: bool = False
    vocabulary: Vocabulary | None = None

    def __init__(self, config: CallbackConfig, trainer: Any, data_module: DataloaderModule | None = None):
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
        """Run after the step in which a signal asked the run to stop."""

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
        """Take over the data of the run."""
        self.data_module = data_module

    def finalize(self, status: str | None = None) -> None:
        """Run once the run has ended; `status` is `success`, `nan`, `interrupted` or `error`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback, as JSON can hold it."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned when a checkpoint was written; empty if it kept nothing."""

    def arrays(self) -> dict[str, PyTree]:
        """Return trees of arrays that a checkpoint keeps of this callback, each under a name of its own.

        They also tell how to read such arrays back: their shapes, dtypes and shardings.
        """
        return {}

    def load_arrays(self, arrays: Mapping[str, PyTree]) -> None:
        """Go on from the arrays of a checkpoint, once the trainer has its state; empty if it kept none."""

    def _is_due_on_epoch(self, epoch_idx: int) -> bool:
        return self._active_on_epochs and epoch_idx % self._every_n_epochs == 0
