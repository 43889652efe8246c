"""The gates before anything else: decays and stabilisers of all positions, from the gates alone.

The stabiliser obeys `m[t] = max(m[t-1] + log_forget[t], log_input[t])`, which needs no key and no value. Once it is
known, every other form is matrix products with factors that are at most one.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

InputGate = Literal["exp", "sigmoid"]


def log_input_gate(igate: Float[Array, "..."], input_gate: InputGate) -> Float[Array, "..."]:
    """Return the logarithm of the input gate of a pre-activation."""
    return igate if input_gate == "exp" else jax.nn.log_sigmoid(igate)


class ChunkGates(NamedTuple):
    """What the gates say about a sequence in `n` chunks of `l` positions.

    The factor from position `s` to `t` of a chunk is `exp(row[t] + column[s])` where the mask holds, else zero.
    """

    row: Float[Array, "n b h l"]
    column: Float[Array, "n b h l"]
    mask: Bool[Array, "#n #b 1 l l"]
    """Where `s <= t` and no document begins between them."""
    from_state: Float[Array, "n b h l"]
    """What is left of the memory before the chunk at each position."""
    to_state: Float[Array, "n b h l"]
    """What is left of each position in the memory after the chunk."""
    carry: Float[Array, "n b h"]
    """What is left of the memory before the chunk after it."""
    stabilizer: Float[Array, "n b h l"]

    def decay(self) -> Float[Array, "n b h l l"]:
        """Return the factors between all positions of each chunk."""
        return jnp.exp(jnp.where(self.mask, self.row[..., :, None] + self.column[..., None, :], -jnp.inf))


def chunk_gates(
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    resets: Bool[Array, "b s"] | None,
    initial: Float[Array, "b h"],
    chunk_size: int,
) -> ChunkGates:
    """Compute all factors of a sequence whose length is a multiple of `chunk_size`."""
    log_input, log_forget = _chunked(log_input, chunk_size), _chunked(log_forget, chunk_size)
    mask = earlier = jnp.tril(jnp.ones((chunk_size, chunk_size), bool))[None, None, None]
    floor, reads_state, reaches_end = log_input, None, None
    if resets is not None:
        begins = _chunked(resets[..., None], chunk_size)
        document = jnp.cumsum(begins, axis=-1)
        mask = mask & (document[..., :, None] == document[..., None, :])
        reads_state, reaches_end = document == 0, document == document[..., -1:]
        # A document starts from an empty memory, whose stabiliser is zero.
        floor = jnp.where(begins, jnp.maximum(log_forget, log_input), log_input)
        log_forget = jnp.where(begins, 0.0, log_forget)

    def only(condition: jax.Array | None, x: jax.Array, otherwise: float = 0.0) -> jax.Array:
        return x if condition is None else jnp.where(condition, x, otherwise)

    # Not jnp.cumsum: of that, XLA on CPU repeats the last step for every pair of positions.
    cumulative = jnp.sum(jnp.where(earlier, log_forget[..., None, :], 0.0), axis=-1)
    kept = only(reads_state, cumulative, -jnp.inf)
    before, stabilizer = _stabilizers(cumulative, floor, mask, kept, initial)
    left = kept + before[..., None] - stabilizer
    right = cumulative[..., -1:] - cumulative + log_input - stabilizer[..., -1:]
    from_state, to_state = jnp.exp(left), only(reaches_end, jnp.exp(right))
    row, column = cumulative - stabilizer, log_input - cumulative
    return ChunkGates(row, column, mask, from_state, to_state, from_state[..., -1], stabilizer)


def _stabilizers(cumulative, floor, mask, kept, initial):
    """Compute the stabilisers before each chunk and of each position."""
    cumulative, floor, kept, initial = lax.stop_gradient((cumulative, floor, kept, initial))
    factors = jnp.where(mask, cumulative[..., :, None] + (floor - cumulative)[..., None, :], -jnp.inf)
    within = jnp.max(factors, axis=-1)

    def body(before, chunk):
        kept, within = chunk
        return jnp.maximum(before + kept, within), before

    _, before = lax.scan(body, initial, (kept[..., -1], within[..., -1]))
    return before, jnp.maximum(before[..., None] + kept, within)


def _chunked(x, chunk_size):
    b, s, h = x.shape
    return jnp.transpose(x.reshape(b, s // chunk_size, chunk_size, h), (1, 0, 3, 2))
