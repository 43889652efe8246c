"""The shape of a Llama language model."""

import dataclasses

import jax.numpy as jnp

from xlstm_jax.configs import ConfigDict, ConfigError, check_numbers, refuse_ignored
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.llama.attention import AttentionBackend, check_backend
from xlstm_jax.models.shared.checks import check_dtypes, check_float8, check_literals, check_parallel
from xlstm_jax.models.shared.feedforward import round_up
from xlstm_jax.models.shared.stack import RematPolicy


@dataclasses.dataclass(kw_only=True, frozen=False)
class LlamaConfig(ConfigDict):
    """Shape of a Llama language model: there are `embedding_dim / head_dim` heads."""

    vocab_size: int
    embedding_dim: int
    num_blocks: int
    head_dim: int = 128
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of query heads; `None` gives every query head its own."""
    qk_norm: bool = False
    """Normalise queries and keys of each head, with learned scales."""
    causal: bool = True
    """Whether a token sees only those before it; without it there is no decoding."""
    theta: float = 10000.0
    """Base of the wavelengths of rotary positions."""
    ffn_multiple_of: int = 64
    ffn_dim_multiplier: float = 1.0
    """The width of the feed-forward layers is 8/3 `embedding_dim` times this, rounded up to `ffn_multiple_of`."""
    ffn_dim: int | None = None
    """Width of the feed-forward layers; computed from the two fields before it if `None`."""
    use_bias: bool = False
    norm_eps: float = 1e-6
    tie_weights: bool = False
    dropout_rate: float = 0.0
    """Dropout at the end of each residual branch."""
    add_embedding_dropout: bool = False
    logits_soft_cap: float | None = None
    """Squash logits into (-cap, cap); `None` leaves them as they are."""

    attention_backend: AttentionBackend = "auto"
    """`cudnn` is fast, but needs an NVIDIA GPU and half precision; `xla` runs everywhere; `auto` takes what can run."""
    mask_across_document_boundaries: bool = False
    """Whether tokens see only their own document."""
    max_state_length: int = 2048
    """Tokens that a state can hold. More of them are an error where their number is known while tracing, that is, in
    one call or outside `jit`; elsewhere the logits of those that do not fit are NaN."""

    dtype: str = "float32"
    """Precision of activations and of the state."""
    param_dtype: str = "float32"
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
        self._check_sizes()
        refuse_ignored(self, self.ignored_fields())
        if not 0 <= self.dropout_rate < 1:
            raise ConfigError(f"dropout_rate is {self.dropout_rate}, but must be in [0, 1).")
        if self.add_embedding_dropout and self.dropout_rate == 0:
            raise ConfigError("add_embedding_dropout does nothing with dropout_rate 0: set a rate, or leave it off.")
        if self.logits_soft_cap is not None and self.logits_soft_cap <= 0:
            raise ConfigError(f"logits_soft_cap is {self.logits_soft_cap}, but must be positive, or None for no cap.")
        check_literals(self)
        check_float8(self)
        check_dtypes(self, ("dtype", "param_dtype", "head_dtype"))
        check_parallel(self.parallel)
        check_backend(self.attention_backend, jnp.dtype(self.dtype), self.head_dim)

    def _check_sizes(self) -> None:
        positive = ("vocab_size", "embedding_dim", "num_blocks", "head_dim", "num_kv_heads", "ffn_multiple_of")
        positive += ("ffn_dim_multiplier", "ffn_dim", "max_state_length", "loss_chunk_size", "theta", "norm_eps")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}, but must be positive.")
        if self.embedding_dim % self.head_dim:
            raise ConfigError(f"embedding_dim {self.embedding_dim} is no multiple of head_dim {self.head_dim}.")
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim is {self.head_dim}, but must be even: rotary positions turn pairs of features."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_kv_heads {self.kv_heads} does not divide the {self.num_heads} heads that embedding_dim "
                f"{self.embedding_dim} and head_dim {self.head_dim} give."
            )

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect beside the others, by name."""
        return (
            {} if self.ffn_dim is None else dict.fromkeys(("ffn_multiple_of", "ffn_dim_multiplier"), "beside ffn_dim")
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each block: there is one."""
        return ("transformer",) * self.num_blocks

    @property
    def num_heads(self) -> int:
        """The number of heads of queries."""
        return self.embedding_dim // self.head_dim

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_hidden_dim(self) -> int:
        """The width of the feed-forward layers."""
        return self.ffn_dim or round_up(8 * self.embedding_dim * self.ffn_dim_multiplier / 3, self.ffn_multiple_of)
