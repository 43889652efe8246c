"""The hooks of a trainer: each calls the hook of the same name in all callbacks."""

from collections.abc import Mapping
from typing import Any

from xlstm_jax.trainer.callbacks.callback import Callback


class CallbackHooks:
    """Calls hooks in the order of the callbacks, but those that save states last, and first before a validation.

    A subclass that overrides a hook calls the inherited one through `super`.
    """

    callbacks: list[Callback]

    def _in_order(self, *, savers_first: bool = False) -> list[Callback]:
        return sorted(self.callbacks, key=lambda callback: callback.saves_state != savers_first)

    def on_training_start(self) -> None:
        """Run before the first step."""
        for callback in self._in_order():
            callback.on_training_start()

    def on_training_end(self) -> None:
        """Run after the last step."""
        for callback in self._in_order():
            callback.on_training_end()

    def on_training_interrupted(self, epoch_idx: int, step_idx: int) -> None:
        """Run after the step in which a signal interrupted the run."""
        for callback in self._in_order():
            callback.on_training_interrupted(epoch_idx=epoch_idx, step_idx=step_idx)

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before each epoch."""
        for callback in self._in_order():
            callback.on_training_epoch_start(epoch_idx)

    def on_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Run after each epoch."""
        for callback in self._in_order():
            callback.on_training_epoch_end(train_metrics, epoch_idx)

    def on_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after each step; the metrics are still on the device."""
        for callback in self._in_order():
            callback.on_training_step(step_metrics, epoch_idx, step_idx)

    def on_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Run before each validation."""
        for callback in self._in_order(savers_first=True):
            callback.on_validation_epoch_start(epoch_idx=epoch_idx, step_idx=step_idx)

    def on_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after each validation."""
        for callback in self._in_order():
            callback.on_validation_epoch_end(eval_metrics, epoch_idx=epoch_idx, step_idx=step_idx)

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Run before each test."""
        for callback in self._in_order():
            callback.on_test_epoch_start(epoch_idx)

    def on_test_epoch_end(self, test_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Run after each test."""
        for callback in self._in_order():
            callback.on_test_epoch_end(test_metrics, epoch_idx)
