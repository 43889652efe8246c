"""Callbacks: hooks that run at certain points of a training run."""

from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.callbacks.checkpointing import ModelCheckpoint, ModelCheckpointConfig, load_pretrained_model
from xlstm_jax.trainer.callbacks.lr_monitor import LearningRateMonitor, LearningRateMonitorConfig
from xlstm_jax.trainer.callbacks.profiler import JaxProfiler, JaxProfilerConfig

__all__ = [
    "Callback",
    "CallbackConfig",
    "JaxProfiler",
    "JaxProfilerConfig",
    "LearningRateMonitor",
    "LearningRateMonitorConfig",
    "ModelCheckpoint",
    "ModelCheckpointConfig",
    "load_pretrained_model",
]
