"""The residual block around the layers of an xLSTM stack."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.shared.feedforward import GatedFeedForward
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import create_norm
from xlstm_jax.models.shared.projections import common_arguments
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import sow_spread
from xlstm_jax.models.shared.utils import add_branch
from xlstm_jax.models.xlstm.config import XLSTMConfig


class Block(nn.Module):
    """`x + layer(norm(x))`, then `x + ffn(norm(x))` if there is a feed-forward layer.

    With `post_norm`, the output of each branch is normalised before it is added.

    Attributes:
        config: The config of the model.
        layer: The class of the layer; it is called with the config and a name.
        layer_name: The name of the layer's parameters.
        norm: The norm of both branches, `rmsnorm` or `layernorm`.
        ffn_dim: The width of the feed-forward layer; `None` for a block without one.
        activation: The activation of the feed-forward layer.
    """

    config: XLSTMConfig
    layer: Callable[..., nn.Module]
    layer_name: str
    norm: str
    ffn_dim: int | None = None
    activation: Callable[[jax.Array], jax.Array] = nn.silu

    @nn.compact
    def __call__(self, x: jax.Array, state: PyTree, context: Context) -> tuple[jax.Array, PyTree]:
        """Return the outputs and the state after the last position."""
        config = self.config
        dropout = nn.Dropout(config.dropout_rate, deterministic=not context.train)
        layer = self.layer(config, name=self.layer_name)
        x, normed = self._norm(f"norm_{self.layer_name}").with_skip(x)
        y, state = layer(normed, state, context)
        x = add_branch(context.requested(x), dropout(self._post_norm(y, self.layer_name)))
        if self.ffn_dim is not None:
            feed_forward = GatedFeedForward(
                self.ffn_dim,
                activation=self.activation,
                **common_arguments(config),
                up_init=small_init(config.embedding_dim),
                down_init=wang_init(config.embedding_dim, config.num_blocks),
                name="ffn",
            )
            x, normed = self._norm("norm_ffn").with_skip(x)
            x = add_branch(x, dropout(self._post_norm(feed_forward(normed), "ffn")))
        sow_spread(self, block_output=x)
        return x, state if context.keeps_state else None

    def _norm(self, name: str) -> Any:
        return create_norm(self.norm, self.config.norm_eps, jnp.dtype(self.config.param_dtype), name)

    def _post_norm(self, y: jax.Array, branch: str) -> jax.Array:
        """Normalise the output of a branch if the config says so."""
        return self._norm(f"post_norm_{branch}")(y) if self.config.post_norm else y
