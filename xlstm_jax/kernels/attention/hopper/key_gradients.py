"""Kernel of the gradients of keys and values of attention within documents.

Grid        persistent thread blocks; a work item is the keys and values of `ROWS` positions of a head. It loops over
            the tiles of queries from its own positions to the end of the document of its last one, for each query head
            that shares the head of keys.
Shapes      b batch, s positions, hq heads of queries, hk heads of keys and values, d head size, c columns of a tile;
            the first axis of `_smem` buffers is the ring stage, and `w` are the two compute warpgroups.
Rings       `items` has the resident data of a work item: keys and values, which their gradients overwrite before they
            are stored to global memory. `tiles` streams queries with `log_totals`, alternating with gradients of
            outputs with `delta`.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from xlstm_jax.kernels.attention.hopper.schedule import Schedule, WorkItem
from xlstm_jax.kernels.attention.hopper.tiling import KernelTiling
from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.launch import launch, run_once, specialize_warpgroups
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import Ring, ring_barriers
from xlstm_jax.kernels.mosaic_gpu.tiles import (
    OPERAND,
    add_matmuls,
    broadcast_rows,
    load_columns,
    load_rows,
    matmuls,
    positions,
    zeros,
)

LOG2_E = math.log2(math.e)

Gradients = tuple[jax.Array, jax.Array]
"""Accumulators of the gradients of keys and values."""


@dataclasses.dataclass(kw_only=True)
class _Refs:
    """The references of the kernel."""

    # Inputs in global memory.
    q: Ref  # [b, s, hq, d]
    k: Ref  # [b, s, hk, d]
    v: Ref
    dout: Ref  # [b, s, hq, d]
    log_totals: Ref  # [b, hq, s]
    delta: Ref
    ends: Ref  # [b, s]
    end_tiles: Ref  # [b, s / ROWS]
    full_end_tiles: Ref  # [b, s / TILE]
    # Outputs in global memory.
    dk: Ref  # [b, s, hk, d]
    dv: Ref
    # Shared memory.
    k_smem: Ref  # [stages, w, TILE, d]
    v_smem: Ref
    ends_smem: Ref  # [stages, ROWS]
    tiles_smem: Ref  # [stages, c, d]
    vectors_smem: Ref  # [stages, c]
    # Barriers.
    items_full: Ref
    items_empty: Ref
    tiles_full: Ref
    tiles_empty: Ref


class _Work(NamedTuple):
    """A work item of one compute warpgroup."""

    item: WorkItem
    warpgroup: Index
    first_tile: Index
    """The number of the first tile in the ring."""
    begin: Index
    """The range of query tiles; the next fields have those of its own positions, and the end of unmasked ones."""
    end: Index
    diagonal: Index
    full_end: Index
    row_ends: jax.Array
    k_tile: Ref
    v_tile: Ref


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel: its references and static parameters."""

    refs: _Refs
    schedule: Schedule
    tiling: KernelTiling
    group_size: int
    """Query heads per head of keys."""
    head_dim: int
    scale: float
    interpret: Interpret

    @property
    def items(self) -> Ring:
        """The ring of the resident data of work items."""
        return Ring(self.tiling.stages, self.refs.items_full, self.refs.items_empty)

    @property
    def tiles(self) -> Ring:
        """The ring of tiles."""
        return Ring(self.tiling.slots, self.refs.tiles_full, self.refs.tiles_empty)

    def __call__(self) -> None:
        """Run all work items of a thread block."""
        specialize_warpgroups(2, compute=self._compute, load=self._load)

    def _begin(self, item: WorkItem) -> Index:
        """Return the first query tile of a work item."""
        return item.part * (ROWS // self.tiling.columns)

    # The compute warpgroups.

    def _compute(self, warpgroup: Index) -> None:
        self.schedule.run(functools.partial(self._compute_item, warpgroup))
        self._finish_stores(self.schedule.num_turns - 1)
        plgpu.wait_smem_to_gmem(0)

    def _finish_stores(self, turn: Index) -> None:
        """Wait until the gradients of a work item are copied out of shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.items.release(turn)

    def _compute_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> Index:
        if self.tiling.stages == 1:
            pl.when(turn > 0)(lambda: self._finish_stores(turn - 1))
        work = self._wait_for_item(warpgroup, turn, first_tile)
        if self.tiling.stages > 1:
            pl.when(turn > 0)(lambda: self._finish_stores(turn - 1))
        gradients = zeros(TILE, self.head_dim), zeros(TILE, self.head_dim)
        gradients = lax.fori_loop(0, self.group_size, functools.partial(self._add_head, work), gradients)
        self._store_gradients(work, gradients)
        return first_tile + self.group_size * 2 * (work.end - work.begin)

    def _wait_for_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> _Work:
        refs, item = self.refs, self.schedule.item(turn)
        end = refs.end_tiles[item.batch, item.part]
        full_end = refs.full_end_tiles[item.batch, 2 * item.part + warpgroup]
        begin = self._begin(item)
        diagonal = lax.div(item.start(warpgroup), jnp.int32(self.tiling.columns))
        stage = self.items.wait(turn)
        row_ends = load_rows(refs.ends_smem.at[stage, pl.ds(warpgroup * TILE, TILE)])
        k_tile, v_tile = refs.k_smem.at[stage, warpgroup], refs.v_smem.at[stage, warpgroup]
        return _Work(item, warpgroup, first_tile, begin, end, diagonal, full_end, row_ends, k_tile, v_tile)

    def _add_head(self, work: _Work, index: Index, gradients: Gradients) -> Gradients:
        """Add the contribution of a query head."""
        first_tile = work.first_tile + index * 2 * (work.end - work.begin)

        @pl.when(work.diagonal > work.begin)
        def _() -> None:  # the first tiles are for the other warpgroup
            for n in range(2):
                self.tiles.skip(first_tile + n)

        add = functools.partial(self._add_tile, work, first_tile)
        gradients = add(work.diagonal, gradients, masked=True)
        full = functools.partial(add, masked=False)
        gradients = lax.fori_loop(work.diagonal + 1, work.full_end, full, gradients)
        return lax.fori_loop(work.full_end, work.end, functools.partial(add, masked=True), gradients)

    def _add_tile(self, work: _Work, first_tile: Index, n: Index, gradients: Gradients, *, masked: bool) -> Gradients:
        """Add the contribution of a query tile."""
        refs, columns = self.refs, self.tiling.columns
        dk, dv = gradients
        tile = first_tile + 2 * (n - work.begin)
        stage = self.tiles.wait(tile)
        q_tile, log_totals = refs.tiles_smem.at[stage], refs.vectors_smem.at[stage]
        stage = self.tiles.wait(tile + 1)
        dout_tile, delta = refs.tiles_smem.at[stage], refs.vectors_smem.at[stage]
        scores, dweights = matmuls(
            (work.k_tile, q_tile.transpose((1, 0))), (work.v_tile, dout_tile.transpose((1, 0))), num_columns=columns
        )
        weights = jnp.exp2(scores * (self.scale * LOG2_E) - load_columns(log_totals))
        if masked:
            query = positions(n * columns, columns, 1)
            key = positions(work.item.start(work.warpgroup), columns, 0)
            mask = (query >= key) & (query < broadcast_rows(work.row_ends, columns))
            weights = jnp.where(mask, weights, 0.0)
        dscores = weights * (dweights - load_columns(delta))
        (dv,) = add_matmuls((dv,), weights.astype(jnp.bfloat16), [dout_tile], self.interpret)
        self.tiles.release(tile + 1)
        (dk,) = add_matmuls((dk,), dscores.astype(jnp.bfloat16), [q_tile], self.interpret)
        self.tiles.release(tile)
        return dk, dv

    def _store_gradients(self, work: _Work, gradients: Gradients) -> None:
        item, (dk, dv) = work.item, gradients
        work.k_tile[...] = (dk * self.scale).astype(work.k_tile.dtype)
        work.v_tile[...] = dv.astype(work.v_tile.dtype)
        plgpu.commit_smem()
        for tile, target in ((work.k_tile, self.refs.dk), (work.v_tile, self.refs.dv)):
            plgpu.copy_smem_to_gmem(tile, target.at[item.batch, item.rows(work.warpgroup), item.head])

    # The load warpgroup.

    def _load(self) -> None:
        count = self.schedule.run(self._load_item)
        if self.interpret:
            self.tiles.drain(count)
            self.items.drain(self.schedule.num_turns)

    def _load_item(self, turn: Index, first_tile: Index) -> Index:
        refs, columns, item = self.refs, self.tiling.columns, self.schedule.item(turn)
        copies: list[tuple[Any, ...]] = [
            (ref.at[item.batch, item.rows(w), item.head], buffer, w)
            for ref, buffer in ((refs.k, refs.k_smem), (refs.v, refs.v_smem))
            for w in range(2)
        ]
        copies.append((refs.ends.at[item.batch, pl.ds(item.part * ROWS, ROWS)], refs.ends_smem))
        self.items.fill(turn, *copies)
        begin = self._begin(item)
        count = refs.end_tiles[item.batch, item.part] - begin

        @pl.loop(0, self.group_size)
        def _(index: Index) -> None:
            head = item.head * self.group_size + index

            @pl.loop(0, count)
            def _(n: Index) -> None:
                rows, tile = pl.ds((begin + n) * columns, columns), first_tile + 2 * (index * count + n)
                for offset, (matrix, vector) in enumerate(((refs.q, refs.log_totals), (refs.dout, refs.delta))):
                    self.tiles.fill(
                        tile + offset,
                        (matrix.at[item.batch, rows, head], refs.tiles_smem),
                        (vector.at[item.batch, head, rows], refs.vectors_smem),
                    )

        return first_tile + self.group_size * 2 * count


def compute_key_gradients(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    dout: Float[Array, "b s hq d"],
    log_totals: Float[Array, "b hq s"],
    delta: Float[Array, "b hq s"],
    ends: Int[Array, "b s"],
    tiling: KernelTiling,
    *,
    scale: float,
    interpret: Interpret = None,
) -> tuple[Float[Array, "b s hk d"], Float[Array, "b s hk d"]]:
    """Compute the gradients of keys and values.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        dout: The gradients of the outputs, bfloat16.
        log_totals: The base-2 log-sum-exp of the scores, from `compute_outputs`.
        delta: The inner product of each output and its gradient.
        ends: The (exclusive) end of the positions that attend to each position.
        tiling: The tiles.
        scale: The factor of the scores `q . k`.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, num_heads, d = q.shape
    num_kv_heads = k.shape[2]
    schedule = Schedule(b, num_kv_heads, s)
    end_tiles, full_end_tiles = _tile_ranges(ends, tiling.columns)
    results = launch(
        lambda refs: _Kernel(refs, schedule, tiling, num_heads // num_kv_heads, d, scale, interpret)(),
        _Refs,
        name="document_attention_key_gradients",
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "dout": dout,
            "log_totals": log_totals,
            "delta": delta,
            "ends": ends,
            "end_tiles": end_tiles,
            "full_end_tiles": full_end_tiles,
        },
        outputs={"dk": jax.ShapeDtypeStruct(k.shape, k.dtype), "dv": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        scratch=_scratch(tiling, d),
        grid={"block": schedule.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    results = run_once(results)
    return results["dk"], results["dv"]


def _scratch(tiling: KernelTiling, head_dim: int) -> dict[str, Any]:
    """Return the shared memory and the barriers of a thread block."""
    rows = plgpu.SMEM((tiling.stages, 2, TILE, head_dim), jnp.bfloat16, transforms=OPERAND)
    return {
        "k_smem": rows,
        "v_smem": rows,
        "ends_smem": plgpu.SMEM((tiling.stages, ROWS), jnp.int32),
        "tiles_smem": plgpu.SMEM((tiling.slots, tiling.columns, head_dim), jnp.bfloat16, transforms=OPERAND),
        "vectors_smem": plgpu.SMEM((tiling.slots, tiling.columns), jnp.float32),
        **ring_barriers(tiling.stages, 2, 5, ("items_full", "items_empty")),
        **ring_barriers(tiling.slots, 2, 2, ("tiles_full", "tiles_empty")),
    }


def _tile_ranges(ends: Int[Array, "b s"], columns: int) -> tuple[Int[Array, "b n"], Int[Array, "b m"]]:
    """Return the end of the tiles of each work item, and of the tiles that all rows of a warpgroup attend to."""
    first_rows = jnp.arange(0, ends.shape[1], TILE)
    full_end = jnp.maximum(ends[:, ::TILE] // columns, first_rows // columns + 1)
    return (-(-ends[:, ROWS - 1 :: ROWS] // columns)).astype(jnp.int32), full_end.astype(jnp.int32)
