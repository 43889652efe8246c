"""The mLSTM chunk by chunk: quadratic within a chunk, a recurrence between chunks, and an exact backward pass.

Forward     the memory before each chunk, one chunk after the other; then the outputs of all chunks at once.
Backward    the memories again (cheaper than keeping them), their gradients from the last chunk to the first, then the
            gradients of all chunks at once. With `n` the numerator and `d` the denominator of an output, the gradient
            of `n` is `dh / d`, that of `d` is `-(dh . h) / d` where `|d|` is above its floor, and zero below.
Gates       `log_input[s]` only scales what `k[s]` writes, so its gradient is `k[s] . dk[s]`. `log_forget[t]` scales all
            that flows from before `t` to `t` and after: what queries from `t` on read, less what keys from `t` on
            wrote, plus what leaves the chunk. Summed within a chunk, nothing large cancels.
Numerics    gates, sums and memories in float32 (float64 for such inputs); operands of products in the dtype of `v`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.materialize import materialize
from xlstm_jax.kernels.mlstm.gates import ChunkGates, chunk_gates
from xlstm_jax.kernels.mlstm.state import MLSTMState


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
    memories, normalizers, last = _memories(k_, v_, gates, state)
    scores, decay = _scores(q_, k_, gates)
    hidden, denominator = _outputs(q_, v_, scores * decay, memories, normalizers, gates, eps)
    hidden = _unchunked(hidden).astype(v.dtype)
    return (hidden, last), (q, k, v, log_input, log_forget, state, resets, hidden, denominator)


def _backward(chunk_size, eps, residuals, cotangents):
    q, k, v, log_input, log_forget, state, resets, hidden, denominator = residuals
    dhidden, dlast = cotangents[0], materialize(cotangents[1])
    dtype, scale = state.memory.dtype, q.shape[-1] ** -0.5
    gates = chunk_gates(log_input, log_forget, resets, state.stabilizer, chunk_size)
    q_, k_, v_, hidden, dhidden = (_chunked(x, chunk_size) for x in (q, k, v, hidden, dhidden))
    memories, normalizers, last = _memories(k_, v_, gates, state)

    floor = jnp.exp(-gates.stabilizer)
    divisor = jnp.maximum(jnp.abs(denominator), floor) + eps
    dnumerator = dhidden.astype(dtype) / divisor[..., None]
    ddenominator = -jnp.sum(dnumerator * hidden.astype(dtype), axis=-1)
    ddenominator = jnp.where(jnp.abs(denominator) > floor, jnp.sign(denominator) * ddenominator, 0.0)

    dmemories, dnormalizers, dstate = _memory_gradients(q_, dnumerator, ddenominator, gates, dlast, scale)

    dn = dnumerator.astype(v.dtype)
    scores, decay = _scores(q_, k_, gates)
    weights = (scores * decay).astype(v.dtype)
    dscores = _dot("bhnlv,bhnmv->bhnlm", dn, v_, dtype) + ddenominator[..., None]
    dscores = (dscores * decay).astype(v.dtype)
    to_state, from_state = gates.to_state[..., None], gates.from_state[..., None]
    dm = dmemories.astype(v.dtype)
    dv = _dot("bhnlm,bhnlv->bhnmv", weights, dn, dtype) + to_state * _dot("bhnlk,bhnkv->bhnlv", k_, dm, dtype)
    dk_old = _dot("bhnlv,bhnkv->bhnlk", v_, dm, dtype) + dnormalizers[..., None, :]
    dk = scale * _dot("bhnlm,bhnlk->bhnmk", dscores, q_, dtype) + to_state * dk_old
    dq_old = _dot("bhnlv,bhnkv->bhnlk", dn, memories.astype(v.dtype), dtype)
    dq_old = dq_old + ddenominator[..., None] * normalizers[..., None, :]
    dq = scale * (_dot("bhnlm,bhnmk->bhnlk", dscores, k_, dtype) + from_state * dq_old)

    read, written = jnp.sum(q_.astype(dtype) * dq, axis=-1), jnp.sum(k_.astype(dtype) * dk, axis=-1)
    after = jnp.concatenate([memories[:, :, 1:], last.memory[:, :, None]], axis=2)
    normalizer_after = jnp.concatenate([normalizers[:, :, 1:], last.normalizer[:, :, None]], axis=2)
    leaving = jnp.sum(after * dmemories, axis=(-2, -1)) + jnp.sum(normalizer_after * dnormalizers, axis=-1)
    dlog_forget = _flow_gradient(read - written, leaving, gates)
    if resets is not None:
        dlog_forget = jnp.where(resets[..., None], 0.0, dlog_forget)
    return (
        *(_unchunked(dx).astype(x.dtype) for dx, x in ((dq, q), (dk, k), (dv, v))),
        _unchunked(written[..., None])[..., 0],
        dlog_forget,
        dstate,
        None,
    )


mlstm_chunkwise.defvjp(_forward, _backward)


def _dot(subscripts, a, b, dtype):
    return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


def _chunked(x, chunk_size):
    b, s, h, d = x.shape
    return jnp.moveaxis(x.reshape(b, s // chunk_size, chunk_size, h, d), 3, 1)


def _unchunked(x):
    b, h, n, length, d = x.shape
    return jnp.moveaxis(x, 1, 3).reshape(b, n * length, h, d)


def _scores(q, k, gates: ChunkGates):
    """Compute the products of queries and keys, and the factors between their positions."""
    return _dot("bhnlk,bhnmk->bhnlm", q, k, gates.row.dtype) * q.shape[-1] ** -0.5, gates.decay()


def _outputs(q, v, weights, memories, normalizers, gates: ChunkGates, eps):
    """Read the hidden states out of the memory before each chunk and the positions of the chunk itself."""
    dtype, scaled = memories.dtype, gates.from_state * q.shape[-1] ** -0.5
    old = _dot("bhnlk,bhnkv->bhnlv", q, memories.astype(v.dtype), dtype)
    numerator = scaled[..., None] * old + _dot("bhnlm,bhnmv->bhnlv", weights.astype(v.dtype), v, dtype)
    old_sum = jnp.einsum("bhnlk,bhnk->bhnl", q.astype(dtype), normalizers)
    denominator = scaled * old_sum + jnp.sum(weights, axis=-1)
    divisor = jnp.maximum(jnp.abs(denominator), jnp.exp(-gates.stabilizer)) + eps
    return numerator / divisor[..., None], denominator


def _memories(k, v, gates: ChunkGates, state: MLSTMState):
    """Compute the memory and the normaliser before each chunk, and the state after the last."""
    dtype = state.memory.dtype
    weighted = gates.to_state[..., None] * k.astype(dtype)

    def body(carry, chunk):
        memory, normalizer = carry
        keep, weighted, v = chunk
        new = _dot("bhlk,bhlv->bhkv", weighted.astype(v.dtype), v, dtype)
        after = keep[..., None, None] * memory + new, keep[..., None] * normalizer + jnp.sum(weighted, axis=-2)
        return after, carry

    first = state.memory, state.normalizer
    (memory, normalizer), befores = lax.scan(body, first, _chunks_first(gates.carry, weighted, v))
    memories, normalizers = (jnp.moveaxis(x, 0, 2) for x in befores)
    return memories, normalizers, MLSTMState(memory, normalizer, gates.stabilizer[:, :, -1, -1])


def _memory_gradients(q, dnumerator, ddenominator, gates: ChunkGates, dlast: MLSTMState, scale):
    """Compute the gradients of the memory and the normaliser after each chunk, and of the state before the first."""
    dtype = dlast.memory.dtype
    weighted = scale * gates.from_state[..., None] * q.astype(dtype)

    def body(carry, chunk):
        dmemory, dnormalizer = carry
        keep, weighted, dnumerator, ddenominator = chunk
        operand = q.dtype
        new = _dot("bhlk,bhlv->bhkv", weighted.astype(operand), dnumerator.astype(operand), dtype)
        new_normalizer = jnp.einsum("bhlk,bhl->bhk", weighted, ddenominator)
        return (keep[..., None, None] * dmemory + new, keep[..., None] * dnormalizer + new_normalizer), carry

    last = dlast.memory, dlast.normalizer
    chunks = _chunks_first(gates.carry, weighted, dnumerator, ddenominator)
    (dmemory, dnormalizer), afters = lax.scan(body, last, chunks, reverse=True)
    dmemories, dnormalizers = (jnp.moveaxis(x, 0, 2) for x in afters)
    return dmemories, dnormalizers, MLSTMState(dmemory, dnormalizer, jnp.zeros_like(dlast.stabilizer))


def _chunks_first(*arrays):
    return tuple(jnp.moveaxis(x, 2, 0) for x in arrays)


def _flow_gradient(net_read, leaving, gates: ChunkGates):
    """Sum what is read from each position on, and add what leaves the chunk."""
    if gates.document is None:
        flow = lax.cumsum(net_read, axis=3, reverse=True) + leaving[..., None]
    else:
        same = gates.document[:, None, :, :, None] == gates.document[:, None, :, None, :]
        later = jnp.triu(jnp.ones(same.shape[-2:], bool)) & same
        leaves = gates.document == gates.document[..., -1:]
        flow = jnp.einsum("bhnm,bhnlm->bhnl", net_read, later.astype(net_read.dtype))
        flow = flow + jnp.where(leaves[:, None], leaving[..., None], 0.0)
    return _unchunked(flow[..., None])[..., 0]
