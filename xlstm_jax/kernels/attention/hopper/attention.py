"""Attention within documents on Hopper GPUs: matmuls in bfloat16, softmax in float32, memory of O(length)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from xlstm_jax.kernels.attention.hopper.key_gradients import compute_key_gradients
from xlstm_jax.kernels.attention.hopper.outputs import compute_outputs, compute_query_gradients
from xlstm_jax.kernels.attention.hopper.tiling import Tiling
from xlstm_jax.kernels.shared.remat_names import keep


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def mosaic_attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    starts: Int[Array, "b s"],
    ends: Int[Array, "b s"],
    tiling: Tiling,
    scale: float,
    interpret: Any = None,
) -> Float[Array, "b s hq d"]:
    """Compute causal attention within documents of rows whose length is a multiple of 128.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16. A head of keys and values is shared by a group of neighbouring query heads.
        v: Values, bfloat16.
        starts: The start of the document of each position.
        ends: The (exclusive) end of the document of each position.
        tiling: The tiles.
        scale: The factor of the scores `q . k`; above zero.
        interpret: How to simulate a GPU on a CPU, or `None` to run on one.

    Returns:
        The attention output of each query head.
    """
    return _forward(q, k, v, starts, ends, tiling, scale, interpret)[0]


def _forward(q, k, v, starts, ends, tiling, scale, interpret):
    out, log_totals = keep(compute_outputs(q, k, v, starts, tiling.outputs, scale=scale, interpret=interpret))
    return out, (q, k, v, starts, ends, out, log_totals)


def _backward(tiling, scale, interpret, residuals, dout):
    q, k, v, starts, ends, out, log_totals = residuals
    dout = dout.astype(q.dtype)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    # Without the barrier, XLA fuses sum and transpose into one kernel, which is ten times slower for long sequences.
    delta = jnp.swapaxes(lax.optimization_barrier(delta), 1, 2)
    options = {"scale": scale, "interpret": interpret}
    dq = compute_query_gradients(q, k, v, dout, log_totals, delta, starts, tiling.query_gradients, **options)
    dk, dv = compute_key_gradients(q, k, v, dout, log_totals, delta, ends, tiling.key_gradients, **options)
    return dq, dk, dv, None, None


mosaic_attention.defvjp(_forward, _backward)
