"""Training of models. Losses, metrics and optimizers do not import the trainer."""

from typing import TYPE_CHECKING

from xlstm_jax.import_utils import lazy_exports

if TYPE_CHECKING:
    from xlstm_jax.trainer.base.trainer import TrainerConfig, TrainerModule

__all__ = ["TrainerConfig", "TrainerModule"]

__getattr__, __dir__ = lazy_exports(__name__, {"TrainerConfig": "base.trainer", "TrainerModule": "base.trainer"})
