"""The training loop: epochs of steps, with validations and rollbacks between them."""

import enum
from collections.abc import Mapping
from typing import Any, Protocol

from xlstm_jax.common_types import HostMetrics
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.base.bad_steps import BadStepHandler
from xlstm_jax.trainer.base.evaluator import DataLoaders
from xlstm_jax.trainer.base.run_checkpoints import RunCheckpoints
from xlstm_jax.trainer.base.run_metrics import RunMonitor
from xlstm_jax.trainer.base.validation import ValidationSchedule
from xlstm_jax.trainer.data_module import DataIterator
from xlstm_jax.trainer.run.batches import BatchStream
from xlstm_jax.trainer.run.clock import USEFUL, Heartbeat
from xlstm_jax.trainer.run.plan import Plan
from xlstm_jax.trainer.run.signals import Interrupts
from xlstm_jax.trainer.run.trainer_like import TrainerLike


class Outcome(enum.Enum):
    """Why a stretch of training ended."""

    END_OF_EPOCH = enum.auto()
    FINISHED = enum.auto()
    BAD_STEP = enum.auto()
    INTERRUPTED = enum.auto()


class LoopTrainer(TrainerLike, Protocol):
    """The interface of a trainer for the loop: its parts, a step, a validation, the hooks, and loading to roll back."""

    monitor: RunMonitor
    heartbeat: Heartbeat
    validation: ValidationSchedule
    bad_steps: BadStepHandler

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of the run."""
        ...

    def take_step(self, batch: Batch) -> None:
        """Train on a batch."""
        ...

    def _eval_model_in_train_loop(self, val_loader: DataLoaders, epoch_idx: int) -> HostMetrics:
        """Validate, with the hooks of callbacks."""
        ...

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before each epoch."""
        ...

    def on_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Run after each epoch."""
        ...

    def on_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Run after each step."""
        ...

    def load_model(self, step_idx: int = -1, raise_if_not_found: bool = True) -> None:
        """Load a checkpoint of this run."""
        ...

    def load_data_loaders(self, step_idx: int = -1, train_loader: DataLoaders | None = None) -> None:
        """Set loaders to their positions in a checkpoint of this run."""
        ...


class TrainingLoop:
    """Trains from the current state up to the end of a plan.

    Args:
        trainer: The trainer.
        plan: How long to train.
        train_loader: The batches to train on.
        val_loader: The data to validate on; `None` for no validation.
        interrupts: The signals that arrive during the run.

    Attributes:
        results: The metrics of each validation, under `val_step_<step>` and `val_epoch_<epoch>`.
        signal_number: The signal that interrupted the loop; 0 if none did.
    """

    def __init__(
        self,
        trainer: LoopTrainer,
        plan: Plan,
        train_loader: DataIterator,
        val_loader: DataLoaders | None,
        interrupts: Interrupts,
    ):
        self._trainer = trainer
        self._progress = trainer.progress
        self._plan = plan
        self._train_loader = train_loader
        self._val_loader = val_loader
        self._interrupts = interrupts
        self._stream = BatchStream(train_loader, trainer.token_check)
        self.results: dict[str, Any] = {}
        self.signal_number = 0

    @property
    def epoch_idx(self) -> int:
        """The index of the epoch that the next batch belongs to."""
        return self._plan.epoch_at(self._progress.num_drawn, self._progress.num_epochs_finished)

    def run(self) -> Outcome:
        """Train epoch by epoch."""
        trainer, progress, was_empty = self._trainer, self._progress, False
        self._make_up_validation()
        while progress.step < self._plan.num_train_steps and not trainer.should_stop:
            epoch_idx, num_drawn = self.epoch_idx, progress.num_drawn
            trainer.on_training_epoch_start(epoch_idx)
            trainer.logger.start_epoch(epoch_idx, progress.step, mode="train")
            outcome = self._run_epoch(epoch_idx)
            if outcome is Outcome.INTERRUPTED:
                trainer.logger.leave_epoch()
                return outcome
            _, epoch_metrics = trainer.logger.end_epoch(progress.train_metrics, progress.step)
            if outcome is Outcome.BAD_STEP and trainer.bad_steps.rolls_back and not trainer.state_is_good():
                self._roll_back()
                continue
            trainer.on_training_epoch_end(epoch_metrics, epoch_idx)
            if outcome is Outcome.BAD_STEP:
                progress.step, progress.train_metrics = int(trainer.state.step), None
                return outcome
            is_empty = progress.num_drawn == num_drawn
            if is_empty and was_empty:  # The first may be the end of the epoch that a run was stopped in.
                raise ValueError("The train loader gave no batch in a whole epoch: it is empty or used up.")
            was_empty = is_empty
            progress.num_epochs_finished += 1
            if trainer.validation.is_due_after_epoch(epoch_idx) and self._val_loader is not None:
                metrics = trainer.validation.find(epoch_idx)
                self.results[f"val_epoch_{epoch_idx}"] = self._validate(epoch_idx) if metrics is None else metrics
        return Outcome.FINISHED

    def _run_epoch(self, epoch_idx: int) -> Outcome:
        trainer, progress, first = self._trainer, self._progress, self._progress.num_drawn
        while (batch := self._draw(begins_epoch=progress.num_drawn == first)) is not None:
            progress.step += 1
            step = progress.step
            trainer.bad_steps.record_batch()
            trainer.monitor.count(getattr(batch, "inputs", None))
            trainer.take_step(batch)
            trainer.on_training_step(progress.train_metrics, epoch_idx, step)
            is_logged = trainer.logger.is_due(step)
            progress.train_metrics = trainer.logger.log_step(progress.train_metrics, step)
            is_validated = self._val_loader is not None and trainer.validation.is_due_at_step(is_end=self._is_at_end())
            if self._must_stop(is_logged=is_logged, may_wait=is_validated):
                return Outcome.BAD_STEP
            if is_logged:
                trainer.bad_steps.forget_batches()
                trainer.heartbeat.beat(step, trainer.clock.elapsed)
            if number := self._interrupts.received(step, may_wait=is_logged):
                self.signal_number = number
                return Outcome.INTERRUPTED
            if is_validated:
                self.results[f"val_step_{step}"] = self._validate(epoch_idx)
            if self._has_ended(epoch_idx) or trainer.should_stop:
                break
        return Outcome.BAD_STEP if self._must_stop(is_logged=False, may_wait=True) else Outcome.END_OF_EPOCH

    def _draw(self, *, begins_epoch: bool) -> Batch | None:
        """Return the next batch that is not skipped; `None` at the end of an epoch."""
        trainer, progress = self._trainer, self._progress
        at_boundary = self._plan.begins_epoch(progress.num_drawn)
        with trainer.clock.measure("data") as span:
            while (batch := self._stream.next(begins_epoch=begins_epoch, at_boundary=at_boundary)) is not None:
                progress.num_drawn += 1
                if progress.num_drawn not in progress.skipped_batches:
                    break
            if not trainer.state.step.is_ready():
                span.activity = USEFUL  # The device was busy all the while.
        trainer.monitor.data_wait += span.seconds
        return batch

    def _must_stop(self, *, is_logged: bool, may_wait: bool) -> bool:
        return self._trainer.bad_steps.must_stop(self._trainer.state.guard, is_logged=is_logged, may_wait=may_wait)

    def _roll_back(self) -> None:
        """Return to the last checkpoint, and skip the batch of the first bad step from now on."""
        trainer = self._trainer
        with trainer.bad_steps.rollback(trainer.state.guard):
            trainer.load_model()
            trainer.load_data_loaders(train_loader=self._train_loader)
        trainer.state = trainer.bad_steps.reset(trainer.state)
        self._stream.restart()

    def _make_up_validation(self) -> None:
        """Run the validation during which an earlier start of the run ended, after it had saved the state."""
        trainer, progress, step = self._trainer, self._progress, self._progress.step
        if self._val_loader is None or step in (0, progress.validated_step):
            return
        if metrics := trainer.checkpoints.validation_metrics(step):
            trainer.validation.record(metrics)
        if not trainer.checkpoints.lacks_validation(step):
            return
        epoch_idx = self._plan.epoch_at(progress.num_drawn - 1, progress.num_epochs_finished)
        with trainer.logger.logs_again(step):
            if trainer.validation.is_due_at_step(is_end=self._is_at_end()):
                self.results[f"val_step_{step}"] = self._validate(epoch_idx)
            elif self._has_ended(epoch_idx) and trainer.validation.is_due_after_epoch(epoch_idx):
                self.results[f"val_epoch_{epoch_idx}"] = self._validate(epoch_idx)

    def _validate(self, epoch_idx: int) -> dict[str, Any]:
        return self._trainer._eval_model_in_train_loop(self._val_loader, epoch_idx)

    def _has_ended(self, epoch_idx: int) -> bool:
        """Check whether an epoch is over: with its last batch, or with the run."""
        return self._progress.step >= self._plan.num_train_steps or self.epoch_idx > epoch_idx

    def _is_at_end(self) -> bool:
        return self._progress.step >= self._plan.num_train_steps or self._trainer.should_stop
