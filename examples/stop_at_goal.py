"""A callback from scratch: a run that ends once its validations are good enough.

    python examples/stop_at_goal.py

A tiny xLSTM learns to count. It stops when three validations in a row have reached the goal, long before its last step.
The count is kept in checkpoints, so a run that is interrupted meanwhile does not begin to count again. From the command
line, `callbacks.goal._target_=stop_at_goal.StopAtGoalConfig` adds it to any run if this folder is on PYTHONPATH.
"""

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.callbacks import Callback, CallbackConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

LOGGER = logging.getLogger(f"xlstm_jax.{__name__}")  # so that messages reach the log of the run

NUM_TOKENS, ROWS, LENGTH = 32, 16, 32


@dataclasses.dataclass(kw_only=True)
class StopAtGoalConfig(CallbackConfig):
    """When a run is good enough."""

    goal: float
    """The metric has to be at most this."""
    monitor: str = "loss"
    """A metric of validations; that of a named set is `<set>_<metric>`."""
    num_times: int = 1
    """In how many validations in a row it has to be."""

    def __post_init__(self):
        if self.num_times < 1:
            raise ConfigError(f"num_times is {self.num_times}: it has to be 1 or more.")

    def create(self, trainer, data_module=None):
        """Build the callback."""
        return StopAtGoal(self, trainer, data_module)


class StopAtGoal(Callback):
    """Stops a run after some validations that have reached a goal."""

    config: StopAtGoalConfig

    def __init__(self, config, trainer, data_module=None):
        super().__init__(config, trainer, data_module)
        self.num_reached = 0

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Compare the metric with the goal."""
        del epoch_idx  # the base class has looked at it
        config = self.config
        if config.monitor not in eval_metrics:
            raise ValueError(f"There is no metric {config.monitor!r}, only {', '.join(sorted(eval_metrics))}.")
        reached = eval_metrics[config.monitor] <= config.goal
        self.num_reached = self.num_reached + 1 if reached else 0
        if self.num_reached >= config.num_times:
            self.trainer.should_stop = True
            LOGGER.warning("Step %d: %s is at most %s. The run stops.", step_idx, config.monitor, config.goal)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"goal": self.config.goal, "num_reached": self.num_reached}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting; what has reached another goal does not count."""
        is_same = state_dict.get("goal") == self.config.goal
        self.num_reached = state_dict["num_reached"] if is_same else 0


def count_up(seed: int) -> LLMBatch:
    """Make rows that count up from a random token, around the end of the vocabulary."""
    starts = np.random.default_rng(seed).integers(NUM_TOKENS, size=(ROWS, 1))
    return LLMBatch.from_inputs(((starts + np.arange(LENGTH)) % NUM_TOKENS).astype(np.int32))


def main() -> None:
    """Train until the goal is reached."""
    parser = argparse.ArgumentParser(description="Train until the goal is reached.")
    parser.add_argument("--steps", type=int, default=1000, help="how long to train if the goal is not reached")
    num_steps = parser.parse_args().steps
    parallel = ParallelConfig(data_axis_size=jax.device_count())
    trainer = LLMTrainer(
        LLMTrainerConfig(
            callbacks=[StopAtGoalConfig(goal=0.2, num_times=3)],
            check_val_every_n_epoch=-1,
            check_val_every_n_steps=20,
            logger=None,
            enable_progress_bar=False,
        ),
        ModelConfig(
            model_class=XLSTM,
            parallel=parallel,
            model_config=XLSTMConfig(
                vocab_size=NUM_TOKENS, embedding_dim=32, num_heads=2, num_blocks=1, chunk_size=16, parallel=parallel
            ),
        ),
        OptimizerConfig(name="adamw", scheduler=SchedulerConfig(lr=3e-3)),
        LLMBatch.get_dtype_struct(ROWS, LENGTH),
    )
    held_out = [count_up(seed) for seed in range(2)]
    results = trainer.train_model(
        [count_up(2 + step) for step in range(num_steps)], held_out, num_train_steps=num_steps
    )
    for name, metrics in results.items():
        print(f"{name:>14}  loss {metrics['loss']:.3f}")
    print(f"The run ended at step {trainer.global_step} of {num_steps}.")


if __name__ == "__main__":
    main()
