"""Validation within a run: at its steps, after its epochs, and where an earlier start of it ended."""

import logging
from typing import Any

import jax

from xlstm_jax.trainer.base.bad_steps import BadStepHandling
from xlstm_jax.trainer.base.evaluation import DataLoaders, Evaluation
from xlstm_jax.trainer.run.plan import Plan

LOGGER = logging.getLogger(__name__)


class Validation(Evaluation, BadStepHandling):
    """Validates the model of a trainer while it trains; a step is validated once."""

    should_stop: bool

    def _eval_model_in_train_loop(self, val_loader: DataLoaders, epoch_idx: int) -> dict[str, Any]:
        jax.block_until_ready(self.state.step)  # Steps that still run are not part of the time of a validation.
        with self.clock.measure("evaluation"):
            self.on_validation_epoch_start(epoch_idx=epoch_idx, step_idx=self.global_step)
            metrics = self.eval_model(val_loader, mode="val", epoch_idx=epoch_idx)
            self.progress.validated_step, self._validation_metrics = self.global_step, metrics
            self.on_validation_epoch_end(metrics, epoch_idx=epoch_idx, step_idx=self.global_step)
        return metrics

    def _make_up_validation(self, plan: Plan, val_loader: DataLoaders | None, results: dict[str, Any]) -> None:
        """Run the validation at which an earlier start of the run ended, after it had saved the state."""
        step, config, checkpoints = self.global_step, self.trainer_config, self._checkpoints()
        if val_loader is None or step in (0, self.progress.validated_step):
            return
        if checkpoints is None:
            return
        if metrics := checkpoints.load_metrics(step):
            self.progress.validated_step, self._validation_metrics = step, metrics
        if checkpoints.has_metrics(step):
            return
        epoch_idx = plan.epoch_at(self.progress.num_drawn - 1, self.progress.num_epochs_finished)
        with self.logger.logs_again(step):
            if self._is_due(step, config.check_val_every_n_steps) or self._is_validated_at_end(plan):
                results[f"val_step_{step}"] = self._eval_model_in_train_loop(val_loader, epoch_idx)
            elif self._has_ended(plan, epoch_idx) and self._is_due(epoch_idx, config.check_val_every_n_epoch):
                results[f"val_epoch_{epoch_idx}"] = self._eval_model_in_train_loop(val_loader, epoch_idx)

    def _validate_once(self, val_loader: DataLoaders, epoch_idx: int) -> dict[str, Any]:
        """Validate after an epoch, unless its last step was validated, if only before the run was resumed."""
        if self.progress.validated_step == self.global_step:
            LOGGER.warning("Step %d was validated already: epoch %d has its metrics.", self.global_step, epoch_idx)
            return self._validation_metrics
        return self._eval_model_in_train_loop(val_loader, epoch_idx)

    def _has_ended(self, plan: Plan, epoch_idx: int) -> bool:
        """Tell whether an epoch is over: with its last batch, or with the run."""
        return self._epoch_idx(plan) > epoch_idx or self.global_step >= plan.num_train_steps

    def _epoch_idx(self, plan: Plan) -> int:
        """Return the index of the epoch that the next batch belongs to."""
        return plan.epoch_at(self.progress.num_drawn, self.progress.num_epochs_finished)

    def _is_validated_at_end(self, plan: Plan) -> bool:
        """Tell whether the step is the last one of a run that is validated at its end."""
        config = self.trainer_config
        validates = config.check_val_every_n_steps > 0 or config.check_val_every_n_epoch > 0
        is_end = self.global_step >= plan.num_train_steps or self.should_stop
        return config.check_val_at_end and validates and is_end

    @staticmethod
    def _is_due(index: int, every: int) -> bool:
        return every > 0 and index % every == 0
