"""What can be done at certain points of a training run, without changing its loop."""

from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig

__all__ = ["Callback", "CallbackConfig"]
