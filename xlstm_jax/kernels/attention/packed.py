"""Attention with cuDNN's packed layout: the kernel gets the start and length of every document, and needs no mask.

JAX has a binding in a private module (`jax._src.cudnn`), which is not used here: it limits the documents of each row
instead of those of the batch, keeps a statistic for every slot and position between the passes, and up to jax 0.10 it
gives wrong offsets where keys have fewer heads than queries. The custom calls below are those that XLA hands to cuDNN.
"""

import json
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
LARGEST_OFFSET = 2**31 - 1


class Slots(NamedTuple):
    """The documents of a batch as cuDNN takes them: one slot for each, in order; slots that are left over are empty."""

    starts: Int[Array, " k+1"]
    """Where each document begins, as a position in the flattened batch; the end of the batch for empty slots."""
    lengths: Int[Array, " k"]
    slot_of: Int[Array, "b s"]
    """The slot of each position."""


def find_slots(segment_ids: Int[Array, "b s"], num_slots: int) -> Slots:
    """Give each run of equal ids in a row a slot. There must be no more of them than slots."""
    first = jnp.ones_like(segment_ids[:, :1], bool)
    borders = jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1).reshape(-1)
    slot_of = jnp.cumsum(borders, dtype=jnp.int32) - 1
    size = segment_ids.size
    at = jnp.where(borders, slot_of, num_slots + 1)
    starts = jnp.full(num_slots + 1, size, jnp.int32).at[at].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    return Slots(starts, jnp.diff(starts), slot_of.reshape(segment_ids.shape))


def packed_forward(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    slots: Slots,
    scale: float,
) -> tuple[Float[Array, "b s hq d"], Float[Array, "b hq s"]]:
    """Return the outputs of causal attention within documents and the log of the sums of its exponentials."""
    b, s, hq, d = q.shape
    num_slots = slots.lengths.shape[0]
    results = [
        jax.ShapeDtypeStruct((b, hq, s, d), q.dtype),
        jax.ShapeDtypeStruct((num_slots, hq, s), jnp.float32),
        jax.ShapeDtypeStruct((0,), jnp.uint8),
    ]
    call = jax.ffi.ffi_call(
        FORWARD,
        results,
        vmap_method="sequential",
        output_layouts=[(0, 2, 1, 3), (0, 1, 2), (0,)],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(q, num_slots // b, scale, backward=False),
    )
    out, sums, _ = call(q, k, v, *_operands(slots, q, k))
    positions = jnp.arange(b * s, dtype=jnp.int32).reshape(b, 1, s)
    slot_of = slots.slot_of[:, None]
    sums = sums[slot_of, jnp.arange(hq)[:, None], positions - slots.starts[slot_of]]
    return out.transpose(0, 2, 1, 3), sums


def packed_backward(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    slots: Slots,
    out: Float[Array, "b s hq d"],
    sums: Float[Array, "b hq s"],
    dout: Float[Array, "b s hq d"],
    scale: float,
) -> tuple[Float[Array, "b s hq d"], Float[Array, "b s hk d"], Float[Array, "b s hk d"]]:
    """Return the gradients of queries, keys and values."""
    b, s, hq, d = q.shape
    num_slots = slots.lengths.shape[0]
    at = jnp.minimum(slots.starts[:-1, None] + jnp.arange(s), b * s - 1)
    of_slots = sums[(at // s)[:, None], jnp.arange(hq)[:, None], (at % s)[:, None]]
    results = [jax.ShapeDtypeStruct((b, x.shape[2], s, d), x.dtype) for x in (q, k, v)]
    call = jax.ffi.ffi_call(
        BACKWARD,
        [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)],
        vmap_method="sequential",
        output_layouts=[*[(0, 2, 1, 3)] * 3, (0,)],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(q, num_slots // b, scale, backward=True),
    )
    *gradients, _ = call(q, k, v, of_slots, dout, out, *_operands(slots, q, k))
    dq, dk, dv = (x.transpose(0, 2, 1, 3) for x in gradients)
    return dq, dk, dv


def _operands(slots: Slots, q: jax.Array, k: jax.Array) -> list[jax.Array]:
    """Return the lengths and offsets of documents in queries and keys, in numbers from the start of the array."""
    b, num_slots = q.shape[0], slots.lengths.shape[0]
    lengths = slots.lengths.reshape(b, num_slots // b)
    # XLA reads one offset more than there are slots; it takes arrays with one more for each row.
    starts = jnp.concatenate([slots.starts, jnp.full(b - 1, math.prod(q.shape[:2]), jnp.int32)])
    starts = starts.reshape(b, num_slots // b + 1)
    return [lengths, lengths, *(starts * math.prod(x.shape[2:]) for x in (q, k))]


def _backend_config(q: jax.Array, slots_a_row: int, scale: float, *, backward: bool) -> str:
    b, s, hq, _ = q.shape
    products = {
        "bmm1_dot_dimension_numbers": ((3, 3), (2, 2)),
        "bmm2_dot_dimension_numbers": ((3, 1), (1, 2)),
    }
    if backward:
        products = {
            "bmm1_grad_gemm1_dot_dimension_numbers": ((2, 1), (1, 2)),
            "bmm1_grad_gemm2_dot_dimension_numbers": ((3, 1), (1, 2)),
            "bmm2_grad_gemm1_dot_dimension_numbers": ((2, 1), (1, 2)),
            "bmm2_grad_gemm2_dot_dimension_numbers": ((3, 3), (2, 2)),
        }
    call = {
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
            "dimensions": [str(size) for size in (b, hq, s, s)],
            "is_dynamic_dimension": [False] * 4,
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": slots_a_row,
        "is_paged_attention": False,
    }
    for name, ((left, right), (left_heads, right_heads)) in products.items():
        call[name] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", str(left_heads)],
            "rhs_batch_dimensions": ["0", str(right_heads)],
        }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": call})
