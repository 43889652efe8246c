"""Optimizers and learning-rate schedules from configs."""

from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.schedule_free import get_eval_params
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig, build_lr_scheduler

__all__ = ["OptimizerConfig", "SchedulerConfig", "build_lr_scheduler", "build_optimizer", "get_eval_params"]
