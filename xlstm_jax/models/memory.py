"""Bytes of activations that a training step holds, computed from the config of a model.

For `mlstm` blocks on Hopper GPUs the sums agree with the memory of whole steps measured on an H200 (see
`planning.footprint`); for the other kinds they follow from the same rules and have not been measured.
"""

import dataclasses

import jax.numpy as jnp

from xlstm_jax.kernels.cross_entropy.plain import kept_dtype
from xlstm_jax.models.blocks.activations import Placement
from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.models.shared.stack import is_scanned

GRADIENT_SHARE = 0.3
"""Gradients of a block's activations that are held at once, as a share of the activations themselves."""


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the activations of a minibatch on one device."""

    saved: int
    """What all blocks save for the backward pass."""
    working: int
    """What is held in addition while one block is recomputed and differentiated."""
    recomputed: int
    """What all blocks recompute in the backward pass, one after the other."""
    kept_logits: int
    logits_chunk: int
    """The gradients of the logits that the loss holds at once."""


def activation_memory(config: LanguageModelConfig, placement: Placement) -> ActivationMemory:
    """Compute the memory of activations.

    Args:
        config: The shape of the model; `remat`, `scan_blocks`, `keep_logits` and `loss_chunk_size` are taken from it.
        placement: The minibatch and the device.

    Returns:
        The bytes.
    """
    blocks = [block_kind(kind).activations(config, placement) for kind in config.kinds]
    scanned = is_scanned(config.kinds, config.scan_blocks)
    saved = [block.saved(config.remat_of_blocks, scanned) for block in blocks]
    working = max(
        (1 + GRADIENT_SHARE) * block.all - min(own, block.all) + block.temporaries
        for block, own in zip(blocks, saved, strict=True)
    )
    tokens, part = placement.num_tokens, config.vocab_size / placement.model_axis_size
    head = jnp.dtype(config.head_dtype)
    keeps_logits = config.keep_logits and "LMHead" not in config.parallel.remat
    return ActivationMemory(
        saved=int(tokens * sum(saved)),
        working=int(tokens * working),
        recomputed=int(tokens * sum(max(block.all - own, 0) for block, own in zip(blocks, saved, strict=True))),
        kept_logits=int(tokens * part * kept_dtype(head).itemsize) if keeps_logits else 0,
        logits_chunk=int(min(config.loss_chunk_size, tokens) * part * head.itemsize),
    )
