"""The references of the kernel in `pairs`, their roles for each kind of gradient, and its shared memory."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from xlstm_jax.kernels.mlstm.hopper.tiling import Tiling
from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import Ref, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import ring_barriers
from xlstm_jax.kernels.mosaic_gpu.tiles import OPERAND


@dataclasses.dataclass(kw_only=True)
class PairRefs:
    """The references of the kernel."""

    # Inputs in global memory; `None` where there are no memories, or no documents.
    q: Ref  # [b, s, h, k]
    k: Ref
    v: Ref  # [b, s, h, v]
    dh: Ref
    memories: Ref  # [b, h, n, k, v]
    normalizers: Ref  # [b, h, n, k]
    dmemories: Ref
    dnormalizers: Ref
    reading: Ref  # [b, h, s], as are the next four
    written: Ref
    from_memory: Ref
    to_memory: Ref
    delta: Ref
    documents: Ref  # [b, s]
    # Outputs in global memory.
    dq: Ref  # [b, s, h, k]
    q_dq: Ref  # [b, h, s]
    dk: Ref
    k_dk: Ref
    # Shared memory; vectors per row only where they fit.
    lhs_smem: Ref  # [stages, w, v / k, TILE, k]
    tiles_smem: Ref  # [stages, TILE, k] and, in the same place, [stages, k, TILE]
    column_smem: Ref  # [stages, chunk_size], as is delta
    delta_smem: Ref
    row_smem: Ref = None  # [stages, ROWS]
    from_memory_smem: Ref = None  # [stages, ROWS]
    normalizer_smem: Ref = None  # [stages, k]
    documents_smem: Ref = None  # [stages, chunk_size]
    # Barriers.
    rest_of_lhs_full: Ref = None
    items_full: Ref
    items_empty: Ref
    tiles_full: Ref
    tiles_empty: Ref


class Role(NamedTuple):
    """The references of one kind of work item, by the letters of the module's formula."""

    anticausal: bool
    lhs: Ref
    rhs: Ref
    summed: Ref
    memories: Ref
    normalizers: Ref
    row: Ref
    column: Ref
    from_memory: Ref
    primal: Ref
    """The array whose gradient is computed."""
    gradient: Ref
    primal_gradient: Ref
    """The inner product of the primal and its gradient."""


def roles_of(refs: PairRefs) -> tuple[Role, Role]:
    """Return the roles of the references for the gradients of queries, and for those of keys."""
    queries = Role(
        anticausal=False,
        lhs=refs.dh,
        rhs=refs.v,
        summed=refs.k,
        memories=refs.memories,
        normalizers=refs.normalizers,
        row=refs.reading,
        column=refs.written,
        from_memory=refs.from_memory,
        primal=refs.q,
        gradient=refs.dq,
        primal_gradient=refs.q_dq,
    )
    keys = Role(
        anticausal=True,
        lhs=refs.v,
        rhs=refs.dh,
        summed=refs.q,
        memories=refs.dmemories,
        normalizers=refs.dnormalizers,
        row=refs.written,
        column=refs.reading,
        from_memory=refs.to_memory,
        primal=refs.k,
        gradient=refs.dk,
        primal_gradient=refs.k_dk,
    )
    return queries, keys


def scratch_of(tiling: Tiling, *, reads_memories: bool, has_documents: bool) -> dict[str, Any]:
    """Return the shared memory and the barriers of a thread block."""
    num_parts, num_slots, num_stages = tiling.v_dim // tiling.qk_dim, tiling.pair_slots, tiling.pair_stages
    per_row = plgpu.SMEM((num_stages, ROWS), jnp.float32)
    per_column = plgpu.SMEM((num_stages, tiling.chunk_size), jnp.float32)
    scratch = {
        "lhs_smem": plgpu.SMEM((num_stages, 2, num_parts, TILE, tiling.qk_dim), jnp.bfloat16, transforms=OPERAND),
        "tiles_smem": plgpu.RefUnion(
            plgpu.SMEM((num_slots, TILE, tiling.qk_dim), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((num_slots, tiling.qk_dim, TILE), jnp.bfloat16, transforms=OPERAND),
        ),
        "column_smem": per_column,
        "delta_smem": per_column,
    }
    if num_parts > 1:
        scratch["rest_of_lhs_full"] = plgpu.Barrier(num_arrivals=2 * (num_parts - 1), num_barriers=num_stages)
    num_copies = 4
    if tiling.pair_vectors_fit:
        num_copies += 1 + 2 * reads_memories + has_documents
        scratch["row_smem"] = per_row
        if reads_memories:
            scratch["from_memory_smem"] = per_row
            scratch["normalizer_smem"] = plgpu.SMEM((num_stages, tiling.qk_dim), jnp.float32)
        if has_documents:
            scratch["documents_smem"] = per_column
    scratch |= ring_barriers(num_stages, 2, num_copies, ("items_full", "items_empty"))
    return scratch | ring_barriers(num_slots, 2, names=("tiles_full", "tiles_empty"))
