"""Layers and helpers that all models share."""

from xlstm_jax.models.shared.init import (
    InitDistribution,
    InitFnName,
    create_common_init_fn,
    small_init,
    uniform_init,
    wang_init,
)
from xlstm_jax.models.shared.lm_head import TPLMHead
from xlstm_jax.models.shared.utils import prepare_module, soft_cap_logits

__all__ = [
    "InitDistribution",
    "InitFnName",
    "TPLMHead",
    "create_common_init_fn",
    "prepare_module",
    "small_init",
    "soft_cap_logits",
    "uniform_init",
    "wang_init",
]
