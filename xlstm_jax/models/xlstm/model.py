"""The xLSTM language model: tokens and a state to logits and a state."""

import functools
from typing import Any

import jax
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.shared.checks import check_heads, check_state, check_tokens
from xlstm_jax.models.shared.stack import BlockStack, Context, init_states
from xlstm_jax.models.shared.vocabulary import create_embedding, create_lm_head
from xlstm_jax.models.xlstm.block import create_block, create_norm, init_block_state
from xlstm_jax.models.xlstm.config import XLSTMConfig


class XLSTM(nn.Module):
    """An xLSTM language model.

    `model.apply(variables, tokens)` gives logits. With `state` and `return_state=True` it goes on from a state and
    returns the next one too; with `targets` it gives losses instead of logits.

    Attributes:
        config: The shape of the model.
    """

    config: XLSTMConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
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
            tokens: The tokens, `[batch, length]`.
            pos_idx: The position of each token in its document; recurrent blocks do not need it.
            document_borders: Where a document begins: recurrent states start anew there.
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
        check_heads(config.num_heads, config.parallel)
        check_tokens(tokens, pos_idx=pos_idx, document_borders=document_borders, targets=targets)
        if last_only and targets is not None:
            raise ValueError("Losses are those of all positions: leave out targets, or last_only.")
        if state is None:
            states = init_states(config.kinds, config.scan_blocks, lambda _: None)
        else:
            states = check_state(state, jax.eval_shape(lambda: self.init_state(tokens.shape[0])))
        embedding = create_embedding(config)()
        x = embedding[tokens].astype(config.dtype)
        if config.embedding_dropout:
            x = nn.Dropout(config.dropout_rate, deterministic=not train)(x)
        stack = BlockStack(
            config.kinds,
            functools.partial(create_block, config=config),
            config.parallel,
            config.scan_blocks,
            config.remat,
            name="block_stack",
        )
        x, states = stack(x, states, Context(document_borders, pos_idx, train, return_state, last_only))
        head = create_lm_head(config, functools.partial(create_norm, config, config.norm))
        result = head(x[:, -1:] if last_only else x, targets, embedding if config.tie_weights else None)
        return (result, states) if return_state else result

    def init_state(self, batch_size: int) -> PyTree:
        """Return the state before the first token; inside a mesh, that of this device's rows and heads."""
        config = self.config
        init = functools.partial(init_block_state, config=config, batch_size=batch_size)
        return init_states(config.kinds, config.scan_blocks, init)
