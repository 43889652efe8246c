"""Kernels of the outputs of attention within documents, and of the gradients of queries.

Grid        persistent thread blocks; a work item is the queries of `ROWS` positions of a head. It loops over the tiles
            of keys from the start of its first position's document to its own positions. Tiles in between that all
            positions of a warpgroup attend to need no mask.
Shapes      b batch, s positions, hq heads of queries, hk heads of keys and values, d head size, c columns of a tile;
            the first axis of `_smem` buffers is the ring stage, and `w` are the two compute warpgroups.
Rings       `items` has the resident data of a work item: queries, which the results overwrite before they are stored to
            global memory, and for their gradients those of the outputs. `tiles` streams keys and values, alternating.
"""

import abc
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
    load_rows,
    matmuls,
    positions,
    zeros,
)

LOG2_E = math.log2(math.e)
LOWEST, FLOOR = -1e30, -1e20
"""The value of masked scores, and the initial maximum, which is far above masked scores and below all others."""

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""The loop carry of a warpgroup over tiles: an accumulator, and two vectors with one element per row."""


@dataclasses.dataclass(kw_only=True)
class _Refs:
    """The references of the kernels; those that a kernel does not use are `None`."""

    # Inputs in global memory.
    q: Ref  # [b, s, hq, d]
    dout: Ref = None
    k: Ref  # [b, s, hk, d]
    v: Ref
    starts: Ref  # [b, s]
    begin_tiles: Ref  # [b, s / ROWS]
    full_begin_tiles: Ref  # [b, s / TILE]
    delta: Ref = None  # [b, hq, s]
    # Outputs in global memory; `log_totals` is an input of the gradients.
    result: Ref  # [b, s, hq, d]
    log_totals: Ref  # [b, hq, s]
    # Shared memory.
    q_smem: Ref  # [stages, w, TILE, d]
    dout_smem: Ref = None
    starts_smem: Ref  # [stages, ROWS]
    tiles_smem: Ref  # [stages, c, d]
    # Barriers.
    items_full: Ref
    items_empty: Ref
    tiles_full: Ref
    tiles_empty: Ref


class _Work(NamedTuple):
    """A work item of one compute warpgroup."""

    item: WorkItem
    warpgroup: Index
    stage: Index
    first_tile: Index
    """The number of the first tile in the ring."""
    begin: Index
    """The first tile of keys; the next fields have the first unmasked one, and those of its own positions."""
    full_begin: Index
    diagonal: Index
    row_starts: jax.Array


@dataclasses.dataclass(frozen=True)
class _Kernel(abc.ABC):
    """Base class of the two kernels: their references and static parameters."""

    refs: _Refs
    schedule: Schedule
    tiling: KernelTiling
    group_size: int
    """Query heads per head of keys."""
    head_dim: int
    scale: float
    interpret: Interpret

    @abc.abstractmethod
    def _start(self, work: _Work) -> Carry:
        """Return the carry before the first tile."""

    @abc.abstractmethod
    def _add_tile(self, work: _Work, n: Index, carry: Carry, *, masked: bool) -> Carry:
        """Add the contribution of a tile of keys."""

    @abc.abstractmethod
    def _result(self, work: _Work, carry: Carry) -> jax.Array:
        """Return the rows of the result."""

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

    def _diagonal(self, item: WorkItem, warpgroup: Index) -> Index:
        """Return the tile of keys at the positions of a warpgroup, the last one that it reads."""
        return lax.div(item.start(warpgroup), jnp.int32(self.tiling.columns))

    # The compute warpgroups.

    def _compute(self, warpgroup: Index) -> None:
        self.schedule.run(functools.partial(self._compute_item, warpgroup))
        self._finish_stores(self.schedule.num_turns - 1)
        plgpu.wait_smem_to_gmem(0)

    def _finish_stores(self, turn: Index) -> None:
        """Wait until the results of a work item are copied out of shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.items.release(turn)

    def _compute_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> Index:
        if self.tiling.stages == 1:
            pl.when(turn > 0)(lambda: self._finish_stores(turn - 1))
        work = self._wait_for_item(warpgroup, turn, first_tile)
        item, begin, full_begin, diagonal = work.item, work.begin, work.full_begin, work.diagonal
        carry = self._start(work)
        masked, full = (functools.partial(self._add_tile, work, masked=masked) for masked in (True, False))
        carry = lax.fori_loop(begin, full_begin, masked, carry)
        if self.tiling.stages > 1:
            pl.when(turn > 0)(lambda: self._finish_stores(turn - 1))
        carry = lax.fori_loop(full_begin, diagonal, full, carry)
        carry = masked(diagonal, carry)
        count = self._diagonal(item, 1) - begin + 1

        @pl.when(diagonal - begin + 1 < count)
        def _() -> None:  # the last tiles are for the other warpgroup
            for n in range(2):
                self.tiles.skip(first_tile + 2 * (count - 1) + n)

        result = self._result(work, carry)
        staging = self.refs.q_smem.at[work.stage, warpgroup]
        staging[...] = result.astype(staging.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, self.refs.result.at[item.batch, item.rows(warpgroup), item.head])
        return first_tile + 2 * count

    def _wait_for_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> _Work:
        refs, item = self.refs, self.schedule.item(turn)
        begin = refs.begin_tiles[item.batch, item.part]
        full_begin = refs.full_begin_tiles[item.batch, 2 * item.part + warpgroup]
        diagonal = self._diagonal(item, warpgroup)
        stage = self.items.wait(turn)
        row_starts = load_rows(refs.starts_smem.at[stage, pl.ds(warpgroup * TILE, TILE)])
        return _Work(item, warpgroup, stage, first_tile, begin, full_begin, diagonal, row_starts)

    def _mask(self, work: _Work, n: Index) -> jax.Array:
        """Return the mask of a tile: which rows attend to which columns."""
        columns = self.tiling.columns
        key = positions(n * columns, columns, 1)
        query = positions(work.item.start(work.warpgroup), columns, 0)
        return (key >= broadcast_rows(work.row_starts, columns)) & (key <= query)

    # The load warpgroup.

    def _load(self) -> None:
        count = self.schedule.run(self._load_item)
        if self.interpret:
            self.tiles.drain(count)
            self.items.drain(self.schedule.num_turns)

    def _load_item(self, turn: Index, first_tile: Index) -> Index:
        refs, columns, item = self.refs, self.tiling.columns, self.schedule.item(turn)
        kept = [(refs.q, refs.q_smem)]
        if refs.dout is not None:
            kept.append((refs.dout, refs.dout_smem))
        copies: list[tuple[Any, ...]] = [
            (ref.at[item.batch, item.rows(w), item.head], buffer, w) for ref, buffer in kept for w in range(2)
        ]
        copies.append((refs.starts.at[item.batch, pl.ds(item.part * ROWS, ROWS)], refs.starts_smem))
        self.items.fill(turn, *copies)
        begin = refs.begin_tiles[item.batch, item.part]
        count = self._diagonal(item, 1) - begin + 1
        kv_head = lax.div(item.head, jnp.int32(self.group_size))

        @pl.loop(0, count)
        def _(n: Index) -> None:
            rows = pl.ds((begin + n) * columns, columns)
            for offset, ref in enumerate((refs.k, refs.v)):
                self.tiles.fill(first_tile + 2 * n + offset, (ref.at[item.batch, rows, kv_head], refs.tiles_smem))

        return first_tile + 2 * count


class _OutputsKernel(_Kernel):
    """Flash attention: the carry is the unnormalised outputs, the running maximum and the running sum."""

    def _start(self, work: _Work) -> Carry:
        del work
        return zeros(TILE, self.head_dim), zeros(TILE) + FLOOR, zeros(TILE)

    def _add_tile(self, work: _Work, n: Index, carry: Carry, *, masked: bool) -> Carry:
        refs, columns, factor = self.refs, self.tiling.columns, self.scale * LOG2_E
        total, largest, weight_sum = carry
        tile = work.first_tile + 2 * (n - work.begin)
        q_tile, k_tile = refs.q_smem.at[work.stage, work.warpgroup], refs.tiles_smem.at[self.tiles.wait(tile)]
        (scores,) = matmuls((q_tile, k_tile.transpose((1, 0))), num_columns=columns)
        self.tiles.release(tile)
        if masked:
            scores = jnp.where(self._mask(work, n), scores, LOWEST)
        new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - broadcast_rows(new_largest, columns))
        rescale = jnp.exp2(largest - new_largest)
        weight_sum = weight_sum * rescale + weights.sum(axis=1)
        total = total * broadcast_rows(rescale, self.head_dim)
        v_tile = refs.tiles_smem.at[self.tiles.wait(tile + 1)]
        (total,) = add_matmuls((total,), weights.astype(jnp.bfloat16), [v_tile], self.interpret)
        self.tiles.release(tile + 1)
        return total, new_largest, weight_sum

    def _result(self, work: _Work, carry: Carry) -> jax.Array:
        item, (total, largest, weight_sum) = work.item, carry
        log_total = largest + jnp.log2(weight_sum)
        self.refs.log_totals[item.batch, item.head, item.rows(work.warpgroup)] = log_total
        return total * broadcast_rows(1.0 / weight_sum, self.head_dim)


class _QueryGradientsKernel(_Kernel):
    """The carry is the gradients of queries, with `log_totals` and `delta`, which do not change."""

    def _start(self, work: _Work) -> Carry:
        item = work.item
        log_total, delta = (
            load_rows(ref.at[item.batch, item.head, item.rows(work.warpgroup)])
            for ref in (self.refs.log_totals, self.refs.delta)
        )
        return zeros(TILE, self.head_dim), log_total, delta

    def _add_tile(self, work: _Work, n: Index, carry: Carry, *, masked: bool) -> Carry:
        refs, columns = self.refs, self.tiling.columns
        total, log_total, delta = carry
        tile = work.first_tile + 2 * (n - work.begin)
        k_tile = refs.tiles_smem.at[self.tiles.wait(tile)]
        v_tile = refs.tiles_smem.at[self.tiles.wait(tile + 1)]
        scores, dweights = matmuls(
            (refs.q_smem.at[work.stage, work.warpgroup], k_tile.transpose((1, 0))),
            (refs.dout_smem.at[work.stage, work.warpgroup], v_tile.transpose((1, 0))),
            num_columns=columns,
        )
        self.tiles.release(tile + 1)
        weights = jnp.exp2(scores * (self.scale * LOG2_E) - broadcast_rows(log_total, columns))
        if masked:
            weights = jnp.where(self._mask(work, n), weights, 0.0)
        dscores = weights * (dweights - broadcast_rows(delta, columns))
        (total,) = add_matmuls((total,), dscores.astype(jnp.bfloat16), [k_tile], self.interpret)
        self.tiles.release(tile)
        return total, log_total, delta

    def _result(self, work: _Work, carry: Carry) -> jax.Array:
        del work
        return carry[0] * self.scale


def compute_outputs(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    starts: Int[Array, "b s"],
    tiling: KernelTiling,
    *,
    scale: float,
    interpret: Interpret = None,
) -> tuple[Float[Array, "b s hq d"], Float[Array, "b hq s"]]:
    """Compute the outputs, and the base-2 log-sum-exp of the scores.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        starts: The first position that each position attends to; the last one is the position itself.
        tiling: The tiles.
        scale: The factor of the scores `q . k`; above zero.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, num_heads, _ = q.shape
    results = _launch(
        _OutputsKernel,
        "document_attention",
        {"q": q},
        (k, v, starts),
        {},
        {
            "result": jax.ShapeDtypeStruct(q.shape, q.dtype),
            "log_totals": jax.ShapeDtypeStruct((b, num_heads, s), jnp.float32),
        },
        tiling,
        scale,
        interpret,
    )
    return results["result"], results["log_totals"]


def compute_query_gradients(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    dout: Float[Array, "b s hq d"],
    log_totals: Float[Array, "b hq s"],
    delta: Float[Array, "b hq s"],
    starts: Int[Array, "b s"],
    tiling: KernelTiling,
    *,
    scale: float,
    interpret: Interpret = None,
) -> Float[Array, "b s hq d"]:
    """Compute the gradients of queries.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        dout: The gradients of the outputs, bfloat16.
        log_totals: The base-2 log-sum-exp of the scores, from `compute_outputs`.
        delta: The inner product of each output and its gradient.
        starts: The first position that each position attends to.
        tiling: The tiles.
        scale: The factor of the scores `q . k`.
        interpret: How to simulate a GPU on a CPU.
    """
    results = _launch(
        _QueryGradientsKernel,
        "document_attention_query_gradients",
        {"q": q, "dout": dout},
        (k, v, starts),
        {"log_totals": log_totals, "delta": delta},
        {"result": jax.ShapeDtypeStruct(q.shape, q.dtype)},
        tiling,
        scale,
        interpret,
    )
    return results["result"]


def _launch(
    kernel: type[_Kernel],
    name: str,
    kept: dict[str, jax.Array],
    keys: tuple[jax.Array, jax.Array, jax.Array],
    vectors: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    tiling: KernelTiling,
    scale: float,
    interpret: Interpret,
) -> dict[str, jax.Array]:
    """Run one of the kernels.

    Args:
        kernel: The kernel.
        name: Its name.
        kept: The resident arrays of a work item.
        keys: Keys, values, and the first position that each position attends to.
        vectors: Further inputs.
        outputs: The shapes of its results.
        tiling: The tiles.
        scale: The factor of the scores `q . k`.
        interpret: How to simulate a GPU on a CPU.
    """
    k, v, starts = keys
    b, s, num_heads, d = kept["q"].shape
    schedule = Schedule(b, num_heads, s)
    begin_tiles, full_begin_tiles = _tile_ranges(starts, tiling.columns)
    rows = plgpu.SMEM((tiling.stages, 2, TILE, d), jnp.bfloat16, transforms=OPERAND)
    results = launch(
        lambda refs: kernel(refs, schedule, tiling, num_heads // k.shape[2], d, scale, interpret)(),
        _Refs,
        name=name,
        inputs={
            **kept,
            "k": k,
            "v": v,
            "starts": starts,
            "begin_tiles": begin_tiles,
            "full_begin_tiles": full_begin_tiles,
            **vectors,
        },
        outputs=outputs,
        scratch={
            **{f"{name}_smem": rows for name in kept},
            "starts_smem": plgpu.SMEM((tiling.stages, ROWS), jnp.int32),
            "tiles_smem": plgpu.SMEM((tiling.slots, tiling.columns, d), jnp.bfloat16, transforms=OPERAND),
            **ring_barriers(tiling.stages, 2, 2 * len(kept) + 1, ("items_full", "items_empty")),
            **ring_barriers(tiling.slots, 2, names=("tiles_full", "tiles_empty")),
        },
        grid={"block": schedule.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    return run_once(results)


def _tile_ranges(starts: Int[Array, "b s"], columns: int) -> tuple[Int[Array, "b n"], Int[Array, "b m"]]:
    """Return the first tile of each work item, and the first one that all rows of each warpgroup attend to."""
    last_rows = jnp.arange(TILE - 1, starts.shape[1], TILE)
    full_begin = -(-starts[:, last_rows] // columns)
    return starts[:, ::ROWS] // columns, jnp.minimum(full_begin, last_rows // columns).astype(jnp.int32)
