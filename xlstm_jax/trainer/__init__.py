"""Turn models, data and optimizers into training runs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlstm_jax.trainer.base.trainer import TrainerConfig, TrainerModule

__all__ = ["TrainerConfig", "TrainerModule"]


def __getattr__(name: str) -> Any:
    """Import the trainer on first use, as losses, metrics and optimizers do not need it."""
    if name in __all__:
        return getattr(importlib.import_module("xlstm_jax.trainer.base.trainer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
