"""The outputs of attention within documents, and with other roles the gradients of its queries.

A block has the queries of `ROWS` positions of a head and walks over the tiles of keys from the document of its first
position on to itself. In between, tiles that all positions of a warpgroup see whole need no mask.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from xlstm_jax.kernels.attention.hopper.tiling import ROWS, TILE, Walk
from xlstm_jax.kernels.attention.hopper.work import (
    Piece,
    Pieces,
    add_product,
    by_row,
    load_rows,
    positions,
    products,
    zeros,
)
from xlstm_jax.kernels.mlstm.hopper.tiles import launch
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import TILED, Ring, cooperate, ring_barriers

LOG2_E = math.log2(math.e)
LOWEST, FLOOR = -1e30, -1e20
"""Scores that are masked, and the least number to count from: far above the former, and below all other scores."""


def compute_outputs(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    starts: Int[Array, "b s"],
    walk: Walk,
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "b s hq d"], Float[Array, "b hq s"]]:
    """Compute the outputs, and the base-2 logarithms of the sums of exponentials that they are divided by.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        starts: The first position that each position sees; the last one is itself.
        walk: The tiles.
        scale: Multiplies the products of queries and keys; above zero.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, heads, d = q.shape
    factor = scale * LOG2_E

    def begin(r: SimpleNamespace, piece: Piece, stage: Any, warpgroup: Any) -> Any:
        del r, piece, stage, warpgroup
        return zeros(TILE, d), zeros(TILE) + FLOOR, zeros(TILE)

    def step(r: SimpleNamespace, stage: Any, warpgroup: Any, tiles: Any, mask: Any, carried: Any) -> Any:
        total, largest, sums = carried
        (scores,) = products((r.queries.at[stage, warpgroup], tiles.keys().transpose((1, 0))), columns=walk.columns)
        tiles.give_keys_back()
        if mask is not None:
            scores = jnp.where(mask(), scores, LOWEST)
        new = jnp.maximum(largest, scores.max(axis=1) * factor)
        weights = jnp.exp2(scores * factor - by_row(new, walk.columns))
        change = jnp.exp2(largest - new)
        sums = sums * change + weights.sum(axis=1)
        total = add_product(total * by_row(change, d), weights, tiles.values(), interpret)
        tiles.give_values_back()
        return total, new, sums

    def end(r: SimpleNamespace, piece: Piece, warpgroup: Any, carried: Any) -> jax.Array:
        total, largest, sums = carried
        r.log_totals[piece.batch, piece.head, piece.rows(warpgroup)] = largest + jnp.log2(sums)
        return total * by_row(1.0 / sums, d)

    results = _walk_over_keys(
        "document_attention",
        begin,
        step,
        end,
        rows={"queries": q},
        k=k,
        v=v,
        starts=starts,
        outputs={
            "result": jax.ShapeDtypeStruct(q.shape, q.dtype),
            "log_totals": jax.ShapeDtypeStruct((b, heads, s), jnp.float32),
        },
        walk=walk,
        interpret=interpret,
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
    walk: Walk,
    *,
    scale: float,
    interpret: Any = None,
) -> Float[Array, "b s hq d"]:
    """Compute the gradients of queries.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        dout: The gradients of the outputs, bfloat16.
        log_totals: What `compute_outputs` returned.
        delta: The product of each output and its gradient.
        starts: The first position that each position sees.
        walk: The tiles.
        scale: Multiplies the products of queries and keys.
        interpret: How to simulate a GPU on a CPU.
    """
    d, factor = q.shape[-1], scale * LOG2_E

    def begin(r: SimpleNamespace, piece: Piece, stage: Any, warpgroup: Any) -> Any:
        del stage
        log_total, of_row = (
            load_rows(ref.at[piece.batch, piece.head, piece.rows(warpgroup)]) for ref in (r.log_totals, r.delta)
        )
        return zeros(TILE, d), log_total, of_row

    def step(r: SimpleNamespace, stage: Any, warpgroup: Any, tiles: Any, mask: Any, carried: Any) -> Any:
        total, log_total, of_row = carried
        keys, values = tiles.keys(), tiles.values()
        scores, dweights = products(
            (r.queries.at[stage, warpgroup], keys.transpose((1, 0))),
            (r.douts.at[stage, warpgroup], values.transpose((1, 0))),
            columns=walk.columns,
        )
        tiles.give_values_back()
        weights = jnp.exp2(scores * factor - by_row(log_total, walk.columns))
        if mask is not None:
            weights = jnp.where(mask(), weights, 0.0)
        total = add_product(total, weights * (dweights - by_row(of_row, walk.columns)), keys, interpret)
        tiles.give_keys_back()
        return total, log_total, of_row

    def end(r: SimpleNamespace, piece: Piece, warpgroup: Any, carried: Any) -> jax.Array:
        del r, piece, warpgroup
        return carried[0] * scale

    results = _walk_over_keys(
        "document_attention_query_gradients",
        begin,
        step,
        end,
        rows={"queries": q, "douts": dout},
        k=k,
        v=v,
        starts=starts,
        vectors={"log_totals": log_totals, "delta": delta},
        outputs={"result": jax.ShapeDtypeStruct(q.shape, q.dtype)},
        walk=walk,
        interpret=interpret,
    )
    return results["result"]


class _Tiles:
    """The keys and values of a step, which a warpgroup waits for when it asks for them."""

    def __init__(self, ring: Ring, tiles: Any, number: Any) -> None:
        self.ring, self.tiles, self.number = ring, tiles, number

    def keys(self) -> Any:
        """Return the keys."""
        return self.tiles.at[self.ring.take(self.number)]

    def values(self) -> Any:
        """Return the values."""
        return self.tiles.at[self.ring.take(self.number + 1)]

    def give_keys_back(self) -> None:
        """Say that the keys are not needed any longer."""
        self.ring.give_back(self.number)

    def give_values_back(self) -> None:
        """Say that the values are not needed any longer."""
        self.ring.give_back(self.number + 1)


def _walk_over_keys(
    name: str,
    begin: Any,
    step: Any,
    end: Any,
    *,
    rows: dict[str, jax.Array],
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    vectors: dict[str, jax.Array] | None = None,
    outputs: dict[str, jax.ShapeDtypeStruct],
    walk: Walk,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Run a kernel whose blocks walk over keys and values.

    Args:
        name: The name of the kernel.
        begin: `begin(references, piece, stage, warpgroup)` returns what a warpgroup carries along.
        step: `step(references, stage, warpgroup, tiles, mask, carried)` adds what a tile has; `mask()` tells which
            pairs of positions see each other, and is `None` where all do.
        end: `end(references, piece, warpgroup, carried)` returns the rows of the output `result`.
        rows: What the block holds in shared memory; the first one's place is where the results leave from.
        k: Keys.
        v: Values.
        starts: The first position that each position sees.
        vectors: What else it reads.
        outputs: What it writes.
        walk: The tiles.
        interpret: How to simulate a GPU on a CPU.
    """
    first_of = next(iter(rows.values()))
    b, s, heads, d = first_of.shape
    group, columns, stages = heads // k.shape[2], walk.columns, walk.stages
    pieces = Pieces(b, heads, s)
    first_tiles, clear_tiles = _ranges(starts, columns)

    def body(r: SimpleNamespace) -> None:
        ring, needs = Ring(walk.slots, r.full, r.empty), Ring(stages, r.ready, r.free)

        def last_tile(part: Any, warpgroup: Any) -> Any:
            """Return the tile on the diagonal."""
            return lax.div(part * ROWS + warpgroup * TILE, jnp.int32(columns))

        def compute(warpgroup: Any) -> None:
            def let_results_leave(turn: Any) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                needs.give_back(turn)

            def work(turn: Any, start: Any) -> Any:
                if stages == 1:
                    pl.when(turn > 0)(lambda: let_results_leave(turn - 1))
                piece = pieces.piece(turn)
                first = r.first_tiles[piece.batch, piece.part]
                clear = r.clear_tiles[piece.batch, 2 * piece.part + warpgroup]
                last = last_tile(piece.part, warpgroup)
                stage = needs.take(turn)
                start_of_row = load_rows(r.row_starts.at[stage, pl.ds(warpgroup * TILE, TILE)])
                carried = begin(r, piece, stage, warpgroup)

                def mask(n: Any) -> jax.Array:
                    key = positions(n * columns, columns, 1)
                    query = positions(piece.part * ROWS + warpgroup * TILE, columns, 0)
                    return (key >= by_row(start_of_row, columns)) & (key <= query)

                def one(n: Any, carried: Any, *, masked: bool) -> Any:
                    tiles = _Tiles(ring, r.tiles, start + 2 * (n - first))
                    seen = functools.partial(mask, n) if masked else None
                    return step(r, stage, warpgroup, tiles, seen, carried)

                carried = lax.fori_loop(first, clear, functools.partial(one, masked=True), carried)
                if stages > 1:
                    pl.when(turn > 0)(lambda: let_results_leave(turn - 1))
                carried = lax.fori_loop(clear, last, functools.partial(one, masked=False), carried)
                carried = one(last, carried, masked=True)
                count = last_tile(piece.part, 1) - first + 1

                @pl.when(last - first + 1 < count)
                def _() -> None:  # the last tiles are for the other warpgroup
                    for n in range(2):
                        number = start + 2 * (count - 1) + n
                        ring.take(number)
                        ring.give_back(number)

                result = end(r, piece, warpgroup, carried)
                place = r.row_0.at[stage, warpgroup]
                place[...] = result.astype(place.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(place, r.result.at[piece.batch, piece.rows(warpgroup), piece.head])
                return start + 2 * count

            pieces.each(work)
            let_results_leave(pieces.turns - 1)
            plgpu.wait_smem_to_gmem(0)

        def move() -> None:
            def load(turn: Any, start: Any) -> Any:
                piece = pieces.piece(turn)
                copies: list[tuple[Any, ...]] = [
                    (ref.at[piece.batch, piece.rows(w), piece.head], place, w)
                    for ref, place in zip(r.of_rows, r.places, strict=True)
                    for w in range(2)
                ]
                copies.append((r.starts.at[piece.batch, pl.ds(piece.part * ROWS, ROWS)], r.row_starts))
                needs.fill(turn, *copies)
                first = r.first_tiles[piece.batch, piece.part]
                count = last_tile(piece.part, 1) - first + 1
                kv_head = lax.div(piece.head, jnp.int32(group))

                @pl.loop(0, count)
                def _(n: Any) -> None:
                    where = pl.ds((first + n) * columns, columns)
                    for index, ref in enumerate((r.k, r.v)):
                        ring.fill(start + 2 * n + index, (ref.at[piece.batch, where, kv_head], r.tiles))

                return start + 2 * count

            count = pieces.each(load)
            if interpret:
                ring.drain(count)
                needs.drain(pieces.turns)

        cooperate(2, compute=compute, move=move)

    def named(r: SimpleNamespace) -> None:
        r.places = [getattr(r, place) for place in rows]
        r.of_rows = [getattr(r, f"{place}_in") for place in rows]
        r.row_0 = r.places[0]
        body(r)

    named.__name__ = name
    own = plgpu.SMEM((stages, 2, TILE, d), jnp.bfloat16, transforms=TILED)
    scratch = {
        **dict.fromkeys(rows, own),
        "row_starts": plgpu.SMEM((stages, ROWS), jnp.int32),
        "tiles": plgpu.SMEM((walk.slots, columns, d), jnp.bfloat16, transforms=TILED),
        **ring_barriers(stages, 2, 2 * len(rows) + 1, ("ready", "free")),
        **ring_barriers(walk.slots, 2),
    }
    return launch(
        named,
        inputs={
            **{f"{place}_in": x for place, x in rows.items()},
            "k": k,
            "v": v,
            "starts": starts,
            "first_tiles": first_tiles,
            "clear_tiles": clear_tiles,
            **(vectors or {}),
        },
        outputs=outputs,
        scratch=scratch,
        grid={"block": pieces.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )


def _ranges(starts: Int[Array, "b s"], columns: int) -> tuple[Int[Array, "b n"], Int[Array, "b m"]]:
    """Return the first tile that each block sees, and the first one that all rows of each warpgroup see whole."""
    last_rows = jnp.arange(TILE - 1, starts.shape[1], TILE)
    clear = -(-starts[:, last_rows] // columns)
    return starts[:, ::ROWS] // columns, jnp.minimum(clear, last_rows // columns).astype(jnp.int32)
