"""The chunkwise mLSTM on Hopper GPUs: matmuls in bfloat16, gates, sums and memories in float32, exact gradients.

Forward     plain JAX computes a few factors per position from the gates; one kernel scans the positions and stores the
            memory before each chunk; another computes the outputs of all chunks in parallel.
Backward    the same two kernels compute the gradients of the memories, in a reverse scan, and those of the values; a
            third computes those of queries and keys. With `d` the divisor of an output and `e = dh . h`, the divisor's
            gradient in units of the divisor, `delta`, is `-e` times the sign of the denominator where its magnitude is
            above the floor, and zero below. Divisors are folded into exponents, so no array is divided in memory.
Gates       as in the chunkwise form. The reads come from the kernel that computes `dq`: it rounds the same pairs of
            positions as `dk`, and the errors of both cancel in the sum over all later positions.
Segments    if batch and heads do not occupy a GPU, segments of a sequence are computed as separate sequences. A first
            pass over each segment computes its update of the memory, which gives the memory before each segment.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.mlstm.gates import ChunkGates, chunk_gates
from xlstm_jax.kernels.mlstm.hopper.outputs import compute_outputs
from xlstm_jax.kernels.mlstm.hopper.pairs import compute_pair_gradients
from xlstm_jax.kernels.mlstm.hopper.states import compute_memories
from xlstm_jax.kernels.mlstm.hopper.tiling import Tiling, num_segments
from xlstm_jax.kernels.mlstm.scans import scan
from xlstm_jax.kernels.mlstm.state import MLSTMState
from xlstm_jax.kernels.shared.materialize import materialize
from xlstm_jax.kernels.shared.remat_names import keep

LOG2_E = math.log2(math.e)


class _Rows(NamedTuple):
    """Factors of each position, computed from the gates; segments are separate sequences."""

    row: Float[Array, "b h s"]
    """The base-2 exponent of a reading position."""
    column: Float[Array, "b h s"]
    """The base-2 exponent of a written position."""
    from_memory: Float[Array, "b h s"]
    to_memory: Float[Array, "b h s"]
    floor: Float[Array, "b h s"]
    """The lower bound of the magnitude of a denominator."""
    keep: Float[Array, "b h n"]
    """The decay factor from the memory before a chunk to the memory after it."""
    documents: Float[Array, "b s"] | None
    """The index of a position's document within its chunk."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9, 10, 11))
def mlstm_mosaic(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    state: MLSTMState | None,
    resets: Bool[Array, "b s"] | None,
    tiling: Tiling,
    eps: float,
    interpret: Any,
    return_state: bool = True,
    scale: float | None = None,
) -> tuple[Float[Array, "b s h v"], MLSTMState | None]:
    """Compute all hidden states and the last state of a sequence whose length is a multiple of the chunk size.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        log_input: The logarithms of the input gates.
        log_forget: The logarithms of the forget gates.
        state: The memory before the first position; empty by default.
        resets: The positions at which documents start.
        tiling: The tiles.
        eps: Added to the denominator of the outputs.
        interpret: How to simulate a GPU on a CPU, or `None` to run on one.
        return_state: Whether to return the last state; without it, the gradients need less work.
        scale: The factor of the queries; `1/sqrt(k)` by default.
    """
    result, _ = _forward(q, k, v, log_input, log_forget, state, resets, tiling, eps, interpret, return_state, scale)
    return result


def _forward(q, k, v, log_input, log_forget, state, resets, tiling, eps, interpret, return_state, scale):
    b, s, h, qk_dim = q.shape
    scale = scale or qk_dim**-0.5
    initial = jnp.zeros((b, h), log_forget.dtype) if state is None else state.stabilizer
    gates = chunk_gates(log_input, log_forget, resets, initial, tiling.chunk_size, split_sums=False, unroll_scans=True)
    segments = num_segments(b * h, tiling, s // tiling.chunk_size)
    rows = keep(_rows(gates, segments))
    queries, keys, values = (_segmented(x, segments) for x in (q, k, v))
    memories = None  # a single chunk needs no memories
    if state is not None or return_state or s > tiling.chunk_size:
        run = functools.partial(_memories, tiling=tiling, segments=segments, interpret=interpret)
        memories = keep(run(keys, values, rows.to_memory, rows.keep, None if state is None else state[:2]))
    hidden, denominators = compute_outputs(
        queries,
        keys,
        values,
        memories,
        rows.row + math.log2(scale),
        rows.column,
        rows.from_memory * scale,
        rows.documents,
        tiling,
        floor=rows.floor,
        eps=eps,
        interpret=interpret,
    )
    hidden, denominators = keep((hidden.reshape(v.shape), denominators))
    last = None
    if return_state and memories is not None:
        memory, normalizer = (_of_segment(x, -1, segments) for x in (memories.last, memories.last_normalizer))
        last = MLSTMState(memory, normalizer, gates.stabilizer[-1, ..., -1])
    has_state = None if state is None else ()  # an empty tuple, not an array, so that this is static
    return (hidden, last), (q, k, v, has_state, resets, rows, memories, hidden, denominators)


def _backward(tiling, eps, interpret, return_state, scale, residuals, cotangents):
    q, k, v, has_state, resets, rows, memories, hidden, denominators = residuals
    dhidden, dlast = cotangents[0].astype(v.dtype), materialize(cotangents[1])
    b, _, h, qk_dim = q.shape
    segments, scale = rows.row.shape[0] // b, scale or qk_dim**-0.5
    aligned = jnp.sum(hidden.astype(jnp.float32) * dhidden.astype(jnp.float32), axis=-1)
    # Without the barrier, XLA fuses sum and transpose into one kernel, which is ten times slower for long sequences.
    aligned = jnp.swapaxes(_segmented(lax.optimization_barrier(aligned), segments), 1, 2)
    size = jnp.abs(denominators)
    divisor = jnp.maximum(size, rows.floor) + eps
    delta = jnp.where(size > rows.floor, -jnp.sign(denominators) * aligned, 0.0)
    reading = rows.row + math.log2(scale) - jnp.log2(divisor)
    from_memory = rows.from_memory * scale / divisor

    queries, keys, values, dhidden = (_segmented(x, segments) for x in (q, k, v, dhidden))
    dmemories = None
    if memories is not None:
        dmemories = _memories(
            queries,
            dhidden,
            from_memory,
            rows.keep,
            dlast[:2] if return_state else None,
            from_memory * delta,
            tiling=tiling,
            segments=segments,
            interpret=interpret,
            backwards=True,
        )
    dv, _ = compute_outputs(
        keys,
        queries,
        dhidden,
        dmemories,
        rows.column,
        reading,
        rows.to_memory,
        rows.documents,
        tiling,
        anticausal=True,
        interpret=interpret,
    )
    dq, q_dq, dk, k_dk = compute_pair_gradients(
        queries,
        keys,
        values,
        dhidden,
        memories,
        dmemories,
        reading,
        rows.column,
        from_memory,
        rows.to_memory,
        delta,
        rows.documents,
        tiling,
        interpret=interpret,
    )
    leaving = jnp.zeros((b, h), rows.row.dtype)
    if return_state and memories is not None:
        leaving = jnp.sum(_of_segment(memories.last, -1, segments) * dlast.memory, axis=(-2, -1))
        leaving = leaving + jnp.sum(_of_segment(memories.last_normalizer, -1, segments) * dlast.normalizer, axis=-1)
    dlog_forget = _flow(_whole(q_dq - k_dk, b), leaving, resets, tiling.chunk_size)
    dstate = None
    if has_state is not None and dmemories is not None:
        first, first_normalizer = (_of_segment(x, 0, segments) for x in (dmemories.last, dmemories.last_normalizer))
        dstate = MLSTMState(first, first_normalizer, jnp.zeros((b, h), first.dtype))
    return (
        dq.reshape(q.shape),
        dk.reshape(k.shape),
        dv.reshape(v.shape),
        jnp.swapaxes(_whole(k_dk, b), 1, 2),
        dlog_forget,
        dstate,
        None,
    )


mlstm_mosaic.defvjp(_forward, _backward)


def _memories(
    keys, values, weights, keep, first, normalizer_weights=None, *, tiling, segments, interpret, backwards=False
):
    """Compute all memories. The memory before a segment is the sum of the decayed updates by earlier segments."""
    run = functools.partial(
        compute_memories,
        keys,
        values,
        weights,
        keep,
        tiling,
        normalizer_weights=normalizer_weights,
        backwards=backwards,
        interpret=interpret,
    )
    if segments == 1:
        return run(first=first)
    separate = run(last_only=True)

    def by_segment(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(-1, segments, *x.shape[1:]), 1, 0)

    written = by_segment(separate.last), by_segment(separate.last_normalizer)
    kept = by_segment(jnp.prod(keep, axis=-1))
    memory, normalizer = (jnp.zeros_like(x[0]) for x in written) if first is None else first
    firsts = {}
    for segment in range(segments)[:: -1 if backwards else 1]:
        firsts[segment] = memory, normalizer
        memory = kept[segment][..., None, None] * memory + written[0][segment]
        normalizer = kept[segment][..., None] * normalizer + written[1][segment]

    def joined(index: int) -> jax.Array:
        x = jnp.stack([firsts[segment][index] for segment in range(segments)], axis=1)
        return x.reshape(-1, *x.shape[2:])

    return run(first=(joined(0), joined(1)))


def _rows(gates: ChunkGates, segments: int) -> _Rows:
    def flat(x: jax.Array) -> jax.Array:
        n, b, h, length = x.shape
        x = x.reshape(segments, n // segments, b, h, length)
        return jnp.transpose(x, (2, 0, 3, 1, 4)).reshape(b * segments, h, -1)

    documents = None if gates.document is None else flat(gates.document.astype(jnp.float32))[:, 0]
    return _Rows(
        row=flat(gates.row) * LOG2_E,
        column=flat(gates.column) * LOG2_E,
        from_memory=flat(gates.from_state),
        to_memory=flat(gates.to_state),
        floor=flat(jnp.exp(-gates.stabilizer)),
        keep=flat(gates.carry[..., None]),
        documents=documents,
    )


def _segmented(x, segments):
    """Split sequences into segments, as separate sequences."""
    return x.reshape(x.shape[0] * segments, x.shape[1] // segments, *x.shape[2:])


def _whole(x, batch_size):
    """Merge segments into sequences; the inverse of `_segmented`."""
    segments, h = x.shape[0] // batch_size, x.shape[1]
    return jnp.swapaxes(x.reshape(batch_size, segments, h, -1), 1, 2).reshape(batch_size, h, -1)


def _of_segment(x, segment, segments):
    return x.reshape(-1, segments, *x.shape[1:])[:, segment]


def _flow(net_read, leaving, resets, chunk_size):
    """Sum the net reads from each position on within its document, and add the flow out of the sequence.

    Args:
        net_read: The reads minus the writes of each position, `[b h s]`.
        leaving: The reads after the sequence, `[b h]`.
        resets: The positions at which documents start, `[b s]`.
        chunk_size: The number of positions to sum first, before the sum over chunks.
    """
    b, h, s = net_read.shape
    net_read = net_read.reshape(b, h, s // chunk_size, chunk_size)
    documents, cuts, first_documents = None, None, net_read
    if resets is not None:
        documents = jnp.cumsum(resets.reshape(b, 1, -1, chunk_size), axis=-1, dtype=jnp.int32)
        first_documents = jnp.where(documents == 0, net_read, 0.0)
        cuts = jnp.cumsum(documents[..., -1] > 0, axis=-1, dtype=jnp.int32)
    within = scan(net_read, "sum", documents, reverse=True, unroll=True)
    # The flow out of a chunk: the reads of the first documents of later chunks, up to the next document start.
    totals = jnp.concatenate([jnp.sum(first_documents, axis=-1)[..., 1:], leaving[..., None]], axis=-1)
    leaves = scan(totals, "sum", cuts, reverse=True, unroll=True)[..., None]
    if documents is not None:
        leaves = jnp.where(documents == documents[..., -1:], leaves, 0.0)
    flow = jnp.swapaxes((within + leaves).reshape(b, h, s), 1, 2)
    return flow if resets is None else jnp.where(resets[..., None], 0.0, flow)
