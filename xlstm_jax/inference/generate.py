"""Generation: prefill of the prompt in one pass, then a decoding loop on the device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.inference.sampling import temperature_sampling

Advance = Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]]
"""Runs tokens `[batch, length]` through a model from a state; returns their logits, and the state after them."""


class _Progress(NamedTuple):
    position: jax.Array
    """The next position to sample."""
    logits: jax.Array
    """The logits to sample that position from."""
    state: PyTree
    """The state of the model before that position."""
    tokens: jax.Array
    is_valid: jax.Array
    has_ended: jax.Array


def as_rows(
    prefix_tokens: jax.typing.ArrayLike, prefix_mask: jax.typing.ArrayLike | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Check the prefixes of sequences, and return them as `[batch, length]`.

    Args:
        prefix_tokens: Tokens `[batch, length]`, or `[batch]`: one token for each sequence.
        prefix_mask: Which of the tokens are given; the same shape.

    Returns:
        The tokens and the mask.
    """
    tokens = jnp.asarray(prefix_tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"prefix_tokens are {tokens.dtype}, but tokens are integers: convert them to int32.")
    if tokens.ndim not in (1, 2):
        raise ValueError(
            f"prefix_tokens have the shape {tokens.shape}, but need [batch, length], or [batch] for one token each."
        )
    mask = None if prefix_mask is None else jnp.asarray(prefix_mask)
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(
            f"prefix_mask has the shape {mask.shape}, but prefix_tokens have {tokens.shape}: give one value a token."
        )
    if tokens.ndim == 1:
        return tokens[:, None], None if mask is None else mask[:, None]
    return tokens, mask


def generate(
    advance: Advance,
    state: PyTree,
    rng: jax.Array,
    prefix_tokens: jax.Array,
    prefix_mask: jax.Array | None = None,
    *,
    max_length: int,
    eod_token_id: int = -1,
    token_sample_fn: Callable[[jax.Array, jax.Array], jax.Array] = temperature_sampling,
    axis_names: Sequence[str] = (),
) -> tuple[jax.Array, jax.Array]:
    """Continue sequences of tokens.

    Args:
        advance: Runs the model.
        state: The state of the model before the first token.
        rng: The random key. Draws at a position depend only on the key and the position.
        prefix_tokens: The prefixes of the sequences, `[batch, length]`, or `[batch]` for one token each; the first
            token is always taken as given.
        prefix_mask: Which tokens of the prefixes are given, as booleans or as 0 and 1; the others are generated. All
            are given by default.
        max_length: The length of the sequences.
        eod_token_id: A sequence ends once this token is generated; a given one does not end it. Below 0, no sequence
            ends early.
        token_sample_fn: Chooses tokens `[batch]` from logits `[batch, vocab]` and a key.
        axis_names: Mesh axes over which the rows are sharded: devices step together until all sequences have ended.

    Returns:
        The tokens `[batch, max_length]`, zeros after the end of a sequence, and a mask of the tokens before its end.
    """
    prefix_tokens, prefix_mask = as_rows(prefix_tokens, prefix_mask)
    batch_size, prefix_length = prefix_tokens.shape
    if not 1 <= prefix_length <= max_length:
        raise ValueError(
            f"The prefix has {prefix_length} tokens, but needs at least one, for the model to start from, and at most "
            f"max_length {max_length}."
        )
    behind = ((0, 0), (0, max_length - prefix_length))
    prefix = jnp.pad(prefix_tokens, behind)
    mask = jnp.ones(prefix_tokens.shape, bool) if prefix_mask is None else jnp.asarray(prefix_mask, bool)
    is_given = jnp.pad(mask, behind)
    is_given = is_given.at[:, 0].set(True)

    def after_prefix(length: int, logits: jax.Array, state: PyTree) -> _Progress:
        taken = jnp.arange(max_length) < length
        return _Progress(
            position=jnp.asarray(length),
            logits=logits,
            state=state,
            tokens=jnp.where(taken, prefix, 0),
            is_valid=jnp.broadcast_to(taken, prefix.shape),
            has_ended=jnp.zeros(batch_size, bool),
        )

    def begin() -> _Progress:
        """Prefill with the whole prefix."""
        logits, after = advance(prefix_tokens, state)
        return after_prefix(prefix_length, logits[:, -1], after)

    def begin_empty() -> _Progress:
        """Leave the prefix to the loop; these logits are never sampled from, as the first token is given."""
        logits, _ = jax.eval_shape(advance, prefix_tokens[:, :1], state)
        return after_prefix(0, jnp.zeros((batch_size, logits.shape[-1]), logits.dtype), state)

    def goes_on(progress: _Progress) -> jax.Array:
        is_left = progress.position < max_length
        return is_left if eod_token_id < 0 else is_left & ~_on_all_devices(progress.has_ended, axis_names)

    def choose(progress: _Progress) -> _Progress:
        index = progress.position
        sampled = token_sample_fn(progress.logits, jax.random.fold_in(rng, index)).astype(prefix.dtype)
        token = jnp.where(is_given[:, index], prefix[:, index], sampled)
        token = jnp.where(progress.has_ended, 0, token)
        ends = ~is_given[:, index] & (token == eod_token_id)
        logits, after = advance(token[:, None], progress.state)
        return _Progress(
            position=index + 1,
            logits=logits[:, -1],
            state=after,
            tokens=progress.tokens.at[:, index].set(token),
            is_valid=progress.is_valid.at[:, index].set(~progress.has_ended),
            has_ended=progress.has_ended | ends,
        )

    if prefix_length == 1:
        first: Any = begin_empty()  # The loop compiles the model for one token anyway.
    elif prefix_mask is None:
        first = begin()
    else:
        first = lax.cond(_on_all_devices(mask, axis_names), begin, begin_empty)
    last = lax.while_loop(goes_on, choose, first)
    return last.tokens, last.is_valid


def _on_all_devices(condition: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Return whether a condition holds on all devices, which must all run the same number of steps."""
    holds = jnp.all(condition)
    axes = tuple(axis for axis in axis_names if axis_size(axis) > 1)
    return lax.pmin(holds.astype(jnp.int32), axes) == 1 if axes else holds
