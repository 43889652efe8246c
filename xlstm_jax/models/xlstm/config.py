"""The config of xLSTM language models, and the published sizes."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from xlstm_jax.configs import MAY_CHANGE, ConfigError, check_least
from xlstm_jax.kernels.mlstm.api import Backend as MLSTMBackend
from xlstm_jax.kernels.slstm.api import Backend as SLSTMBackend
from xlstm_jax.models.blocks.kind import block_kind, kinds_for
from xlstm_jax.models.language_model import LanguageModelConfig, check_caps, check_positive
from xlstm_jax.models.llama.attention import AttentionBackend
from xlstm_jax.models.llama.layer import AttentionShape
from xlstm_jax.models.shared.checks import check_heads
from xlstm_jax.models.shared.feedforward import round_up


@dataclasses.dataclass(kw_only=True, frozen=False)
class XLSTMConfig(LanguageModelConfig):
    """Shape of an xLSTM language model.

    `mlstm` is the block of xLSTM-7B: an mLSTM layer, then a gated feed-forward layer. `mlstm_up` and `slstm` are those
    of the original paper: an mLSTM between an up- and a down-projection, and an sLSTM followed by a gated feed-forward
    layer. `attention` is causal attention within documents with rotary positions, then a gated feed-forward layer. A
    field that no block of the model reads has to keep its default; the registry entry of each kind (`models.blocks`)
    lists the fields that only some kinds read.
    """

    num_heads: int
    """Number of heads of each block."""
    block_kinds: Sequence[str] | str = "mlstm"
    """One kind for all blocks, a list with the kind of each block, or a pattern `xLSTM[a:b]`: `a` blocks `mlstm_up` and
    `b` blocks `slstm`, repeated."""
    embedding_dropout: bool = dataclasses.field(default=False, metadata=MAY_CHANGE)
    """Apply dropout to the embeddings too."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """The norm of `mlstm` and `attention` blocks and before the head."""
    paper_norm: Literal["rmsnorm", "layernorm"] = "layernorm"
    """The norm of `mlstm_up` and `slstm` blocks, over all features and over those of each head."""
    post_norm: bool = False
    """Normalise the output of a layer before it is added to the residual stream, with the norm of its block."""
    logits_soft_cap: float | None = 30.0
    """Squash logits into (-cap, cap); `None` leaves them as they are."""

    qk_dim_factor: float = 0.5
    """Width of queries and keys of `mlstm` blocks, relative to the model's."""
    v_dim_factor: float = 1.0
    """Width of values of `mlstm` blocks, relative to the model's."""
    gate_soft_cap: float | None = 15.0
    """Squash pre-activations of `mlstm` gates into (-cap, cap); `None` leaves them as they are."""
    input_gate: Literal["exp", "sigmoid"] = "exp"
    """Activation of the input gates of `mlstm` and `mlstm_up` blocks."""
    input_gate_bias_init: float = dataclasses.field(default=-10.0, metadata=MAY_CHANGE)
    """Initial bias of the input gates of `mlstm` blocks; `mlstm_up` blocks draw theirs."""
    qk_norm: bool = False
    """Standardise queries and keys of each head of `mlstm` blocks."""
    qk_norm_scale: bool = False
    """Multiply the output of `qk_norm` by learned scales, one for each feature of a head and shared by all heads."""
    cell_eps: float = 1e-6
    """Added to the denominator of the mLSTM, in `mlstm` and `mlstm_up` blocks."""
    ffn_proj_factor: float = 2.667
    """Width of the feed-forward layer of `mlstm` and `attention` blocks relative to the model's, before it is rounded
    up."""
    ffn_round_up: int = 64
    """The width of that feed-forward layer is rounded up to a multiple of this."""
    ffn_dim: int | None = None
    """Width of that feed-forward layer; computed from the two fields above if `None`."""

    conv_kernel_size: int = 4
    """Width of the convolutions of `mlstm_up` and `slstm` blocks."""
    up_proj_factor: float = 2.0
    """Width of `mlstm_up` layers relative to the model's."""
    up_gate_soft_cap: float | None = None
    """Squash pre-activations of `mlstm_up` gates into (-cap, cap); `None` leaves them as they are."""
    qkv_block_size: int = 4
    """Size of the blocks of the block-diagonal projections in `mlstm_up` layers."""
    slstm_ffn_factor: float = 1.3
    """Width of the feed-forward layers of `slstm` blocks relative to the model's."""

    chunk_size: int = dataclasses.field(default=64, metadata=MAY_CHANGE)
    """Positions in a chunk of the chunkwise mLSTM in plain JAX, of `mlstm` and `mlstm_up` blocks; the kernels for GPUs
    choose their own."""
    mlstm_backend: MLSTMBackend = dataclasses.field(default="auto", metadata=MAY_CHANGE)
    """Implementation of the mLSTM; `auto` takes the fastest one that the device and the shapes allow."""
    slstm_backend: SLSTMBackend = dataclasses.field(default="auto", metadata=MAY_CHANGE)
    """Implementation of the sLSTM; `auto` takes the fastest one that the device and the shapes allow."""
    gate_dtype: str = dataclasses.field(default="float32", metadata=MAY_CHANGE)
    """Precision of the gate projections."""

    num_kv_heads: int | None = None
    """Heads of keys and values in `attention` blocks, each shared by a group of query heads; `None` gives every query
    head its own."""
    theta: float = 10000.0
    """Base of the wavelengths of rotary positions in `attention` blocks."""
    attention_backend: AttentionBackend = dataclasses.field(default="auto", metadata=MAY_CHANGE)
    """The kernel of `attention` blocks, as in `LlamaConfig`."""
    max_state_length: int = dataclasses.field(default=2048, metadata=MAY_CHANGE)
    """Tokens that the state of `attention` blocks can hold, as in `LlamaConfig`."""

    def _check_sizes(self) -> None:
        super()._check_sizes()
        counts = ("num_heads", "ffn_round_up", "conv_kernel_size", "qkv_block_size", "chunk_size", "max_state_length")
        check_least(self, 1, *counts)
        check_least(self, 0, "cell_eps")
        factors = ("qk_dim_factor", "v_dim_factor", "ffn_proj_factor", "up_proj_factor", "slstm_ffn_factor")
        check_positive(self, (*factors, "theta"))
        if self.ffn_dim is not None and self.ffn_dim < 1:
            raise ConfigError(f"ffn_dim is {self.ffn_dim}, but must be at least 1, or None to compute it.")
        if self.num_kv_heads is not None and self.num_kv_heads < 1:
            raise ConfigError(f"num_kv_heads is {self.num_kv_heads}, but must be at least 1, or None for num_heads.")

    def _check_combinations(self) -> None:
        super()._check_combinations()
        for kind in map(block_kind, dict.fromkeys(self.kinds)):
            self._check_divisions(kind.head_sizes(self))
            kind.check(self)
        check_caps(self, ("gate_soft_cap", "up_gate_soft_cap"))
        if self.qk_norm_scale and not self.qk_norm:
            raise ConfigError("qk_norm_scale does nothing without qk_norm: set qk_norm too, or leave it off.")
        if self.embedding_dropout and self.dropout_rate == 0:
            raise ConfigError("embedding_dropout does nothing with dropout_rate 0: set a rate, or leave it off.")

    def _check_divisions(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if size < 1 or size % self.num_heads:
                fault = "leaves nothing for" if size < 1 else "is no multiple of"
                raise ConfigError(
                    f"{name} {size} {fault} num_heads {self.num_heads}: change embedding_dim {self.embedding_dim}, "
                    "num_heads or the factor between them."
                )

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect in this model, by name."""
        kinds = sorted(set(self.kinds))
        reasons = {
            name: f"in blocks of kind {', '.join(kinds)}, only in those of kind {' and '.join(readers)}"
            for name, readers in self._readers().items()
            if not set(readers) & set(kinds)
        }
        if self.ffn_dim is not None:
            reasons |= dict.fromkeys(("ffn_proj_factor", "ffn_round_up"), "beside ffn_dim")
        if self.mlstm_backend not in ("auto", "chunkwise"):
            reasons |= {"chunk_size": f"with mlstm_backend {self.mlstm_backend!r}, only with 'chunkwise'"}
        return reasons

    def _readers(self) -> dict[str, list[str]]:
        """Return the kinds that read each field that only some kinds read."""
        readers: dict[str, list[str]] = {}
        for name in kinds_for(self):
            for field in block_kind(name).fields:
                readers.setdefault(field, []).append(name)
        return readers

    def check_mesh(self) -> None:
        """Raise unless the devices of the model axis can share all heads evenly."""
        check_heads(self.num_heads, self.parallel)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each block."""
        if isinstance(self.block_kinds, str):
            match = re.fullmatch(r"xLSTM\[(\d+):(\d+)\]", self.block_kinds)
            pattern = ("mlstm_up",) * int(match[1]) + ("slstm",) * int(match[2]) if match else (self.block_kinds,)
        else:
            pattern = tuple(self.block_kinds)
        known = kinds_for(self)
        if not pattern or not set(pattern) <= set(known):
            raise ConfigError(
                f"block_kinds is {self.block_kinds!r}, but must be of the kinds {', '.join(known)}, or a pattern such "
                "as 'xLSTM[7:1]'."
            )
        repetitions, rest = divmod(self.num_blocks, len(pattern))
        is_list = not isinstance(self.block_kinds, str)
        if rest or (is_list and repetitions != 1):
            raise ConfigError(
                f"num_blocks is {self.num_blocks}, but block_kinds {self.block_kinds!r} has {len(pattern)}."
            )
        return pattern * repetitions

    @property
    def drops_embedding(self) -> bool:
        """Whether embeddings have dropout."""
        return self.embedding_dropout

    @property
    def head_norm(self) -> Literal["rmsnorm", "layernorm"]:
        """The norm before the projection to the vocabulary."""
        return self.norm

    @property
    def attention(self) -> AttentionShape:
        """The shape of attention in `attention` blocks."""
        return AttentionShape(
            num_heads=self.num_heads,
            kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=self.embedding_dim // self.num_heads,
            theta=self.theta,
            qk_norm=False,
            causal=True,
            masks_documents=True,
            backend=self.attention_backend,
            max_state_length=self.max_state_length,
        )

    @property
    def qk_dim(self) -> int:
        """The number of features of all queries, or keys."""
        return int(self.embedding_dim * self.qk_dim_factor)

    @property
    def v_dim(self) -> int:
        """The number of features of all values."""
        return int(self.embedding_dim * self.v_dim_factor)

    @property
    def inner_dim(self) -> int:
        """The width of `mlstm_up` layers."""
        return round_up(self.embedding_dim * self.up_proj_factor, 64)

    @property
    def slstm_ffn_dim(self) -> int:
        """The width of the feed-forward layers of `slstm` blocks."""
        return round_up(self.embedding_dim * self.slstm_ffn_factor, 64)

    @property
    def ffn_hidden_dim(self) -> int:
        """The width of the feed-forward layer of `mlstm` and `attention` blocks."""
        return self.ffn_dim or round_up(self.embedding_dim * self.ffn_proj_factor, self.ffn_round_up)


SIZES: dict[str, dict[str, Any]] = {
    "xLSTM-160M": {"num_blocks": 12, "embedding_dim": 768, "num_heads": 6},
    "xLSTM-400M": {"num_blocks": 24, "embedding_dim": 1024, "num_heads": 4},
    "xLSTM-830M": {"num_blocks": 24, "embedding_dim": 1536, "num_heads": 6},
    "xLSTM-1.4B": {"num_blocks": 24, "embedding_dim": 2048, "num_heads": 8},
    "xLSTM-2.7B": {"num_blocks": 32, "embedding_dim": 2560, "num_heads": 10},
    "xLSTM-7B": {"num_blocks": 32, "embedding_dim": 4096, "num_heads": 8},
}
"""The sizes of the 7B-style family, with the vocabulary of GPT-NeoX."""


def published(name: str, **changes: Any) -> XLSTMConfig:
    """Return the config of a published size.

    Args:
        name: One of `SIZES`.
        **changes: Fields to change.

    Returns:
        The config.
    """
    if name not in SIZES:
        raise ConfigError(f"There is no published size {name!r}, only {', '.join(SIZES)}.")
    fields: dict[str, Any] = {"vocab_size": 50304} | SIZES[name] | changes
    return XLSTMConfig(**fields)
