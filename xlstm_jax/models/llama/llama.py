"""The Llama language model: tokens and a state to logits and a state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.llama.block import TransformerBlock, init_cache
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.shared.checks import check_state, check_tokens
from xlstm_jax.models.shared.norms import RMSNorm
from xlstm_jax.models.shared.stack import BlockStack, Context, init_states
from xlstm_jax.models.shared.vocabulary import create_embedding, create_lm_head

__all__ = ["LlamaConfig", "LlamaTransformer"]


class LlamaTransformer(nn.Module):
    """A Llama language model.

    `model.apply(variables, idx)` gives logits. With `state` and `return_state=True` it goes on from a state and returns
    the next one too; with `targets` it gives losses instead of logits.

    Attributes:
        config: The shape of the model.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        idx: jax.Array,
        pos_idx: jax.Array | None = None,
        document_borders: jax.Array | None = None,
        train: bool = False,
        *,
        state: PyTree | None = None,
        return_state: bool = False,
        targets: jax.Array | None = None,
        last_only: bool = False,
    ) -> Any:
        """Run sequences of tokens through the model.

        Args:
            idx: The tokens, `[batch, length]`.
            pos_idx: The position of each token. By default they are counted on from the state, through documents.
            document_borders: Where a document begins, for `mask_across_document_boundaries`.
            train: Whether dropout is on.
            state: The state before the first token; empty by default.
            return_state: Whether to return the state after the last token too.
            targets: The target of each position.
            last_only: Whether to compute the logits of the last position alone, which is all that generation needs.

        Returns:
            The logits `[batch, length, vocab]` in float32. With `targets`, for each position the loss of its target and
            whether it has the largest logit, without ever holding all logits. With `return_state` a pair of these and
            the state.
        """
        config = self.config
        check_tokens(idx, pos_idx=pos_idx, document_borders=document_borders, targets=targets)
        if last_only and targets is not None:
            raise ValueError("Losses are those of all positions: leave out targets, or last_only.")
        self._check(idx, state, return_state)
        embedding = create_embedding(config)()
        x = embedding[idx].astype(config.dtype)
        if config.add_embedding_dropout:
            x = nn.Dropout(config.dropout_rate, deterministic=not train)(x)
        stack = BlockStack(
            config.kinds,
            lambda _: TransformerBlock(config, parent=None),
            config.parallel,
            config.scan_blocks,
            config.remat,
            name="block_stack",
        )
        states = init_states(config.kinds, config.scan_blocks, lambda _: None) if state is None else state
        x, states = stack(x, states, Context(document_borders, pos_idx, train, return_state, last_only))
        if state is not None:
            slots = _length(state)[:, None] + jnp.arange(idx.shape[1])
            x = jnp.where((slots < config.max_state_length)[:, -x.shape[1] :, None], x, jnp.nan)
        head = create_lm_head(config, functools.partial(RMSNorm, config.norm_eps, jnp.dtype(config.param_dtype)))
        result = head(x[:, -1:] if last_only else x, targets, embedding if config.tie_weights else None)
        return (result, states) if return_state else result

    def init_state(self, batch_size: int) -> PyTree:
        """Return the state before the first token; inside a mesh, that of this device's rows and heads."""
        return init_states(self.config.kinds, self.config.scan_blocks, lambda _: init_cache(self.config, batch_size))

    def _check(self, idx, state, return_state) -> None:
        """Refuse a state that cannot be right."""
        if state is None and not return_state:
            return
        if not self.config.causal:
            raise ValueError("A model with causal=False has no state: its first tokens depend on those to come.")
        if state is not None:
            check_state(state, jax.eval_shape(lambda: self.init_state(idx.shape[0])))
        self._check_room(idx.shape[1], 0 if state is None else _length(state))

    def _check_room(self, num_new: int, length: jax.Array | int) -> None:
        """Refuse more tokens than the state can hold, as far as can be seen: lengths are unknown inside `jit`."""
        num_held = 0 if isinstance(length, Tracer) else int(np.max(length))
        if num_held + num_new > self.config.max_state_length:
            raise ValueError(
                f"The state holds {num_held} tokens and {num_new} more do not fit into max_state_length "
                f"{self.config.max_state_length}: raise it, or pass fewer tokens."
            )


def _length(state: PyTree) -> jax.Array:
    """Return the number of tokens that each row holds: the same in all blocks."""
    return state[0].length.reshape(-1, state[0].length.shape[-1])[0]
