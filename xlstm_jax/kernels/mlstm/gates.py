"""The gates before anything else: decays and stabilisers of all positions, from the gates alone.

The stabiliser obeys `m[t] = max(m[t-1] + log_forget[t], log_input[t])`, which needs no key and no value. Once it is
known, every other form is matrix products with factors that are at most one.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

InputGate = Literal["exp", "sigmoid"]


def log_input_gate(igate: Float[Array, "..."], input_gate: InputGate) -> Float[Array, "..."]:
    """Return the logarithm of the input gate of a pre-activation."""
    return igate if input_gate == "exp" else jax.nn.log_sigmoid(igate)


def stabilizers(
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    resets: Bool[Array, "b s"] | None,
    initial: Float[Array, "b h"],
) -> Float[Array, "b s h"]:
    """Compute the stabiliser of each position. It starts anew, from the zero of an empty memory, at each reset."""
    decay, floor = log_forget, log_input
    if resets is not None:
        begins = resets[..., None]
        floor = jnp.where(begins, jnp.maximum(decay, floor), floor)
        decay = jnp.where(begins, -jnp.inf, decay)

    def then(first, second):
        return first[0] + second[0], jnp.maximum(first[1] + second[0], second[1])

    total_decay, total_floor = lax.associative_scan(then, (decay, floor), axis=1)
    return lax.stop_gradient(jnp.maximum(initial[:, None] + total_decay, total_floor))


class ChunkGates(NamedTuple):
    """What the gates say about a sequence in `n` chunks of `l` positions.

    The factor from position `s` to `t` of a chunk is `exp(row[t] + column[s])`, where `s <= t` and no document begins
    between them.
    """

    row: Float[Array, "b h n l"]
    column: Float[Array, "b h n l"]
    document: Int[Array, "b n l"] | None
    """Number of documents that began in this chunk up to here; `None` where none ever begins."""
    from_state: Float[Array, "b h n l"]
    """What is left of the memory before the chunk at each position."""
    to_state: Float[Array, "b h n l"]
    """What is left of each position in the memory after the chunk."""
    carry: Float[Array, "b h n"]
    """What is left of the memory before the chunk after it."""
    stabilizer: Float[Array, "b h n l"]

    def decay(self) -> Float[Array, "b h n l l"]:
        """Return the factors between all positions of each chunk."""
        length = self.row.shape[-1]
        mask = jnp.tril(jnp.ones((length, length), bool))
        if self.document is not None:
            mask = mask & (self.document[:, None, :, :, None] == self.document[:, None, :, None, :])
        return jnp.exp(jnp.where(mask, self.row[..., :, None] + self.column[..., None, :], -jnp.inf))


def chunk_gates(
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    resets: Bool[Array, "b s"] | None,
    initial: Float[Array, "b h"],
    chunk_size: int,
) -> ChunkGates:
    """Compute all factors of a sequence whose length is a multiple of `chunk_size`."""
    stabilizer = stabilizers(log_input, log_forget, resets, initial)
    document = None
    if resets is not None:
        log_forget = jnp.where(resets[..., None], 0.0, log_forget)
        document = jnp.cumsum(resets.reshape(resets.shape[0], -1, chunk_size), axis=-1)

    def chunked(x):
        b, s, h = x.shape
        return jnp.moveaxis(x.reshape(b, s // chunk_size, chunk_size, h), -1, 1)

    log_input, log_forget, stabilizer = map(chunked, (log_input, log_forget, stabilizer))
    before = jnp.concatenate([initial[..., None], stabilizer[..., :-1, -1]], axis=-1)
    after = stabilizer[..., -1]
    cumulative = jnp.cumsum(log_forget, axis=-1)
    total = cumulative[..., -1]
    from_state = jnp.exp(cumulative + before[..., None] - stabilizer)
    to_state = jnp.exp(total[..., None] - cumulative + log_input - after[..., None])
    carry = jnp.exp(total + before - after)
    if document is not None:
        last = document[..., -1:]
        from_state = jnp.where((document == 0)[:, None], from_state, 0.0)
        to_state = jnp.where((document == last)[:, None], to_state, 0.0)
        carry = jnp.where((last[..., 0] == 0)[:, None], carry, 0.0)
    row, column = cumulative - stabilizer, log_input - cumulative
    return ChunkGates(row, column, document, from_state, to_state, carry, stabilizer)
