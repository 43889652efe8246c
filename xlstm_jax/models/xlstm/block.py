"""Blocks: a recurrent layer and what stands around it, on a residual stream."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.shared.feedforward import GatedFeedForward
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import LayerNorm, RMSNorm
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import sow_spread
from xlstm_jax.models.shared.utils import add_branch
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.mlstm import MLSTMLayer, common_arguments, init_mlstm_state
from xlstm_jax.models.xlstm.mlstm_up import MLSTMUpLayer, init_mlstm_up_state
from xlstm_jax.models.xlstm.slstm import SLSTMLayer, init_slstm_state


class _Kind(NamedTuple):
    """What makes a kind of block."""

    layer: Callable[..., nn.Module]
    layer_name: str
    init_state: Callable[[XLSTMConfig, int], PyTree]
    ffn: Callable[[XLSTMConfig], dict[str, Any]] | None
    """Width and activation of the feed-forward layer; `None` if there is none."""
    norm: Callable[[XLSTMConfig], str]
    """The norm before its layers, and after them with `post_norm`."""


KINDS = {
    "mlstm": _Kind(
        MLSTMLayer,
        "mlstm",
        init_mlstm_state,
        lambda config: {"hidden_dim": config.ffn_hidden_dim, "activation": nn.silu},
        lambda config: config.norm,
    ),
    "mlstm_up": _Kind(MLSTMUpLayer, "mlstm", init_mlstm_up_state, None, lambda config: config.paper_norm),
    "slstm": _Kind(
        SLSTMLayer,
        "slstm",
        init_slstm_state,
        lambda config: {
            "hidden_dim": config.slstm_ffn_dim,
            "activation": functools.partial(nn.gelu, approximate=False),
        },
        lambda config: config.paper_norm,
    ),
}


class Block(nn.Module):
    """`x + layer(norm(x))`, then `x + ffn(norm(x))` if the kind has a feed-forward layer.

    With `post_norm`, what is added to `x` has a norm of its own.

    Attributes:
        kind: One of `KINDS`.
        config: The config of the model.
    """

    kind: str
    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: PyTree, context: Context) -> tuple[jax.Array, PyTree]:
        """Return the outputs and the state after the last position."""
        kind, config = KINDS[self.kind], self.config
        norm = functools.partial(create_norm, config, kind.norm(config))
        dropout = nn.Dropout(config.dropout_rate, deterministic=not context.train)
        layer = kind.layer(config, name=kind.layer_name)
        x, normed = norm(name=f"norm_{kind.layer_name}").with_skip(x)
        y, state = layer(normed, state, context)
        x = add_branch(context.asked_for(x), dropout(self._normalised(y, kind.layer_name)))
        if kind.ffn is not None:
            feed_forward = GatedFeedForward(
                **kind.ffn(config),
                **common_arguments(config),
                up_init=small_init(config.embedding_dim),
                down_init=wang_init(config.embedding_dim, config.num_blocks),
                name="ffn",
            )
            x, normed = norm(name="norm_ffn").with_skip(x)
            x = add_branch(x, dropout(self._normalised(feed_forward(normed), "ffn")))
        sow_spread(self, block_output=x)
        return x, state if context.keeps_state else None

    def _normalised(self, y: jax.Array, layer_name: str) -> jax.Array:
        """Return the results of a layer, after their norm if they have one."""
        config = self.config
        if not config.post_norm:
            return y
        return create_norm(config, KINDS[self.kind].norm(config), f"post_norm_{layer_name}")(y)


def create_norm(config: XLSTMConfig, norm: str, name: str) -> RMSNorm | LayerNorm:
    """Create a norm over all features."""
    return {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[norm](config.norm_eps, jnp.dtype(config.param_dtype), name=name)


def create_block(kind: str, config: XLSTMConfig) -> Block:
    """Create a block, bound to no module."""
    return Block(kind, config, parent=None)


def init_block_state(kind: str, config: XLSTMConfig, batch_size: int) -> PyTree:
    """Return the state of a block before the first token."""
    return KINDS[kind].init_state(config, batch_size)
