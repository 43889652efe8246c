"""Decay factors and stabilisers of all positions, computed from the gates alone.

The stabiliser `m[t] = max(m[t-1] + log_forget[t], log_input[t])` does not depend on keys and values. Given it, all
parallel forms are matmuls with factors of at most one.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from xlstm_jax.kernels.mlstm.scans import scan

GRID = 1 / 16
"""With a finer grid, sums of multiples become inexact earlier; with a coarser one, sums of remainders are larger."""

InputGate = Literal["exp", "sigmoid"]


def log_input_gate(igate: Float[Array, "..."], input_gate: InputGate) -> Float[Array, "..."]:
    """Return the logarithm of the input gate, from its pre-activation."""
    if input_gate not in get_args(InputGate):
        raise ValueError(f"input_gate is {input_gate!r}, but must be {' or '.join(get_args(InputGate))}.")
    return igate if input_gate == "exp" else jax.nn.log_sigmoid(igate)


def scaled_eps(eps: float, stabilizer: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `eps`, with the gradient that `eps exp(stabilizer)` has in units of a constant `exp(stabilizer)`."""
    return eps * (1 + (stabilizer - lax.stop_gradient(stabilizer)))


class ChunkGates(NamedTuple):
    """The decay factors of a sequence in `n` chunks of `l` positions.

    The factor from position `s` to `t` of a chunk is `exp(coarse[t] - coarse[s] + row[t] + column[s])` where the mask
    is true, else zero.
    """

    row: Float[Array, "n b h l"]
    column: Float[Array, "n b h l"]
    coarse: Float[Array, "n b h l"] | None
    """The part of the cumulative log forget gates that is a multiple of `GRID`; `None` if in `row` and `column`."""
    mask: Bool[Array, "#n #b 1 l l"]
    """True where `s <= t` and no document starts between them."""
    from_state: Float[Array, "n b h l"]
    """The decay factor from the memory before the chunk to each position."""
    to_state: Float[Array, "n b h l"]
    """The decay factor from each position to the memory after the chunk."""
    carry: Float[Array, "n b h"]
    """The decay factor from the memory before the chunk to the memory after it."""
    stabilizer: Float[Array, "n b h l"]
    """The stabiliser of each position. Only this field has a gradient through it; elsewhere it is a constant unit."""
    document: Int[Array, "n b 1 l"] | None
    """The index of each position's document within its chunk; `None` without resets."""

    def decay(self) -> Float[Array, "n b h l l"]:
        """Return the factors between all positions of each chunk."""
        exponents = self.row[..., :, None] + self.column[..., None, :]
        if self.coarse is not None:
            exponents = (self.coarse[..., :, None] - self.coarse[..., None, :]) + exponents
        return jnp.exp(jnp.where(self.mask, exponents, -jnp.inf))


def chunk_gates(
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    resets: Bool[Array, "b s"] | None,
    initial: Float[Array, "b h"],
    chunk_size: int,
    *,
    split_sums: bool = True,
    unroll_scans: bool = False,
) -> ChunkGates:
    """Compute all decay factors of a sequence.

    A factor between two positions is the exponential of a difference of two cumulative sums of `log_forget`. With
    strong forgetting within a chunk these sums are large, and a float32 sum around -40,000 has an error of 0.002.
    Therefore `log_forget` is split into a multiple of `GRID`, whose sums are exact up to a million in float32, and a
    remainder, whose sums are small.

    Args:
        log_input: The logarithms of the input gates.
        log_forget: The logarithms of the forget gates.
        resets: The positions at which documents start.
        initial: The stabiliser before the first position.
        chunk_size: The number of positions of a chunk; the sequence length must be a multiple.
        split_sums: Whether to split the sums; otherwise `coarse` is `None`, and errors in exponents are those of
            float32 sums.
        unroll_scans: The option `unroll` of `scan` for cumulative sums.
    """
    log_input, log_forget = _chunked(log_input, chunk_size), _chunked(log_forget, chunk_size)
    mask = jnp.tril(jnp.ones((chunk_size, chunk_size), bool))[None, None, None]
    floor, document, reads_state, reaches_end = log_input, None, None, None
    if resets is not None:
        begins = _chunked(resets[..., None], chunk_size)
        document = jnp.cumsum(begins, axis=-1)
        mask = mask & (document[..., :, None] == document[..., None, :])
        reads_state, reaches_end = document == 0, document == document[..., -1:]
        # A document starts with an empty memory, whose stabiliser is zero.
        floor = jnp.where(begins, jnp.maximum(log_forget, log_input), log_input)
        log_forget = jnp.where(begins, 0.0, log_forget)

    def only(condition: jax.Array | None, x: jax.Array, otherwise: float = 0.0) -> jax.Array:
        return x if condition is None else jnp.where(condition, x, otherwise)

    coarse, rest = None, log_forget
    if split_sums:
        multiple = lax.stop_gradient(jnp.round(log_forget / GRID) * GRID)
        coarse, rest = scan(multiple, "sum", unroll=unroll_scans), log_forget - multiple
    fine = scan(rest, "sum", unroll=unroll_scans)
    cumulative = fine if coarse is None else coarse + fine
    kept = only(reads_state, cumulative, -jnp.inf)
    before, with_gradient = _stabilizers(cumulative, floor, document, kept, initial, unroll_scans)
    before, stabilizer = lax.stop_gradient((before, with_gradient))
    # A memory is written in exactly the units in which the next chunk reads it: see `_carried`.
    after = jnp.concatenate([before[1:], stabilizer[-1:, ..., -1]])
    right = fine[..., -1:] - fine + log_input - after[..., None]
    if coarse is not None:
        right = (coarse[..., -1:] - coarse) + right
    from_state, to_state = jnp.exp(kept + before[..., None] - stabilizer), only(reaches_end, jnp.exp(right))
    row, column, carry = fine - stabilizer, log_input - fine, jnp.exp(kept[..., -1] + before - after)
    return ChunkGates(row, column, coarse, mask, from_state, to_state, carry, with_gradient, document)


def _stabilizers(cumulative, floor, document, kept, initial, unroll):
    """Compute the stabilisers before each chunk and of each position."""
    within = cumulative + scan(floor - cumulative, "max", document, unroll=unroll)
    crossed = None if document is None else document[..., -1] == 0
    before = _carried(initial, cumulative[..., -1], crossed, within[..., -1], unroll)
    return before, jnp.maximum(before[..., None] + kept, within)


def _carried(initial, decay, crossed, within, unroll):
    """Compute `x[0] = initial` and `x[n + 1] = max(x[n] + decay[n], within[n])`, or `within[n]` if not `crossed[n]`.

    It avoids a loop, which on a GPU would take longer than all other computations on the gates. The sum of decays
    between two chunks is a difference of cumulative sums, whose rounding error grows with the sequence. The error
    changes the units of a memory, but not its content, as long as the chunks on both sides of a border use the same
    units.
    """

    def by_chunk(first: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.concatenate([first[None], others[:-1]]), 0, -1)

    decayed = scan(by_chunk(jnp.zeros_like(initial), decay), "sum", unroll=unroll)
    cuts = None
    if crossed is not None:
        cuts = jnp.cumsum(by_chunk(jnp.zeros_like(crossed[0], jnp.int32), ~crossed), axis=-1)
    return jnp.moveaxis(decayed + scan(by_chunk(initial, within) - decayed, "max", cuts, unroll=unroll), -1, 0)


def _chunked(x, chunk_size):
    b, s, h = x.shape
    return jnp.transpose(x.reshape(b, s // chunk_size, chunk_size, h), (1, 0, 3, 2))
