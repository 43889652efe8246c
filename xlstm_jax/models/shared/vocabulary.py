"""The embedding and the head of a language model, created from its config."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.models.shared.embedding import Embedding
from xlstm_jax.models.shared.init import small_init
from xlstm_jax.models.shared.lm_head import LMHead
from xlstm_jax.models.shared.utils import prepare_module


def create_embedding(config: Any) -> nn.Module:
    """Create the embedding table, inside a module that is being called."""
    return prepare_module(Embedding, "Embed", config.parallel)(
        config.vocab_size,
        config.embedding_dim,
        small_init(config.embedding_dim),
        jnp.dtype(config.param_dtype),
        name="token_embedding",
    )


def create_lm_head(config: Any, norm_fn: Callable[..., nn.Module]) -> nn.Module:
    """Create the head, inside a module that is being called.

    Args:
        config: The config of the model.
        norm_fn: Creates the norm before the projection.

    Returns:
        The head.
    """
    return prepare_module(LMHead, "LMHead", config.parallel)(
        config.vocab_size,
        config.parallel.model_axis_name,
        norm_fn,
        small_init(config.embedding_dim),
        config.logits_soft_cap,
        jnp.dtype(config.head_dtype),
        jnp.dtype(config.param_dtype),
        config.loss_chunk_size,
        config.keep_logits,
        name="lm_head",
    )
