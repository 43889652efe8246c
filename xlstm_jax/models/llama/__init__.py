"""Llama: the Transformer that xLSTM is compared with. Importing it registers its kind of block."""

from xlstm_jax.models.llama import block
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.llama.llama import LlamaTransformer

__all__ = ["LlamaConfig", "LlamaTransformer", "block"]
