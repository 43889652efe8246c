"""Attention, with or without packed documents in a row."""

from xlstm_jax.kernels.attention.api import attention, document_attention

__all__ = ["attention", "document_attention"]
