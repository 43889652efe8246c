"""The mLSTM chunk by chunk: quadratic within a chunk, a recurrence between chunks, and an exact backward pass.

Forward     the update of the memory by each chunk, for all chunks in parallel; the memory before each chunk in a scan;
            then the outputs of all chunks in parallel. Only the sums of memories are sequential.
Backward    the memories are recomputed (cheaper than saving them), their gradients are computed in a reverse scan, then
            the gradients of all chunks in parallel. With `n` the numerator and `d` the denominator of an output, the
            gradient of `n` is `dh / d`, that of `d` is `-(dh . h) / d` where `|d|` is above its floor, and zero below.
Gates       `log_input[s]` only scales the update by `k[s]`, so its gradient is `k[s] . dk[s]`. `log_forget[t]` scales
            everything that flows from before `t` to `t` and later: the reads of queries from `t` on, minus the writes
            of keys from `t` on, plus what leaves the chunk. With strong forgetting, these sums nearly cancel, so both
            sides of each difference need the same rounding errors. The reads of a query are computed as `q . dq`, not
            as the closed form `h . dh + d dd`, because `dq` and `dk` round the same pairs of positions. The flow out of
            the chunk is the part of `k . dk` for the next memory plus the flow from the previous memory, not the memory
            times its gradient.
Stabiliser  `eps` is added in units of `exp(stabilizer)`, so the gradient of the stabiliser is `-eps (dh . h) / d`. It
            is propagated to the gates whose sum is the largest exponent.
Layout      chunks first, then batch and heads: `[n b h l ...]`.
Numerics    gates, sums and memories in float32 (float64 for such inputs); operands of matmuls in the dtype of `v`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.mlstm.gates import ChunkGates, chunk_gates
from xlstm_jax.kernels.mlstm.state import MLSTMState
from xlstm_jax.kernels.shared.materialize import materialize
from xlstm_jax.kernels.shared.remat_names import keep


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def mlstm_chunkwise(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    log_input: Float[Array, "b s h"],
    log_forget: Float[Array, "b s h"],
    state: MLSTMState,
    resets: Bool[Array, "b s"] | None,
    chunk_size: int,
    eps: float,
) -> tuple[Float[Array, "b s h v"], MLSTMState]:
    """Compute all hidden states and the last state of a sequence whose length is a multiple of `chunk_size`."""
    result, _ = _forward(q, k, v, log_input, log_forget, state, resets, chunk_size, eps)
    return result


def _forward(q, k, v, log_input, log_forget, state, resets, chunk_size, eps):
    gates = chunk_gates(log_input, log_forget, resets, state.stabilizer, chunk_size)
    q_, k_, v_ = (_chunked(x, chunk_size) for x in (q, k, v))
    dtype = state.memory.dtype
    memories, normalizers, last = _memories(k_, v_, gates, state)
    weights, _ = _weights(q_, k_, gates)
    reading = _reading(q_, gates)
    old = _dot("nbhlk,nbhkv->nbhlv", reading.astype(v.dtype), memories.astype(v.dtype), dtype)
    numerator = old + _dot("nbhlm,nbhmv->nbhlv", weights.astype(v.dtype), v_, dtype)
    denominator = jnp.sum(reading * normalizers[..., None, :], axis=-1) + jnp.sum(weights, axis=-1)
    _, divisor = _divisor(denominator, gates, eps)
    hidden, denominator = keep((_unchunked(numerator / divisor[..., None]).astype(v.dtype), denominator))
    return (hidden, last), (q, k, v, log_input, log_forget, state, resets, hidden, denominator)


def _backward(chunk_size, eps, residuals, cotangents):
    q, k, v, log_input, log_forget, state, resets, hidden, denominator = residuals
    dhidden, dlast = cotangents[0], materialize(cotangents[1])
    dtype, scale = state.memory.dtype, q.shape[-1] ** -0.5

    def stabilizers(log_input, log_forget):
        gates = chunk_gates(log_input, log_forget, resets, state.stabilizer, chunk_size)
        return gates.stabilizer, gates

    _, through_stabilizers, gates = jax.vjp(stabilizers, log_input, log_forget, has_aux=True)
    q_, k_, v_ = (_chunked(x, chunk_size) for x in (q, k, v))
    hidden, dhidden = (_chunked(x, chunk_size).astype(dtype) for x in (hidden, dhidden))
    memories, normalizers, _ = _memories(k_, v_, gates, state)

    floor, divisor = _divisor(denominator, gates, eps)
    aligned = jnp.sum(hidden * dhidden, axis=-1)
    ddenominator = jnp.where(jnp.abs(denominator) > floor, -jnp.sign(denominator) * aligned / divisor, 0.0)
    dnumerator = (dhidden / divisor[..., None]).astype(v.dtype)

    reading = _reading(q_, gates)
    from_queries = (
        _dot("nbhlk,nbhlv->nbhkv", reading.astype(v.dtype), dnumerator, dtype),
        jnp.sum(reading * ddenominator[..., None], axis=-2),
    )
    (dmemories, dnormalizers), (dmemory, dnormalizer) = _accumulate(gates.carry, from_queries, dlast[:2], reverse=True)

    weights, decay = _weights(q_, k_, gates)
    dscores = _dot("nbhlv,nbhmv->nbhlm", dnumerator, v_, dtype) + ddenominator[..., None]
    dscores = (scale * dscores * decay).astype(v.dtype)
    to_state, from_state = gates.to_state[..., None], scale * gates.from_state[..., None]
    dnew = dmemories.astype(v.dtype)
    dv = _dot("nbhlm,nbhlv->nbhmv", weights.astype(v.dtype), dnumerator, dtype)
    dv = dv + to_state * _dot("nbhlk,nbhkv->nbhlv", k_, dnew, dtype)
    dk = to_state * (_dot("nbhlv,nbhkv->nbhlk", v_, dnew, dtype) + dnormalizers[..., None, :])
    kept = _dots(k_, dk)
    dk = _dot("nbhlm,nbhlk->nbhmk", dscores, q_, dtype) + dk
    dq = _dot("nbhlv,nbhkv->nbhlk", dnumerator, memories.astype(v.dtype), dtype)
    dq = dq + ddenominator[..., None] * normalizers[..., None, :]
    dq = _dot("nbhlm,nbhmk->nbhlk", dscores, k_, dtype) + from_state * dq

    read, written = _dots(q_, dq), _dots(k_, dk)
    through = jnp.sum(memories * dmemories, axis=(-2, -1)) + jnp.sum(normalizers * dnormalizers, axis=-1)
    leaving = gates.carry * through + jnp.sum(kept, axis=-1)
    dlog_input, dlog_forget = _unchunked(written[..., None])[..., 0], _flow(read - written, leaving, gates)
    if resets is not None:
        dlog_forget = jnp.where(resets[..., None], 0.0, dlog_forget)
    through_input, through_forget = through_stabilizers(-eps * aligned / divisor)
    return (
        *(_unchunked(dx).astype(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v))),
        dlog_input + through_input,
        dlog_forget + through_forget,
        MLSTMState(dmemory, dnormalizer, jnp.zeros_like(dlast.stabilizer)),
        None,
    )


mlstm_chunkwise.defvjp(_forward, _backward)


def _dot(subscripts, a, b, dtype):
    return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


def _chunked(x, chunk_size):
    b, s, h, d = x.shape
    return jnp.transpose(x.reshape(b, s // chunk_size, chunk_size, h, d), (1, 0, 3, 2, 4))


def _unchunked(x):
    n, b, h, length, d = x.shape
    return jnp.transpose(x, (1, 0, 3, 2, 4)).reshape(b, n * length, h, d)


def _dots(x, dx):
    return jnp.sum(x.astype(dx.dtype) * dx, axis=-1)


def _reading(q, gates: ChunkGates):
    """Scale the queries by the decay of the memory before the chunk."""
    return (gates.from_state * q.shape[-1] ** -0.5)[..., None] * q.astype(gates.row.dtype)


def _weights(q, k, gates: ChunkGates):
    """Compute the weight of each position of a chunk in each output, and its decay factor from the gates."""
    decay = gates.decay()
    return _dot("nbhlk,nbhmk->nbhlm", q, k, decay.dtype) * q.shape[-1] ** -0.5 * decay, decay


def _divisor(denominator, gates: ChunkGates, eps):
    """Return the floor of the denominator's magnitude, and the divisor of the numerators."""
    floor = jnp.exp(-gates.stabilizer)
    return floor, jnp.maximum(jnp.abs(denominator), floor) + eps


def _memories(k, v, gates: ChunkGates, state: MLSTMState):
    """Compute the memory and the normaliser before each chunk, and the state after the last chunk."""
    dtype = state.memory.dtype
    weighted = gates.to_state[..., None] * k.astype(dtype)
    new = _dot("nbhlk,nbhlv->nbhkv", weighted.astype(v.dtype), v, dtype), jnp.sum(weighted, axis=-2)
    (memories, normalizers), (memory, normalizer) = _accumulate(gates.carry, new, state[:2])
    return memories, normalizers, MLSTMState(memory, normalizer, gates.stabilizer[-1, ..., -1])


def _accumulate(keep, new, first, *, reverse=False):
    """Scan `x = keep[n] * x + new[n]` over the chunks; return `x` before each chunk, and the last `x`."""

    def body(before, chunk):
        keep, new = chunk
        after = (keep.reshape(keep.shape + (1,) * (x.ndim - 2)) * x + dx for x, dx in zip(before, new, strict=True))
        return tuple(after), before

    last, befores = lax.scan(body, tuple(first), (keep, new), reverse=reverse)
    return befores, last


def _flow(net_read, leaving, gates: ChunkGates):
    """Sum the net reads from each position on within its document, and add the flow out of the chunk."""
    within = jnp.sum(jnp.where(gates.mask, net_read[..., :, None], 0.0), axis=-2)
    leaves = gates.mask[..., -1, :]
    return _unchunked((within + jnp.where(leaves, leaving[..., None], 0.0))[..., None])[..., 0]
