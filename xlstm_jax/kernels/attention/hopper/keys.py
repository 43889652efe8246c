"""The gradients of keys and values of attention within documents.

A block has the keys and values of `ROWS` positions and walks over the tiles of queries from itself to the end of the
document of its last position, for each head of queries that the head of keys serves.
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
    Pieces,
    add_product,
    by_row,
    load_columns,
    load_rows,
    positions,
    products,
    zeros,
)
from xlstm_jax.kernels.mlstm.hopper.tiles import launch
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import TILED, Ring, cooperate, ring_barriers

LOG2_E = math.log2(math.e)


def compute_key_gradients(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    dout: Float[Array, "b s hq d"],
    log_totals: Float[Array, "b hq s"],
    delta: Float[Array, "b hq s"],
    ends: Int[Array, "b s"],
    walk: Walk,
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "b s hk d"], Float[Array, "b s hk d"]]:
    """Compute the gradients of keys and values.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        dout: The gradients of the outputs, bfloat16.
        log_totals: What `compute_outputs` returned.
        delta: The product of each output and its gradient.
        ends: The position behind the last one that sees each position.
        walk: The tiles.
        scale: Multiplies the products of queries and keys.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, heads, d = q.shape
    kv_heads, columns, stages = k.shape[2], walk.columns, walk.stages
    group, factor, diagonal = heads // kv_heads, scale * LOG2_E, ROWS // columns
    pieces = Pieces(b, kv_heads, s)
    end_tiles, clear_tiles = _ranges(ends, columns)

    def body(r: SimpleNamespace) -> None:
        ring, needs = Ring(walk.slots, r.full, r.empty), Ring(stages, r.ready, r.free)

        def compute(warpgroup: Any) -> None:
            def let_gradients_leave(turn: Any) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                needs.give_back(turn)

            def work(turn: Any, start: Any) -> Any:
                if stages == 1:
                    pl.when(turn > 0)(lambda: let_gradients_leave(turn - 1))
                piece = pieces.piece(turn)
                end = r.end_tiles[piece.batch, piece.part]
                clear = r.clear_tiles[piece.batch, 2 * piece.part + warpgroup]
                first = piece.part * diagonal
                own = lax.div(piece.part * ROWS + warpgroup * TILE, jnp.int32(columns))
                stage = needs.take(turn)
                end_of_row = load_rows(r.row_ends.at[stage, pl.ds(warpgroup * TILE, TILE)])
                keys, values = r.keys.at[stage, warpgroup], r.values.at[stage, warpgroup]

                def one(begin: Any, n: Any, carried: Any, *, masked: bool) -> Any:
                    dkeys, dvalues = carried
                    number = begin + 2 * (n - first)
                    slot = ring.take(number)
                    queries, log_total = r.tiles.at[slot], r.numbers.at[slot]
                    slot = ring.take(number + 1)
                    douts, of_column = r.tiles.at[slot], r.numbers.at[slot]
                    scores, dweights = products(
                        (keys, queries.transpose((1, 0))), (values, douts.transpose((1, 0))), columns=columns
                    )
                    weights = jnp.exp2(scores * factor - load_columns(log_total))
                    if masked:
                        query = positions(n * columns, columns, 1)
                        key = positions(piece.part * ROWS + warpgroup * TILE, columns, 0)
                        weights = jnp.where((query >= key) & (query < by_row(end_of_row, columns)), weights, 0.0)
                    dscores = weights * (dweights - load_columns(of_column))
                    dvalues = add_product(dvalues, weights, douts, interpret)
                    ring.give_back(number + 1)
                    dkeys = add_product(dkeys, dscores, queries, interpret)
                    ring.give_back(number)
                    return dkeys, dvalues

                def of_head(index: Any, carried: Any) -> Any:
                    begin = start + index * 2 * (end - first)

                    @pl.when(own > first)
                    def _() -> None:  # the first tiles are for the other warpgroup
                        for n in range(2):
                            ring.take(begin + n)
                            ring.give_back(begin + n)

                    step = functools.partial(one, begin)
                    carried = step(own, carried, masked=True)
                    carried = lax.fori_loop(own + 1, clear, functools.partial(step, masked=False), carried)
                    return lax.fori_loop(clear, end, functools.partial(step, masked=True), carried)

                if stages > 1:
                    pl.when(turn > 0)(lambda: let_gradients_leave(turn - 1))
                dkeys, dvalues = lax.fori_loop(0, group, of_head, (zeros(TILE, d), zeros(TILE, d)))
                keys[...] = (dkeys * scale).astype(keys.dtype)
                values[...] = dvalues.astype(values.dtype)
                plgpu.commit_smem()
                for place, target in ((keys, r.dk), (values, r.dv)):
                    plgpu.copy_smem_to_gmem(place, target.at[piece.batch, piece.rows(warpgroup), piece.head])
                return start + group * 2 * (end - first)

            pieces.each(work)
            let_gradients_leave(pieces.turns - 1)
            plgpu.wait_smem_to_gmem(0)

        def move() -> None:
            def load(turn: Any, start: Any) -> Any:
                piece = pieces.piece(turn)
                copies: list[tuple[Any, ...]] = [
                    (ref.at[piece.batch, piece.rows(w), piece.head], place, w)
                    for ref, place in ((r.k, r.keys), (r.v, r.values))
                    for w in range(2)
                ]
                copies.append((r.ends.at[piece.batch, pl.ds(piece.part * ROWS, ROWS)], r.row_ends))
                needs.fill(turn, *copies)
                first = piece.part * diagonal
                count = r.end_tiles[piece.batch, piece.part] - first

                @pl.loop(0, group)
                def _(index: Any) -> None:
                    head = piece.head * group + index

                    @pl.loop(0, count)
                    def _(n: Any) -> None:
                        where, number = pl.ds((first + n) * columns, columns), start + 2 * (index * count + n)
                        for offset, (matrix, vector) in enumerate(((r.q, r.log_totals), (r.dout, r.delta))):
                            ring.fill(
                                number + offset,
                                (matrix.at[piece.batch, where, head], r.tiles),
                                (vector.at[piece.batch, head, where], r.numbers),
                            )

                return start + group * 2 * count

            count = pieces.each(load)
            if interpret:
                ring.drain(count)
                needs.drain(pieces.turns)

        cooperate(2, compute=compute, move=move)

    body.__name__ = "document_attention_key_gradients"
    rows = plgpu.SMEM((stages, 2, TILE, d), jnp.bfloat16, transforms=TILED)
    results = launch(
        body,
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "dout": dout,
            "log_totals": log_totals,
            "delta": delta,
            "ends": ends,
            "end_tiles": end_tiles,
            "clear_tiles": clear_tiles,
        },
        outputs={"dk": jax.ShapeDtypeStruct(k.shape, k.dtype), "dv": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        scratch={
            "keys": rows,
            "values": rows,
            "row_ends": plgpu.SMEM((stages, ROWS), jnp.int32),
            "tiles": plgpu.SMEM((walk.slots, columns, d), jnp.bfloat16, transforms=TILED),
            "numbers": plgpu.SMEM((walk.slots, columns), jnp.float32),
            **ring_barriers(stages, 2, 5, ("ready", "free")),
            **ring_barriers(walk.slots, 2, 2),
        },
        grid={"block": pieces.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    return results["dk"], results["dv"]


def _ranges(ends: Int[Array, "b s"], columns: int) -> tuple[Int[Array, "b n"], Int[Array, "b m"]]:
    """Return the tile behind the last one that each block is seen by, and behind those that see all rows whole."""
    first_rows = jnp.arange(0, ends.shape[1], TILE)
    clear = jnp.maximum(ends[:, ::TILE] // columns, first_rows // columns + 1)
    return (-(-ends[:, ROWS - 1 :: ROWS] // columns)).astype(jnp.int32), clear.astype(jnp.int32)
