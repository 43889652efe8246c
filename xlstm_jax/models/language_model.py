"""The language model: tokens and a state to logits and a state, for stacks of any kinds of blocks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import MAY_CHANGE, ConfigDict, ConfigError, check_least, check_numbers, refuse_ignored
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.shared.checks import (
    check_dtypes,
    check_float8,
    check_literals,
    check_parallel,
    check_state,
    check_tokens,
)
from xlstm_jax.models.shared.norms import create_norm
from xlstm_jax.models.shared.stack import BlockStack, Context, RematPolicy, init_states, is_scanned, period
from xlstm_jax.models.shared.vocabulary import create_embedding, create_lm_head


@dataclasses.dataclass(kw_only=True, frozen=False)
class LanguageModelConfig(ConfigDict):
    """The fields that all language models have."""

    vocab_size: int
    """Number of token ids."""
    embedding_dim: int
    """Width of the residual stream."""
    num_blocks: int
    """Number of blocks."""
    tie_weights: bool = False
    """Use the embedding matrix as the projection to the vocabulary too."""
    dropout_rate: float = dataclasses.field(default=0.0, metadata=MAY_CHANGE)
    """Dropout at the end of each residual branch."""
    use_bias: bool = False
    """Whether projections have biases; gates always have."""
    norm_eps: float = 1e-6
    """Added to the variance in norms."""
    logits_soft_cap: float | None = None
    """Squash logits into (-cap, cap); `None` leaves them as they are."""

    dtype: str = dataclasses.field(default="float32", metadata=MAY_CHANGE)
    """Precision of activations."""
    param_dtype: str = dataclasses.field(default="float32", metadata=MAY_CHANGE)
    """Precision of parameters."""
    head_dtype: str = dataclasses.field(default="float32", metadata=MAY_CHANGE)
    """Precision of the projection to the vocabulary; logits are always float32."""
    float8: bool = dataclasses.field(default=False, metadata=MAY_CHANGE)
    """Whether the other projections multiply in float8, forward and backward; for Hopper GPUs and newer ones."""
    loss_chunk_size: int = dataclasses.field(default=1024, metadata=MAY_CHANGE)
    """Tokens whose logits the loss holds at once."""
    keep_logits: bool = dataclasses.field(default=False, metadata=MAY_CHANGE)
    """Whether the loss saves all logits for the backward pass, in two bytes each if `head_dtype` has two, instead of
    recomputing them."""

    scan_blocks: bool = dataclasses.field(default=True, metadata=MAY_CHANGE)
    """Scan over the blocks, which compiles faster; otherwise they are unrolled, which runs faster."""
    remat: RematPolicy = dataclasses.field(default="none", metadata=MAY_CHANGE)
    """Activations that are recomputed in the backward pass, to save memory: see `RematPolicy`."""
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig, metadata=MAY_CHANGE)
    """The mesh and the sharding of the model."""

    def __post_init__(self):
        check_numbers(self)
        self._check_sizes()
        refuse_ignored(self, self.ignored_fields())
        check_literals(self)
        check_float8(self)
        check_dtypes(self, tuple(field.name for field in dataclasses.fields(self) if field.name.endswith("dtype")))
        check_parallel(self.parallel)
        self._check_combinations()

    def _check_sizes(self) -> None:
        """Raise if a field does not have a size that a model can have. Subclasses add their own fields."""
        check_least(self, 1, "vocab_size", "embedding_dim", "num_blocks", "loss_chunk_size")
        check_positive(self, ("norm_eps",))

    def _check_combinations(self) -> None:
        """Raise if fields do not fit together. Subclasses add their own rules."""
        check_caps(self, ("logits_soft_cap",))
        if not 0 <= self.dropout_rate < 1:
            raise ConfigError(f"dropout_rate is {self.dropout_rate}, but must be in [0, 1).")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each block."""
        raise NotImplementedError(f"{type(self).__name__} has to name the kind of each block.")

    @property
    def remat_of_blocks(self) -> RematPolicy:
        """What the backward pass of blocks recomputes; blocks named in `parallel.remat` are recomputed in full."""
        return "full" if self.remat == "none" and "Block" in self.parallel.remat else self.remat

    @property
    def drops_embedding(self) -> bool:
        """Whether embeddings have dropout."""
        return False

    @property
    def head_norm(self) -> Literal["rmsnorm", "layernorm"]:
        """The norm before the projection to the vocabulary."""
        return "rmsnorm"

    def check_mesh(self) -> None:
        """Raise if the devices of the current mesh cannot share the heads of the model evenly."""


C = TypeVar("C", bound=LanguageModelConfig)


def check_positive(config: ConfigDict, names: Sequence[str]) -> None:
    """Raise if a field is not positive."""
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} is {getattr(config, name)}, but must be positive.")


def check_caps(config: ConfigDict, names: Sequence[str]) -> None:
    """Raise if a soft cap is neither positive nor `None`."""
    for name in names:
        cap = getattr(config, name)
        if cap is not None and cap <= 0:
            raise ConfigError(f"{name} is {cap}, but must be positive, or None for no cap.")


class LanguageModel(nn.Module, Generic[C]):
    """An embedding, a stack of blocks and a head.

    `model.apply(variables, tokens)` returns logits. With `state` and `return_state=True` it continues from a state and
    returns the next one too; with `targets` it returns losses instead of logits.

    Attributes:
        config: The shape of the model.
    """

    config: C

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
            pos_idx: The position of each token. By default, positions are counted from the state on, through documents.
                Only attention reads them.
            document_borders: Where documents begin: recurrent states are reset there, and attention is masked if the
                config says so.
            train: Whether dropout is on.
            state: The state before the first token; empty by default.
            return_state: Whether to return the state after the last token too.
            targets: The target of each position.
            last_only: Whether to compute the logits of the last position only, which is all that generation needs.

        Returns:
            The logits `[batch, length, vocab]` in float32. With `targets`, for each position the loss of its target and
            whether the target has the largest logit, without ever holding all logits. With `return_state`, a pair of
            these and the state.
        """
        config = self.config
        config.check_mesh()
        check_tokens(tokens, pos_idx=pos_idx, document_borders=document_borders, targets=targets)
        if last_only and targets is not None:
            raise ValueError("Losses are those of all positions: leave out targets, or last_only.")
        if state is not None:
            check_state(state, jax.eval_shape(lambda: self.init_state(tokens.shape[0])))
        held, limit = self._tokens_held(state)
        if limit is not None and (state is not None or return_state):
            _check_room(tokens.shape[1], held, limit)
        embedding = create_embedding(config)()
        x = embedding[tokens].astype(config.dtype)
        if config.drops_embedding:
            x = nn.Dropout(config.dropout_rate, deterministic=not train)(x)
        stack = BlockStack(
            config.kinds,
            lambda kind: block_kind(kind).create(config),
            config.parallel,
            config.scan_blocks,
            config.remat,
            name="block_stack",
        )
        states = init_states(config.kinds, config.scan_blocks, lambda _: None) if state is None else state
        x, states = stack(x, states, Context(document_borders, pos_idx, train, return_state, last_only))
        if held is not None and limit is not None:
            fits = held[:, None] + jnp.arange(tokens.shape[1]) < limit
            x = jnp.where(fits[:, -x.shape[1] :, None], x, jnp.nan)
        norm = functools.partial(create_norm, config.head_norm, config.norm_eps, jnp.dtype(config.param_dtype))
        head = create_lm_head(config, norm)
        result = head(x[:, -1:] if last_only else x, targets, embedding if config.tie_weights else None)
        return (result, states) if return_state else result

    def init_state(self, batch_size: int) -> PyTree:
        """Return the state before the first token; inside a mesh, that of this device's rows and heads."""
        config = self.config
        return init_states(
            config.kinds, config.scan_blocks, lambda kind: block_kind(kind).init_state(config, batch_size)
        )

    def _tokens_held(self, state: PyTree | None) -> tuple[jax.Array | None, int | None]:
        """Return how many tokens each row of a state holds and how many it can hold, if blocks have such a limit."""
        config = self.config
        kinds = period(config.kinds) if is_scanned(config.kinds, config.scan_blocks) else config.kinds
        for place, kind in enumerate(map(block_kind, kinds)):
            if kind.capacity is not None:
                limit = kind.capacity.max_tokens(config)
                if state is None:
                    return None, limit
                held = kind.capacity.num_held(state[place])
                # Scanned blocks have a leading axis of repetitions, which all hold the same number.
                return held.reshape(-1, held.shape[-1])[0], limit
        return None, None


def _check_room(num_new: int, held: jax.Array | None, limit: int) -> None:
    """Raise if a state cannot hold more tokens and their number is known: inside `jit` it is not."""
    num_held = 0 if held is None or isinstance(held, Tracer) else int(np.max(held))
    if num_held + num_new > limit:
        raise ValueError(
            f"The state holds {num_held} tokens and {num_new} more do not fit into max_state_length {limit}: raise it, "
            "or pass fewer tokens."
        )
