"""The gradients of queries and keys of an mLSTM, which have one form.

    g[t] = sum over the s of t's chunk of (a[t] . b[s] + delta) exp2(row[t] + column[s]) e[s]
           + from_memory[t] (memory a[t] + delta normalizer)

    queries    a = dh, b = v, e = k, with the memory before the chunk, over s <= t; delta belongs to t, in both lines
    keys       a = v, b = dh, e = q, with the gradient of the memory after the chunk, over s >= t; delta belongs to s in
               the first line and is one in the second

One kernel computes both, in pieces of two kinds. The pieces of a chunk are neighbours, so they run at the same time and
find each other's tiles in the cache.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mlstm.mosaic.items import Item, Items
from xlstm_jax.kernels.mlstm.mosaic.states import Memories
from xlstm_jax.kernels.mlstm.mosaic.tiles import (
    COLUMN,
    MATRIX,
    TILED,
    Ring,
    add_products,
    by_column,
    by_row,
    cooperate,
    launch,
    load_column,
    load_row,
    masked,
    ring_barriers,
)
from xlstm_jax.kernels.mlstm.mosaic.tiling import TILE, Tiling
from xlstm_jax.kernels.mosaic_gpu import pl, plgpu


class PairGradients(NamedTuple):
    """The gradients of queries and keys, and their products with what they are gradients of, position by position."""

    dq: Float[Array, "b s h k"]
    q_dq: Float[Array, "b h s"]
    dk: Float[Array, "b s h k"]
    k_dk: Float[Array, "b h s"]


class _Kind(NamedTuple):
    """What one kind of piece is made of, by the letters of the module's formula."""

    later: bool
    a: Any
    b: Any
    e: Any
    memories: Any
    normalizers: Any
    row: Any
    column: Any
    from_memory: Any
    factor: Any
    """What the gradient belongs to."""
    gradient: Any
    dot: Any


def compute_pair_gradients(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    dh: Float[Array, "b s h v"],
    before: Memories,
    dafter: Memories,
    reading: Float[Array, "b h s"],
    written: Float[Array, "b h s"],
    from_memory: Float[Array, "b h s"],
    to_memory: Float[Array, "b h s"],
    delta: Float[Array, "b h s"],
    documents: Float[Array, "b s"] | None,
    tiling: Tiling,
    *,
    interpret: Any = None,
) -> PairGradients:
    """Compute the gradients of queries and keys.

    Args:
        q: Queries, bfloat16, as are the next three.
        k: Keys.
        v: Values.
        dh: The gradients of the outputs.
        before: The memories before each chunk.
        dafter: The gradients of the memories after each chunk.
        reading: The exponents of positions as they read, their divisors included.
        written: The exponents of positions as they are read.
        from_memory: What each position reads of the memory before its chunk, divisors included.
        to_memory: What each position writes to the memory after its chunk.
        delta: The gradients of the divisors, in units of them.
        documents: The number of each position's document within its chunk, if a chunk can have several.
        tiling: The tiles.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, width = q.shape
    v_dim, slots = v.shape[-1], tiling.pair_slots
    items = Items(h, s // tiling.chunk_size, 2, tiling, b)
    halves = v_dim // width  # of rows of `a` and `b`, which are as wide as values
    memory_tiles, tiles_per_step = v_dim // TILE, halves + 1
    early = min(slots, memory_tiles)

    def body(r: SimpleNamespace) -> None:
        ring = Ring(slots, r.full, r.empty)
        tiles, memory_views = r.tiles
        kinds = (
            _Kind(
                False, r.dh, r.v, r.k, r.memories, r.normalizers, r.reading, r.written, r.from_memory, r.q, r.dq, r.q_dq
            ),
            _Kind(
                True, r.v, r.dh, r.q, r.dmemories, r.dnormalizers, r.written, r.reading, r.to_memory, r.k, r.dk, r.k_dk
            ),
        )

        def tiles_of(item: Item) -> Any:
            queries, keys = (items.seen_tiles(item.part, later=kind.later) for kind in kinds)
            return memory_tiles + tiles_per_step * jnp.where(item.kind == 0, queries, keys)

        def compute(warpgroup: Any) -> None:
            def gradients(turn: Any, start: Any) -> Any:
                item = items.item(turn)
                for number, kind in enumerate(kinds):
                    pl.when(item.kind == number)(functools.partial(_gradients, kind, item, start))
                return start + tiles_of(item)

            def _gradients(kind: _Kind, item: Item, start: Any) -> None:
                rows, later = item.rows(warpgroup), kind.later

                def per_row(ref: Any) -> jax.Array:
                    return load_row(ref.at[item.batch, item.head, rows])

                exponent, read = per_row(kind.row), per_row(kind.from_memory)
                row_delta = None if later else per_row(r.delta)
                document = load_row(r.documents.at[item.batch, rows]) if documents is not None else None

                def from_memory(total: Any) -> tuple[jax.Array, jax.Array]:
                    for n in range(memory_tiles):
                        half, column = divmod(n * TILE, width)
                        if column == 0:
                            plgpu.barrier_wait(r.a_ready.at[half])
                        slot = ring.take(start + n)
                        part = r.a.at[warpgroup, half, :, pl.ds(column, TILE)]
                        plgpu.wgmma(total, part, memory_views.at[slot].transpose((1, 0)))
                        if n:
                            plgpu.wgmma_wait(1)
                            ring.give_back(start + n - 1)
                    # While the last product is computed.
                    source = kind.normalizers.at[item.batch, item.head, item.chunk]
                    normalizer = plgpu.load(source, layout=COLUMN, optimized=False)
                    result = total[...]
                    ring.give_back(start + memory_tiles - 1)
                    return result, normalizer

                total, normalizer = pl.run_scoped(from_memory, plgpu.ACC((TILE, width), jnp.float32))
                normalizer = by_column(normalizer)
                if row_delta is not None:
                    normalizer = normalizer * by_row(row_delta, width)
                total = (total + normalizer) * by_row(read, width)

                def add_tile(n: Any, total: jax.Array, *, diagonal: bool) -> jax.Array:
                    number = start + memory_tiles + tiles_per_step * n
                    offset = items.position(n, later=later)
                    pair = None
                    if document is not None:  # shared memory is full; early, as they come from far away
                        source = r.documents.at[item.batch, pl.ds(item.first + offset, TILE)]
                        pair = document, by_column(plgpu.load(source, layout=COLUMN, optimized=False))

                    def scores(result: Any) -> jax.Array:
                        for half in range(halves):
                            slot = ring.take(number + half)
                            plgpu.wgmma(result, r.a.at[warpgroup, half], tiles.at[slot].transpose((1, 0)))
                            if half:
                                plgpu.wgmma_wait(1)
                                ring.give_back(number + half - 1)
                        return result[...]

                    weights = pl.run_scoped(scores, plgpu.ACC((TILE, TILE), jnp.float32))
                    ring.give_back(number + halves - 1)
                    if diagonal:
                        plgpu.barrier_arrive(r.a_used.at[warpgroup])
                    positions = pl.ds(offset, TILE)
                    weights += by_row(row_delta, TILE) if row_delta is not None else load_column(r.deltas.at[positions])
                    weights *= jnp.exp2(by_row(exponent, TILE) + load_column(r.columns.at[positions]))
                    weights = masked(weights, diagonal=diagonal, later=later, documents=pair)
                    last = number + halves
                    (total,) = add_products(
                        (total,), weights.astype(jnp.bfloat16), [tiles.at[ring.take(last)]], interpret
                    )
                    ring.give_back(last)
                    return total

                plgpu.barrier_wait(r.vectors_ready)
                clear = items.clear_tiles(item.part, warpgroup, later=later)
                total = lax.fori_loop(0, clear, functools.partial(add_tile, diagonal=False), total)
                total = add_tile(clear, total, diagonal=True)

                @pl.when(warpgroup == (1 if later else 0))
                def _() -> None:  # the last tiles are for the other warpgroup
                    for n in range(tiles_per_step):
                        number = start + memory_tiles + tiles_per_step * (clear + 1) + n
                        ring.take(number)
                        ring.give_back(number)

                r.a[warpgroup, 0] = total.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(r.a.at[warpgroup, 0], kind.gradient.at[item.batch, rows, item.head])
                plgpu.barrier_wait(r.factor_ready.at[warpgroup])
                factor = plgpu.load(r.a.at[warpgroup, 1], layout=MATRIX, optimized=False).astype(jnp.float32)
                kind.dot[item.batch, item.head, rows] = (total * factor).sum(axis=1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(r.free)

            items.each(gradients)
            plgpu.wait_smem_to_gmem(0)

        def move() -> None:
            def load(turn: Any, start: Any) -> Any:
                item = items.item(turn)
                for number, kind in enumerate(kinds):
                    pl.when(item.kind == number)(functools.partial(_load, kind, item, turn, start))
                return start + tiles_of(item)

            def _load(kind: _Kind, item: Item, turn: Any, start: Any) -> None:
                def load_memory(n: int) -> None:
                    source = kind.memories.at[item.batch, item.head, item.chunk, :, pl.ds(n * TILE, TILE)]
                    ring.fill(start + n, (source, memory_views))

                def load_a(half: int) -> None:
                    for w in range(2):
                        source = kind.a.at[item.batch, item.rows(w), item.head, pl.ds(half * width, width)]
                        plgpu.copy_gmem_to_smem(source, r.a.at[w, half], r.a_ready.at[half])

                for n in range(early):
                    load_memory(n)

                items.after_first(turn, lambda: plgpu.barrier_wait(r.free))

                for half in range(halves):
                    load_a(half)
                chunk = pl.ds(item.first, tiling.chunk_size)
                plgpu.copy_gmem_to_smem(kind.column.at[item.batch, item.head, chunk], r.columns, r.vectors_ready)
                plgpu.copy_gmem_to_smem(r.delta.at[item.batch, item.head, chunk], r.deltas, r.vectors_ready)
                for n in range(early, memory_tiles):
                    load_memory(n)

                @pl.loop(0, items.seen_tiles(item.part, later=kind.later))
                def _(n: Any) -> None:
                    positions = pl.ds(item.first + items.position(n, later=kind.later), TILE)
                    number = start + memory_tiles + tiles_per_step * n
                    for half in range(halves):
                        source = kind.b.at[item.batch, positions, item.head, pl.ds(half * width, width)]
                        ring.fill(number + half, (source, tiles))
                    ring.fill(number + halves, (kind.e.at[item.batch, positions, item.head], tiles))

                for w in (1, 0) if kind.later else (0, 1):  # in the order in which they are ready
                    plgpu.barrier_wait(r.a_used.at[w])
                    source = kind.factor.at[item.batch, item.rows(w), item.head]
                    plgpu.copy_gmem_to_smem(source, r.a.at[w, 1], r.factor_ready.at[w])

            count = items.each(load)
            if interpret:
                ring.drain(count)
                plgpu.barrier_wait(r.free)

        cooperate(2, compute=compute, move=move)

    vector = plgpu.SMEM((tiling.chunk_size,), jnp.float32)
    scratch = {
        # At the end of a piece, the gradients are where the first half was, and what they belong to is in the second.
        "a": plgpu.SMEM((2, 2, TILE, width), jnp.bfloat16, transforms=TILED),
        "tiles": plgpu.RefUnion(
            plgpu.SMEM((slots, TILE, width), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, width, TILE), jnp.bfloat16, transforms=TILED),
        ),
        "columns": vector,
        "deltas": vector,
        "a_ready": plgpu.Barrier(num_arrivals=2, num_barriers=halves),
        "a_used": plgpu.Barrier(num_barriers=2),
        "vectors_ready": plgpu.Barrier(num_arrivals=2),
        "factor_ready": plgpu.Barrier(num_barriers=2),
        "free": plgpu.Barrier(num_arrivals=2),
    }
    body.__name__ = "mlstm_pair_gradients"
    gradient, dots = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16), jax.ShapeDtypeStruct((b, h, s), jnp.float32)
    results = launch(
        body,
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "dh": dh,
            "memories": before.chunks,
            "normalizers": before.normalizers,
            "dmemories": dafter.chunks,
            "dnormalizers": dafter.normalizers,
            "reading": reading,
            "written": written,
            "from_memory": from_memory,
            "to_memory": to_memory,
            "delta": delta,
            "documents": documents,
        },
        outputs={"dq": gradient, "q_dq": dots, "dk": gradient, "k_dk": dots},
        scratch=scratch | ring_barriers(slots, 2),
        grid={"block": items.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    return PairGradients(**results)
