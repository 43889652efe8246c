"""What all models share."""

from xlstm_jax.models.shared.utils import prepare_module, soft_cap_logits

__all__ = ["prepare_module", "soft_cap_logits"]
