"""Attention with cuDNN's packed layout, which takes the start and the length of each document instead of a mask.

JAX has a binding in a private module (`jax._src.cudnn`). It is not used, because it limits the documents of each row
instead of those of the whole batch, saves one statistic for every document and position for the backward pass, and up
to jax 0.10 gives wrong offsets if keys have fewer heads than queries. The calls below are those that XLA passes to
cuDNN.

cuDNN schedules work for every slot as if its document had the full length, so empty slots cost time. There are a few
slots per row, shared by the documents of all rows, and a batch with more documents takes several passes.
"""

import functools
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from xlstm_jax.kernels.shared.remat_names import keep

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
NEEDED_CAPABILITY = 9.0
LARGEST_OFFSET = 2**31 - 1
SLOTS_PER_ROW = 16
LARGEST_ROW, LARGEST_BATCH = 2**29, 2**31
"""The maximum number of elements for the slots of a row and of a batch in the backward pass, which accumulates the
gradients of queries for each slot as if its document had the length of a row. On an H200, results differed from those
with a mask by 43 % with 2^30 elements in a row. The cause is unknown; these limits are below sizes with correct
results."""

Gradients = tuple[Float[Array, "b s hq d"], Float[Array, "b s hk d"], Float[Array, "b s hk d"]]


def choose_slots(batch_size: int, length: int, num_heads: int, head_dim: int) -> int:
    """Return the number of slots per row; the packed layout needs at least two."""
    of_slot = length * num_heads * head_dim
    return min(SLOTS_PER_ROW, length, LARGEST_ROW // of_slot, LARGEST_BATCH // (batch_size * of_slot))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def packed_attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    documents: Int[Array, "b s"],
    causal: bool,
    scale: float,
    slots_per_row: int,
) -> Float[Array, "b s hq d"]:
    """Compute attention within documents.

    Args:
        q: Queries.
        k: Keys. If there are fewer heads of keys and values, each is shared by a group of neighbouring query heads.
        v: Values.
        documents: The document of each position, as numbered by `number_documents`.
        causal: Whether positions attend only to themselves and earlier ones.
        scale: The factor of the scores `q . k`.
        slots_per_row: The number of documents per row in one pass, from `choose_slots`.

    Returns:
        The attention output of each query head.
    """
    return _forward(q, k, v, documents, causal, scale, slots_per_row)[0]


def _forward(q: Any, k: Any, v: Any, documents: Any, causal: bool, scale: float, slots_per_row: int) -> Any:
    run = functools.partial(_forward_pass, q, k, v, documents, causal, scale)
    out, log_totals = keep(_in_passes(run, documents, slots_per_row))
    return out, (q, k, v, documents, out, log_totals)


def _backward(causal: bool, scale: float, slots_per_row: int, residuals: Any, dout: Any) -> Any:
    q, k, v, documents, out, log_totals = residuals
    run = functools.partial(_backward_pass, q, k, v, documents, out, log_totals, dout, causal, scale)
    return *_in_passes(run, documents, slots_per_row), None


packed_attention.defvjp(_forward, _backward)


class _Slots(NamedTuple):
    """The documents of one pass, one per slot; remaining slots are empty."""

    first: Int[Array, ""]
    """The document in the first slot."""
    starts: Int[Array, " slots"]
    """The start of each document as a position in the flattened batch; the end of the batch for empty slots."""
    lengths: Int[Array, " slots"]


def _in_passes(run: Any, documents: Int[Array, "b s"], slots_per_row: int) -> Any:
    """Return the results of `run` for all documents, in passes of as many documents as there are slots."""
    num_slots = documents.shape[0] * min(slots_per_row, documents.shape[1])
    num_documents = documents[-1, -1] + 1

    def more(carry: Any) -> Any:
        first, results = carry
        new = run(_fill_slots(documents, first, num_slots))
        # The kernel does not write the outputs of other documents.
        is_new = (documents >= first) & (documents < first + num_slots)
        choose = [_match(is_new, x) for x in results]
        return first + num_slots, tuple(map(jnp.where, choose, new, results))

    results = run(_fill_slots(documents, jnp.int32(0), num_slots))
    carry = jnp.int32(num_slots), results
    return lax.while_loop(lambda carry: carry[0] < num_documents, more, carry)[1]


def _match(is_new: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcast `[b, s]` to the axes of outputs `[b, s, h, d]` or of statistics `[b, h, s]`."""
    return is_new[:, None] if x.ndim == 3 else is_new[:, :, None, None]


def _fill_slots(documents: Int[Array, "b s"], first: Int[Array, ""], num_slots: int) -> _Slots:
    borders = first + jnp.arange(num_slots + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(documents.reshape(-1), borders, method="scan_unrolled").astype(jnp.int32)
    return _Slots(first, starts[:-1], jnp.diff(starts))


def _forward_pass(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    documents: Int[Array, "b s"],
    causal: bool,
    scale: float,
    slots: _Slots,
) -> tuple[Float[Array, "b s hq d"], Float[Array, "b hq s"]]:
    """Return the outputs and the log-sum-exp of the scores; only positions of documents in slots are valid."""
    b, s, heads, d = q.shape
    num_slots = len(slots.lengths)
    results = [
        jax.ShapeDtypeStruct((b, heads, s, d), q.dtype),
        jax.ShapeDtypeStruct((num_slots, heads, s), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),  # XLA allocates the workspace here.
    ]
    call = jax.ffi.ffi_call(
        FORWARD,
        results,
        vmap_method="sequential",
        output_layouts=[(0, 2, 1, 3), (0, 1, 2), (0,)],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(q, num_slots // b, causal, scale, FORWARD_PRODUCTS),
    )
    out, log_totals, _ = call(q, k, v, *_operands(slots, q, k))
    slot = jnp.clip(documents - slots.first, 0, num_slots - 1)
    place = jnp.arange(b * s, dtype=jnp.int32).reshape(b, s) - slots.starts[slot]
    log_totals = log_totals[slot[:, None], jnp.arange(heads)[:, None], place[:, None]]
    return out.transpose(0, 2, 1, 3), log_totals


def _backward_pass(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    documents: Int[Array, "b s"],
    out: Float[Array, "b s hq d"],
    log_totals: Float[Array, "b hq s"],
    dout: Float[Array, "b s hq d"],
    causal: bool,
    scale: float,
    slots: _Slots,
) -> Gradients:
    """Return the gradients of queries, keys and values; only positions of documents in slots are valid."""
    del documents
    b, s, heads, d = q.shape
    positions = jnp.minimum(slots.starts[:, None] + jnp.arange(s), b * s - 1)[:, None]
    of_slots = log_totals[positions // s, jnp.arange(heads)[:, None], positions % s]
    results = [jax.ShapeDtypeStruct((b, x.shape[2], s, d), x.dtype) for x in (q, k, v)]
    call = jax.ffi.ffi_call(
        BACKWARD,
        [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        vmap_method="sequential",
        output_layouts=[*[(0, 2, 1, 3)] * 3, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(q, len(slots.lengths) // b, causal, scale, BACKWARD_PRODUCTS),
    )
    *gradients, _ = call(q, k, v, of_slots, dout, out, *_operands(slots, q, k))
    dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in gradients)
    return dq, dk, dv


def _operands(slots: _Slots, q: jax.Array, k: jax.Array) -> list[jax.Array]:
    """Return the lengths of documents in queries and in keys, and their offsets in elements."""
    b, end = q.shape[0], math.prod(q.shape[:2])
    lengths = slots.lengths.reshape(b, -1)
    # There is one more offset than slots. XLA expects an array with one more for each row, and reads only the first.
    starts = jnp.concatenate([slots.starts, jnp.full(b, end, jnp.int32)]).reshape(b, -1)
    return [lengths, lengths, *(starts * math.prod(x.shape[2:]) for x in (q, k))]


# For each matmul: the contracted axes and the head axes of both operands.
FORWARD_PRODUCTS = {"bmm1": ((3, 3), (2, 2)), "bmm2": ((3, 1), (1, 2))}
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": ((2, 1), (1, 2)),
    "bmm1_grad_gemm2": ((3, 1), (1, 2)),
    "bmm2_grad_gemm1": ((2, 1), (1, 2)),
    "bmm2_grad_gemm2": ((3, 3), (2, 2)),
}


def _backend_config(q: jax.Array, slots_per_row: int, causal: bool, scale: float, products: dict[str, Any]) -> str:
    """Return the backend config of the custom call."""
    b, s, heads, _ = q.shape
    call: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
            "dimensions": [str(size) for size in (b, heads, s, s)],
            "is_dynamic_dimension": [False] * 4,
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL" if causal else "PADDING",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": slots_per_row,
        "is_paged_attention": False,
    }
    for name, ((left, right), (left_heads, right_heads)) in products.items():
        call[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", str(left_heads)],
            "rhs_batch_dimensions": ["0", str(right_heads)],
        }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": call})
