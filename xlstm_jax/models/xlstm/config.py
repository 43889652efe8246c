"""The shape of an xLSTM language model, and the published sizes."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal

from xlstm_jax.configs import ConfigDict, ConfigError, check_numbers, refuse_ignored
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.kernels.mlstm.api import Backend as MLSTMBackend
from xlstm_jax.kernels.slstm.api import Backend as SLSTMBackend
from xlstm_jax.models.shared.checks import check_dtypes, check_float8, check_literals, check_parallel
from xlstm_jax.models.shared.feedforward import round_up
from xlstm_jax.models.shared.stack import RematPolicy

BlockKind = Literal["mlstm", "mlstm_up", "slstm"]
BLOCK_KINDS = ("mlstm", "mlstm_up", "slstm")

_COUNTS = (
    *("vocab_size", "embedding_dim", "num_heads", "num_blocks", "ffn_round_up"),
    *("conv_kernel_size", "qkv_block_size", "chunk_size", "loss_chunk_size"),
)
FIELDS_OF_KINDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("mlstm",): (
        *("qk_dim_factor", "v_dim_factor", "qk_norm", "qk_norm_scale", "gate_soft_cap", "input_gate_bias_init"),
        *("ffn_proj_factor", "ffn_round_up", "ffn_dim"),
    ),
    ("mlstm", "mlstm_up"): ("input_gate", "cell_eps", "chunk_size", "mlstm_backend"),
    ("mlstm_up",): ("up_proj_factor", "qkv_block_size", "up_gate_soft_cap"),
    ("mlstm_up", "slstm"): ("conv_kernel_size", "paper_norm"),
    ("slstm",): ("slstm_ffn_factor", "slstm_backend"),
}
"""Which fields only blocks of some kinds read; all other fields hold for every model."""

_POSITIVE = ("norm_eps", "qk_dim_factor", "v_dim_factor", "ffn_proj_factor", "up_proj_factor", "slstm_ffn_factor")


@dataclasses.dataclass(kw_only=True, frozen=False)
class XLSTMConfig(ConfigDict):
    """Shape of an xLSTM language model.

    Blocks are of three kinds. `mlstm` is the block of xLSTM-7B: an mLSTM layer, then a gated feed-forward layer.
    `mlstm_up` and `slstm` are those of the original paper: an mLSTM between an up- and a down-projection, and an sLSTM
    with a gated feed-forward layer after it. A field that no block of the model reads has to keep its default; which
    kinds read which fields is in `FIELDS_OF_KINDS`.
    """

    vocab_size: int
    embedding_dim: int
    num_heads: int
    num_blocks: int
    block_kinds: Sequence[str] | str = "mlstm"
    """One kind for all blocks, a list with the kind of each block, or a pattern `xLSTM[a:b]`: in turn `a` blocks
    `mlstm_up` and `b` blocks `slstm`."""
    tie_weights: bool = False
    dropout_rate: float = 0.0
    embedding_dropout: bool = False
    use_bias: bool = False
    """Whether projections have biases; gates always have."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """The norm of `mlstm` blocks and before the head."""
    paper_norm: Literal["rmsnorm", "layernorm"] = "layernorm"
    """The norm of `mlstm_up` and `slstm` blocks, over all features and over those of each head."""
    post_norm: bool = False
    """Normalise what a layer returns before it is added to the residual stream, by the norm of its block."""
    norm_eps: float = 1e-6
    logits_soft_cap: float | None = 30.0
    """Squash logits into (-cap, cap); `None` leaves them as they are."""

    qk_dim_factor: float = 0.5
    """Width of queries and keys of `mlstm` blocks over that of the model."""
    v_dim_factor: float = 1.0
    """Width of values of `mlstm` blocks over that of the model."""
    gate_soft_cap: float | None = 15.0
    """Squash pre-activations of `mlstm` gates into (-cap, cap); `None` leaves them as they are."""
    input_gate: Literal["exp", "sigmoid"] = "exp"
    """Activation of the input gates of `mlstm` and `mlstm_up` blocks."""
    input_gate_bias_init: float = -10.0
    """Initial bias of the input gates of `mlstm` blocks; those of the paper draw theirs."""
    qk_norm: bool = False
    """Standardise queries and keys of each head of `mlstm` blocks."""
    qk_norm_scale: bool = False
    """Multiply what `qk_norm` returns by learned scales, one for each feature of a head and the same in all heads."""
    cell_eps: float = 1e-6
    """Added to the denominator of the mLSTM, in `mlstm` and `mlstm_up` blocks."""
    ffn_proj_factor: float = 2.667
    """Width of the feed-forward layer of `mlstm` blocks over that of the model, before it is rounded up."""
    ffn_round_up: int = 64
    """To a multiple of what the width of the feed-forward layer of `mlstm` blocks is rounded up."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer of `mlstm` blocks; computed from the two fields before it if `None`."""

    conv_kernel_size: int = 4
    """Inputs that the convolutions of `mlstm_up` and `slstm` blocks see."""
    up_proj_factor: float = 2.0
    """Width of `mlstm_up` layers over that of the model."""
    up_gate_soft_cap: float | None = None
    """Squash pre-activations of `mlstm_up` gates into (-cap, cap); `None` leaves them as they are."""
    qkv_block_size: int = 4
    """Size of the blocks of the block-diagonal projections in `mlstm_up` layers."""
    slstm_ffn_factor: float = 1.3
    """Width of the feed-forward layers of `slstm` blocks over that of the model."""

    chunk_size: int = 64
    """Positions that the chunkwise mLSTM in plain JAX, of `mlstm` and `mlstm_up` blocks, computes at once; the kernels
    for GPUs have sizes of their own."""
    mlstm_backend: MLSTMBackend = "auto"
    slstm_backend: SLSTMBackend = "auto"

    dtype: str = "float32"
    """Precision of activations."""
    param_dtype: str = "float32"
    gate_dtype: str = "float32"
    """Precision of the gate projections."""
    head_dtype: str = "float32"
    """Precision of the projection to the vocabulary; logits are always float32."""
    float8: bool = False
    """Whether the other projections multiply in float8, forwards and backwards; for Hopper GPUs and newer ones."""
    loss_chunk_size: int = 1024
    """Tokens whose logits the loss holds at once."""
    keep_logits: bool = False
    """Whether the loss keeps all logits for the backward pass, in two bytes each if `head_dtype` has two, and does not
    compute them again."""

    scan_blocks: bool = True
    remat: RematPolicy = "none"
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)

    def __post_init__(self):
        check_numbers(self)
        self._check_numbers()
        refuse_ignored(self, self.ignored_fields())
        check_literals(self)
        check_float8(self)
        check_dtypes(self, ("dtype", "param_dtype", "gate_dtype", "head_dtype"))
        check_parallel(self.parallel)
        self._check_divisions()
        for name in ("logits_soft_cap", "gate_soft_cap", "up_gate_soft_cap"):
            cap = getattr(self, name)
            if cap is not None and cap <= 0:
                raise ConfigError(f"{name} is {cap}, but must be positive, or None for no cap.")
        if not 0 <= self.dropout_rate < 1:
            raise ConfigError(f"dropout_rate is {self.dropout_rate}, but must be in [0, 1).")
        if self.qk_norm_scale and not self.qk_norm:
            raise ConfigError("qk_norm_scale does nothing without qk_norm: set qk_norm too, or leave it off.")
        if self.embedding_dropout and self.dropout_rate == 0:
            raise ConfigError("embedding_dropout does nothing with dropout_rate 0: set a rate, or leave it off.")

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be positive.")
        if self.cell_eps < 0:
            raise ConfigError(f"cell_eps is {self.cell_eps}, but must be at least 0.")
        if self.ffn_dim is not None and self.ffn_dim < 1:
            raise ConfigError(f"ffn_dim is {self.ffn_dim}, but must be at least 1, or None to compute it.")

    def _check_divisions(self) -> None:
        for name, size in self._sizes_split_by_heads().items():
            if size < 1 or size % self.num_heads:
                fault = "leaves nothing for" if size < 1 else "is no multiple of"
                raise ConfigError(
                    f"{name} {size} {fault} num_heads {self.num_heads}: change embedding_dim {self.embedding_dim}, "
                    "num_heads or the factor between them."
                )
        if "mlstm_up" in self.kinds and self.inner_dim % self.qkv_block_size:
            raise ConfigError(f"inner_dim {self.inner_dim} is no multiple of qkv_block_size {self.qkv_block_size}.")

    def _sizes_split_by_heads(self) -> dict[str, int]:
        sizes = {
            "mlstm": {"qk_dim": self.qk_dim, "v_dim": self.v_dim},
            "mlstm_up": {"inner_dim": self.inner_dim},
            "slstm": {"embedding_dim": self.embedding_dim},
        }
        return {name: size for kind in self.kinds for name, size in sizes[kind].items()}

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect in this model, by name."""
        kinds = sorted(set(self.kinds))
        reasons = {
            name: f"in blocks of kind {', '.join(kinds)}, only in those of kind {' and '.join(readers)}"
            for readers, names in FIELDS_OF_KINDS.items()
            if not set(readers) & set(kinds)
            for name in names
        }
        if self.ffn_dim is not None:
            reasons |= dict.fromkeys(("ffn_proj_factor", "ffn_round_up"), "beside ffn_dim")
        if self.mlstm_backend not in ("auto", "chunkwise"):
            reasons |= {"chunk_size": f"with mlstm_backend {self.mlstm_backend!r}, only with 'chunkwise'"}
        return reasons

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each block."""
        if isinstance(self.block_kinds, str):
            match = re.fullmatch(r"xLSTM\[(\d+):(\d+)\]", self.block_kinds)
            pattern = ("mlstm_up",) * int(match[1]) + ("slstm",) * int(match[2]) if match else (self.block_kinds,)
        else:
            pattern = tuple(self.block_kinds)
        unknown = [kind for kind in pattern if kind not in BLOCK_KINDS]
        if unknown or not pattern:
            raise ConfigError(
                f"block_kinds is {self.block_kinds!r}, but must be of the kinds {', '.join(BLOCK_KINDS)}, or a pattern "
                "such as 'xLSTM[7:1]'."
            )
        repetitions, rest = divmod(self.num_blocks, len(pattern))
        is_list = not isinstance(self.block_kinds, str)
        if rest or (is_list and repetitions != 1):
            raise ConfigError(
                f"num_blocks is {self.num_blocks}, but block_kinds {self.block_kinds!r} has {len(pattern)}."
            )
        return pattern * repetitions

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
        """The width of the feed-forward layer of `mlstm` blocks."""
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
