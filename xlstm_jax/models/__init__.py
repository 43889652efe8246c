"""Models: from tokens and a state to logits and a state."""

from xlstm_jax.models.configs import ModelConfig

__all__ = ["ModelConfig"]
