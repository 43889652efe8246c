"""Bytes of activations that a training step holds, computed from the config of a model.

The arrays of a block fall into groups that a remat policy saves or recomputes together (`stack.REMAT_POLICIES`). For
`mlstm` blocks on Hopper GPUs the sums agree with the memory of whole steps measured on an H200 (see
`planning.footprint`); for the other kinds they follow from the same rules and have not been measured.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from xlstm_jax.kernels.attention.api import LARGEST_HEAD_DIM
from xlstm_jax.kernels.attention.hopper.tiling import tiling_problem as attention_problem
from xlstm_jax.kernels.attention.packed import choose_slots
from xlstm_jax.kernels.cross_entropy.plain import kept_dtype
from xlstm_jax.kernels.mlstm.hopper.tiling import choose_tiling, tiling_problem
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.shared.stack import is_scanned
from xlstm_jax.models.xlstm.config import XLSTMConfig

GRADIENT_SHARE = 0.3
"""Gradients of a block's activations that are held at once, as a share of the activations themselves."""


class _Arrays(NamedTuple):
    """The arrays of a block, in bytes for each token."""

    inputs: int | float
    """The input of the block, which every policy saves."""
    stream: int | float
    """The residual stream between two branches."""
    projections: int | float
    """The outputs of projection matmuls."""
    cell: int | float
    """What the kernel of a cell saves."""
    operands: int | float
    """The inputs of the last matmul of each branch."""
    rest: int | float
    """Norms, convolutions and activations."""
    scanned: int | float = 0
    """What else is saved if blocks are scanned without remat: unrolled, XLA recomputes it within fusions."""
    temporaries: int | float = 0
    """What the backward pass of a cell in plain JAX holds beside the saved arrays."""

    @property
    def all(self) -> int | float:
        """All that the backward pass of one block reads."""
        return self.inputs + self.stream + self.projections + self.cell + self.operands + self.rest

    def saved(self, remat: str, is_scanned: bool) -> int | float:
        """Return what the forward pass saves under a remat policy."""
        if remat in ("full", "offload"):
            return self.inputs
        saved = self.inputs + self.stream + self.projections + self.cell
        if remat in ("norms", "none"):
            saved += self.operands
        if remat == "none":
            saved += self.rest + (self.scanned if is_scanned else 0)
        return saved


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the activations of a minibatch on one device."""

    saved: int
    """What all blocks save for the backward pass."""
    working: int
    """What is held beside it while one block is recomputed and differentiated."""
    recomputed: int
    """What all blocks recompute in the backward pass, one after the other."""
    kept_logits: int
    logits_chunk: int
    """The gradients of the logits that the loss holds at once."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """What the memory of activations depends on beside the config."""

    num_tokens: int
    """Tokens of a minibatch on one device."""
    sequence_length: int
    model_axis_size: int = 1
    is_hopper: bool = False
    """Whether the kernels for Hopper GPUs can run."""
    has_flash_attention: bool = False
    """Whether attention saves no weights, as that of cuDNN."""
    has_packed_attention: bool = False
    """Whether attention within documents needs no mask of all pairs of positions."""


def activation_memory(config: XLSTMConfig | LlamaConfig, placement: Placement) -> ActivationMemory:
    """Compute the memory of activations.

    Args:
        config: The shape of the model; `remat`, `scan_blocks`, `keep_logits` and `loss_chunk_size` are taken from it.
        placement: The minibatch and the device.

    Returns:
        The bytes.
    """
    blocks = [_ARRAYS[kind](config, placement) for kind in config.kinds]
    remat = "full" if config.remat == "none" and "Block" in config.parallel.remat else config.remat
    scanned = is_scanned(config.kinds, config.scan_blocks)
    saved = [block.saved(remat, scanned) for block in blocks]
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


def _mlstm(config: XLSTMConfig, placement: Placement) -> _Arrays:
    itemsize, parts = jnp.dtype(config.dtype).itemsize, placement.model_axis_size
    dim, ffn_dim = config.embedding_dim, config.ffn_hidden_dim / parts
    qk_dim, v_dim = config.qk_dim / parts, config.v_dim / parts
    cell, temporaries = _cell(config, placement, config.qk_dim, config.v_dim)
    return _Arrays(
        inputs=itemsize * dim,
        stream=itemsize * dim,
        projections=itemsize * (2 * qk_dim + 2 * v_dim + 2 * ffn_dim + _normed_results(config, 2)),
        cell=cell,
        operands=itemsize * (v_dim + ffn_dim),
        rest=itemsize * 2 * dim,
        scanned=itemsize * (v_dim + 3 * ffn_dim),
        temporaries=temporaries,
    )


def _mlstm_up(config: XLSTMConfig, placement: Placement) -> _Arrays:
    itemsize, dim = jnp.dtype(config.dtype).itemsize, config.embedding_dim
    inner_dim = config.inner_dim / placement.model_axis_size
    cell, temporaries = _cell(config, placement, config.inner_dim, config.inner_dim)
    qkv = 3 * inner_dim * jnp.dtype(config.gate_dtype).itemsize  # as the gates read them
    return _Arrays(
        inputs=itemsize * dim,
        stream=0,
        projections=itemsize * (2 * inner_dim + _normed_results(config, 1)),
        cell=cell,
        operands=itemsize * inner_dim,
        rest=itemsize * (dim + 6 * inner_dim) + qkv,
        temporaries=temporaries,
    )


def _slstm(config: XLSTMConfig, placement: Placement) -> _Arrays:
    itemsize, gate = jnp.dtype(config.dtype).itemsize, jnp.dtype(config.gate_dtype).itemsize
    dim, own_dim = config.embedding_dim, config.embedding_dim / placement.model_axis_size
    ffn_dim = config.slstm_ffn_dim / placement.model_axis_size
    return _Arrays(
        inputs=itemsize * dim,
        stream=itemsize * dim,
        projections=itemsize * (2 * ffn_dim + _normed_results(config, 2)),
        cell=own_dim * (gate + 4 * 6),  # hidden states; pre-activations and memories of each position in float32
        operands=itemsize * ffn_dim,
        rest=itemsize * (3 * dim + 3 * own_dim) + 4 * own_dim * gate,
    )


def _normed_results(config: XLSTMConfig, num_branches: int) -> int:
    """Count the results of branches that the backward pass of their norms reads."""
    return num_branches * config.embedding_dim if config.post_norm else 0


def _transformer(config: LlamaConfig, placement: Placement) -> _Arrays:
    itemsize, parts, dim = jnp.dtype(config.dtype).itemsize, placement.model_axis_size, config.embedding_dim
    kv_dim, ffn_dim = config.kv_heads * config.head_dim / parts, config.ffn_hidden_dim / parts
    cell, weights, temporaries = _attention(config, placement)
    return _Arrays(
        inputs=itemsize * dim,
        stream=itemsize * dim,
        projections=itemsize * (dim / parts + 2 * kv_dim + 2 * ffn_dim),
        cell=cell,
        operands=itemsize * (dim / parts + ffn_dim),
        rest=itemsize * (2 * dim + weights),
        temporaries=temporaries,
    )


def _attention(config: LlamaConfig, placement: Placement) -> tuple[float, float, float]:
    """Return what attention saves, how many weights, and what its backward pass holds beside them, for each token."""
    heads, itemsize = config.num_heads / placement.model_axis_size, jnp.dtype(config.dtype).itemsize
    backend, head_dim, length = config.attention_backend, config.head_dim, placement.sequence_length
    if backend == "xla" or not placement.has_flash_attention:
        return 0.0, heads * length, 2 * 4 * heads * length
    if not config.mask_across_document_boundaries:
        return 0.0, 0.0, 0.0
    outputs = heads * (itemsize * head_dim + 4)
    has_kernel = config.causal and config.dtype == "bfloat16" and attention_problem(head_dim) is None
    if backend != "cudnn" and placement.is_hopper and has_kernel:
        return outputs, 0.0, 4 * heads
    rows = max(placement.num_tokens // length, 1)
    slots = choose_slots(rows, length, math.ceil(heads), head_dim)
    if placement.has_packed_attention and head_dim <= LARGEST_HEAD_DIM and slots > 1:
        return outputs, 0.0, 4 * slots * heads * (head_dim + 2)
    return 0.0, 0.0, float(itemsize * length)


_ARRAYS: dict[str, Callable[..., _Arrays]] = {
    "mlstm": _mlstm,
    "mlstm_up": _mlstm_up,
    "slstm": _slstm,
    "transformer": _transformer,
}


def _cell(config: XLSTMConfig, placement: Placement, qk_dim: int, v_dim: int) -> tuple[float, float]:
    """Return what the mLSTM saves, and what its backward pass holds beside it, in bytes for each token."""
    heads = config.num_heads / placement.model_axis_size
    itemsize, k, v = jnp.dtype(config.dtype).itemsize, qk_dim // config.num_heads, v_dim // config.num_heads
    hidden = itemsize * heads * v
    if uses_hopper_kernels(config, k, v) and placement.is_hopper:
        tiling = choose_tiling(k, v, placement.sequence_length)
        memories = heads * itemsize * tiling.qk_dim * tiling.v_dim / tiling.chunk_size
        return hidden + memories + 24 * heads, memories
    chunk_size = min(config.chunk_size, placement.sequence_length)
    memories, weights = 4 * heads * k * v / chunk_size, 4 * heads * chunk_size
    return hidden + 12 * heads, 3 * memories + 3 * weights


def uses_hopper_kernels(config: XLSTMConfig, qk_dim: int, v_dim: int) -> bool:
    """Tell whether the mLSTM takes the kernels for Hopper GPUs where they can run."""
    is_free = config.mlstm_backend in ("auto", "mosaic")
    return is_free and config.dtype == "bfloat16" and tiling_problem(qk_dim, v_dim) is None
