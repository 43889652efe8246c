"""The config of Llama language models."""

import dataclasses

from xlstm_jax.configs import MAY_CHANGE, ConfigError
from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.language_model import LanguageModelConfig, check_positive
from xlstm_jax.models.llama.attention import AttentionBackend
from xlstm_jax.models.llama.layer import AttentionShape
from xlstm_jax.models.shared.feedforward import round_up


@dataclasses.dataclass(kw_only=True, frozen=False)
class LlamaConfig(LanguageModelConfig):
    """Shape of a Llama language model: there are `embedding_dim / head_dim` heads."""

    head_dim: int = 128
    """Features of each attention head."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of query heads; `None` gives every query head its own."""
    qk_norm: bool = False
    """Normalise queries and keys of each head, with learned scales."""
    causal: bool = True
    """Whether a token attends only to those before it; without it there is no decoding."""
    theta: float = 10000.0
    """Base of the wavelengths of rotary positions."""
    ffn_multiple_of: int = 64
    """The width of the feed-forward layers is rounded up to a multiple of this."""
    ffn_dim_multiplier: float = 1.0
    """The width of the feed-forward layers is 8/3 `embedding_dim` times this, rounded up to `ffn_multiple_of`."""
    ffn_dim: int | None = None
    """Width of the feed-forward layers; computed from the two fields above if `None`."""
    add_embedding_dropout: bool = dataclasses.field(default=False, metadata=MAY_CHANGE)
    """Apply dropout to the embeddings too."""

    attention_backend: AttentionBackend = dataclasses.field(default="auto", metadata=MAY_CHANGE)
    """`cudnn` is fast, but needs an NVIDIA GPU and half precision; `xla` runs everywhere; `auto` takes what can run."""
    mask_across_document_boundaries: bool = False
    """Whether tokens attend only to their own document."""
    max_state_length: int = dataclasses.field(default=2048, metadata=MAY_CHANGE)
    """Tokens that a state can hold. More of them are an error where their number is known while tracing, that is, in
    one call or outside `jit`; elsewhere the logits of those that do not fit are NaN."""

    def _check_sizes(self) -> None:
        super()._check_sizes()
        positive = ["head_dim", "ffn_multiple_of", "ffn_dim_multiplier", "max_state_length", "theta"]
        check_positive(self, positive + [n for n in ("num_kv_heads", "ffn_dim") if getattr(self, n) is not None])
        if self.embedding_dim % self.head_dim:
            raise ConfigError(f"embedding_dim {self.embedding_dim} is no multiple of head_dim {self.head_dim}.")
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_kv_heads {self.kv_heads} does not divide the {self.num_heads} heads that embedding_dim "
                f"{self.embedding_dim} and head_dim {self.head_dim} give."
            )

    def _check_combinations(self) -> None:
        super()._check_combinations()
        if self.add_embedding_dropout and self.dropout_rate == 0:
            raise ConfigError("add_embedding_dropout does nothing with dropout_rate 0: set a rate, or leave it off.")
        for kind in dict.fromkeys(self.kinds):
            block_kind(kind).check(self)

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
    def drops_embedding(self) -> bool:
        """Whether embeddings have dropout."""
        return self.add_embedding_dropout

    @property
    def num_heads(self) -> int:
        """The number of heads of queries."""
        return self.embedding_dim // self.head_dim

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def attention(self) -> AttentionShape:
        """The shape of attention."""
        return AttentionShape(
            num_heads=self.num_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            theta=self.theta,
            qk_norm=self.qk_norm,
            causal=self.causal,
            masks_documents=self.mask_across_document_boundaries,
            backend=self.attention_backend,
            max_state_length=self.max_state_length,
        )

    @property
    def ffn_hidden_dim(self) -> int:
        """The width of the feed-forward layers."""
        return self.ffn_dim or round_up(8 * self.embedding_dim * self.ffn_dim_multiplier / 3, self.ffn_multiple_of)
