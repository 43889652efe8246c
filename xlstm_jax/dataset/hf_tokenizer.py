"""The documented import path of `load_tokenizer`; the tokenizers are in `xlstm_jax.dataset.tokenizers`."""

from xlstm_jax.dataset.tokenizers.loading import load_tokenizer as load_tokenizer
