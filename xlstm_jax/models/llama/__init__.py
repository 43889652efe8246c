"""Llama: the Transformer that xLSTM is compared with."""

from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.llama.llama import LlamaTransformer

__all__ = ["LlamaConfig", "LlamaTransformer"]
