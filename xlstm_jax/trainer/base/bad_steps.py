"""What the host does about bad steps, which the device has recognised and not applied."""

import logging

import jax
import numpy as np

from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.loading import CheckpointLoading
from xlstm_jax.trainer.data_module import DataIterator, is_resumable
from xlstm_jax.trainer.logger.base_logger import Logger

LOGGER = logging.getLogger(__name__)


class BadStepHandling(CheckpointLoading):
    """Looks for bad steps where that costs nothing, and rolls back."""

    trainer_config: TrainerConfig
    logger: Logger
    _num_bad_seen: int
    _batch_of_step: dict[int, int]

    def state_is_good(self) -> bool:
        """Check that no bad step has stopped the state from moving on, and that the run may save it. Waits for it."""
        guard = self.state.guard
        return guard is None or self.trainer_config.bad_steps.policy == "skip" or int(guard.first_bad) == 0

    def _has_gone_bad(self, *, is_logged: bool, may_wait: bool) -> bool:
        """Check where it costs nothing whether the run cannot go on as it is."""
        if not self.trainer_config.check_for_nan:
            return False
        if self.trainer_config.bad_steps.policy == "skip":
            if is_logged and self.monitor.num_bad > self._num_bad_seen:
                LOGGER.warning("%d bad steps were skipped, %d so far.", *self._count_new_bad_steps())
            return False
        if is_logged and (self.logger.found_nans or self.monitor.num_bad > self._num_bad_seen):
            return True
        return may_wait and not self.state_is_good()

    def _count_new_bad_steps(self) -> tuple[int, int]:
        """Return how many bad steps there were since the last call, and how many so far."""
        before, self._num_bad_seen = self._num_bad_seen, self.monitor.num_bad
        return self._num_bad_seen - before, self._num_bad_seen

    def _has_skipped_too_many(self) -> bool:
        """Check whether the run has skipped more of its steps than it may, and log that."""
        config, guard = self.trainer_config.bad_steps, self.state.guard
        if guard is None or config.policy != "skip":
            return False
        num_bad, num_steps = int(guard.num_bad), int(guard.num_bad) + int(guard.num_good)
        if num_bad <= config.max_skipped_share * num_steps:
            return False
        LOGGER.error(
            "%d of %d steps were bad and skipped, more than bad_steps.max_skipped_share=%g allows: lower the learning "
            "rate, or look at the data.",
            num_bad,
            num_steps,
            config.max_skipped_share,
        )
        return True

    def _look_again(self) -> None:
        """Let the state move on after a bad step."""
        guard = self.state.guard
        if guard is not None:
            self._num_bad_seen = int(guard.num_bad)
            zeros = jax.tree.map(lambda x: jax.device_put(np.zeros((), x.dtype), x.sharding), guard.first_bad)
            self.state = self.state.replace(guard=guard._replace(first_bad=zeros))

    def _prepare_rollback(self, train_loader: DataIterator) -> None:
        """Make sure that there is a state to go back to, and that the data can follow."""
        checkpoints = self._checkpoints()
        if checkpoints is None or self.trainer_config.bad_steps.policy != "rollback":
            return
        if not is_resumable(train_loader):
            raise ValueError("To roll back, the train loader needs `get_state` and `set_state`.")
        if not checkpoints.config.save_dataloader_state:
            raise ValueError("To roll back, checkpoints need save_dataloader_state: the data goes back too.")
        checkpoints.save_state(self.global_step)

    def _roll_back(self, train_loader: DataIterator) -> None:
        """Return to the last checkpoint, and leave out the batch of the first bad step from now on."""
        limit = self.trainer_config.bad_steps.max_rollbacks
        if self.progress.num_rollbacks >= limit:
            raise RuntimeError(
                f"The run was rolled back {limit} times and has met a bad step again. Lower the learning rate, look at "
                "the batches named in the log, or raise bad_steps.max_rollbacks."
            )
        bad_step = int(self.state.guard.first_bad)
        bad_batch = self._batch_of_step[bad_step]
        skipped, num_rollbacks = self.progress.skipped_batches | {bad_batch}, self.progress.num_rollbacks + 1
        self.load_model()
        self.load_data_loaders(train_loader=train_loader)
        self.progress.skipped_batches, self.progress.num_rollbacks = skipped, num_rollbacks
        self.logger.found_nans = False
        self.logger.drop_after(self.global_step)
        self._look_again()
        self.monitor.start(self.global_step)
        LOGGER.warning(
            "Step %d was bad: back to step %d, and batch %d is left out.", bad_step, self.global_step, bad_batch
        )
