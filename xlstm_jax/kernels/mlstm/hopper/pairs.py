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

from xlstm_jax.kernels.mlstm.hopper.items import Item, Items
from xlstm_jax.kernels.mlstm.hopper.states import Memories
from xlstm_jax.kernels.mlstm.hopper.tiles import (
    add_products,
    by_column,
    by_row,
    launch,
    load_column,
    load_row,
    masked,
    product,
    unknown_zero,
    zeros,
)
from xlstm_jax.kernels.mlstm.hopper.tiling import ROWS, TILE, Tiling
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import COLUMN, MATRIX, TILED, Ring, cooperate, ring_barriers


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
    before: Memories | None,
    dafter: Memories | None,
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
        before: The memories before each chunk; `None` if all are empty, as are then the next.
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
    v_dim, slots, stages = v.shape[-1], tiling.pair_slots, tiling.pair_stages
    items = Items(h, s // tiling.chunk_size, 2, tiling, b)
    halves = v_dim // width  # of rows of `a` and `b`, which are as wide as values
    reads_memories = before is not None
    memory_tiles, tiles_per_step = v_dim // TILE * reads_memories, halves + 1

    def body(r: SimpleNamespace) -> None:
        ring, needs = Ring(slots, r.full, r.empty), Ring(stages, r.ready, r.free)
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
            return memory_tiles + tiles_per_step * jnp.where(item.kind == 0, queries, keys) + 2

        def compute(warpgroup: Any) -> None:
            def let_gradients_leave(end: Any) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ring.give_back(end - 2 + warpgroup)

            def gradients(turn: Any, start: Any) -> Any:
                item = items.item(turn)
                if stages == 1:  # there is nothing to do before `a` is there
                    pl.when(turn > 0)(lambda: let_gradients_leave(start))
                for number, kind in enumerate(kinds):
                    pl.when(item.kind == number)(functools.partial(_gradients, kind, item, turn, start))
                return start + tiles_of(item)

            def _gradients(kind: _Kind, item: Item, turn: Any, start: Any) -> None:
                rows, later = item.rows(warpgroup), kind.later
                own = pl.ds(warpgroup * TILE, TILE)
                own_in_chunk = pl.ds(item.part * ROWS + warpgroup * TILE, TILE)

                def per_row(staged: str, ref: Any) -> jax.Array:
                    if tiling.pair_vectors_fit:
                        return load_row(getattr(r, staged).at[stage, own])
                    return load_row(ref.at[item.batch, item.head, rows])  # early, as it comes from far away

                stage = needs.slot(turn) + unknown_zero(start)
                if tiling.pair_vectors_fit:
                    needs.take(turn)
                exponent = per_row("rows", kind.row)
                read = per_row("reads", kind.from_memory) if reads_memories else None
                document = None
                if documents is not None:
                    if tiling.pair_vectors_fit:
                        document = load_row(r.chunk_documents.at[stage, own_in_chunk])
                    else:
                        document = load_row(r.documents.at[item.batch, rows])
                if not tiling.pair_vectors_fit:
                    needs.take(turn)
                row_delta = None if later else load_row(r.deltas.at[stage, own_in_chunk])

                def from_memory(total: Any) -> tuple[jax.Array, jax.Array]:
                    for n in range(memory_tiles):
                        half, column = divmod(n * TILE, width)
                        if half and column == 0:
                            plgpu.barrier_wait(r.rest_ready.at[stage])
                        slot = ring.take(start + n)
                        part = r.a.at[stage, warpgroup, half, :, pl.ds(column, TILE)]
                        plgpu.wgmma(total, part, memory_views.at[slot].transpose((1, 0)))
                        if n == 0 and stages > 1:
                            pl.when(turn > 0)(lambda: let_gradients_leave(start))
                        if n:
                            plgpu.wgmma_wait(1)
                            ring.give_back(start + n - 1)
                    # While the last product is computed.
                    source = kind.normalizers.at[item.batch, item.head, item.chunk]
                    if tiling.pair_vectors_fit:
                        source = r.normalizer.at[stage]
                    normalizer = plgpu.load(source, layout=COLUMN, optimized=False)
                    result = total[...]
                    ring.give_back(start + memory_tiles - 1)
                    return result, normalizer

                if read is None:
                    if halves > 1:
                        plgpu.barrier_wait(r.rest_ready.at[stage])
                    if stages > 1:
                        pl.when(turn > 0)(lambda: let_gradients_leave(start))
                    total = zeros(TILE, width)
                else:
                    total, normalizer = pl.run_scoped(from_memory, plgpu.ACC((TILE, width), jnp.float32))
                    normalizer = by_column(normalizer)
                    if row_delta is not None:
                        normalizer = normalizer * by_row(row_delta, width)
                    total = (total + normalizer) * by_row(read, width)

                clear = items.clear_tiles(item.part, warpgroup, later=later)

                def number_of(n: Any) -> Any:
                    return start + memory_tiles + tiles_per_step * n

                def operands(n: Any) -> list[tuple[Any, Any]]:
                    """Wait for a step's part of `b`, and return what its scores are the product of."""
                    place = stage + unknown_zero(number_of(n))
                    slots = [ring.take(number_of(n) + half) for half in range(halves)]
                    rights = [tiles.at[slot].transpose((1, 0)) for slot in slots]
                    return [(r.a.at[place, warpgroup, half], right) for half, right in enumerate(rights)]

                def add(n: Any, total: jax.Array, *, diagonal: bool) -> jax.Array:
                    """Add what a step has."""
                    scores = product(functools.partial(operands, n))
                    for half in range(halves):
                        ring.give_back(number_of(n) + half)
                    offset = items.position(n, later=later)
                    positions = pl.ds(offset, TILE)
                    pair = None
                    if document is not None:
                        source = r.documents.at[item.batch, pl.ds(item.first + offset, TILE)]
                        if tiling.pair_vectors_fit:
                            source = r.chunk_documents.at[stage, positions]
                        pair = document, by_column(plgpu.load(source, layout=COLUMN, optimized=False))
                    if row_delta is None:
                        weights = scores + load_column(r.deltas.at[stage, positions])
                    else:
                        weights = scores + by_row(row_delta, TILE)
                    weights *= jnp.exp2(by_row(exponent, TILE) + load_column(r.columns.at[stage, positions]))
                    weights = masked(weights, diagonal=diagonal, later=later, documents=pair).astype(jnp.bfloat16)
                    values = tiles.at[ring.take(number_of(n) + halves)]
                    (total,) = add_products((total,), weights, [values], interpret)
                    ring.give_back(number_of(n) + halves)
                    return total

                total = lax.fori_loop(0, clear, functools.partial(add, diagonal=False), total)
                total = add(clear, total, diagonal=True)
                needs.give_back(turn)

                @pl.when(warpgroup == (1 if later else 0))
                def _() -> None:  # the last tiles are for the other warpgroup
                    for n in range(tiles_per_step):
                        number = start + memory_tiles + tiles_per_step * (clear + 1) + n
                        ring.take(number)
                        ring.give_back(number)

                # What the gradients belong to, in two tiles, of which one is for the other warpgroup.
                end = start + tiles_of(item)
                mine, other = end - 2 + warpgroup, end - 1 - warpgroup
                staging = tiles.at[ring.take(mine)]
                factor = plgpu.load(staging, layout=MATRIX, optimized=False).astype(jnp.float32)
                kind.dot[item.batch, item.head, rows] = (total * factor).sum(axis=1)
                ring.take(other)
                ring.give_back(other)
                plgpu.commit_smem()  # all threads have read it, so the gradients can take its place
                staging[...] = total.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, kind.gradient.at[item.batch, rows, item.head])

            let_gradients_leave(items.each(gradients))
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

                def part_of_a(half: int, w: int) -> Any:
                    return kind.a.at[item.batch, item.rows(w), item.head, pl.ds(half * width, width)]

                copies: list[tuple[Any, ...]] = [(part_of_a(0, w), r.a, w, 0) for w in range(2)]
                chunk, mine = pl.ds(item.first, tiling.chunk_size), pl.ds(item.first + item.part * ROWS, ROWS)
                copies.append((r.delta.at[item.batch, item.head, chunk], r.deltas))
                copies.append((kind.column.at[item.batch, item.head, chunk], r.columns))
                if tiling.pair_vectors_fit:
                    copies.append((kind.row.at[item.batch, item.head, mine], r.rows))
                    if reads_memories:
                        copies.append((kind.from_memory.at[item.batch, item.head, mine], r.reads))
                        copies.append((kind.normalizers.at[item.batch, item.head, item.chunk], r.normalizer))
                    if documents is not None:
                        copies.append((r.documents.at[item.batch, chunk], r.chunk_documents))
                needs.fill(turn, *copies)
                stage = needs.slot(turn)
                for half in range(1, halves):
                    for w in range(2):
                        plgpu.copy_gmem_to_smem(part_of_a(half, w), r.a.at[stage, w, half], r.rest_ready.at[stage])
                for n in range(memory_tiles):
                    load_memory(n)
                seen = items.seen_tiles(item.part, later=kind.later)

                @pl.loop(0, seen)
                def _(n: Any) -> None:
                    positions = pl.ds(item.first + items.position(n, later=kind.later), TILE)
                    number = start + memory_tiles + tiles_per_step * n
                    for half in range(halves):
                        source = kind.b.at[item.batch, positions, item.head, pl.ds(half * width, width)]
                        ring.fill(number + half, (source, tiles))
                    ring.fill(number + halves, (kind.e.at[item.batch, positions, item.head], tiles))

                for w in range(2):
                    source = kind.factor.at[item.batch, item.rows(w), item.head]
                    ring.fill(start + memory_tiles + tiles_per_step * seen + w, (source, tiles))

            count = items.each(load)
            if interpret:
                ring.drain(count)
                needs.drain(items.turns)

        cooperate(2, compute=compute, move=move)

    by_columns = plgpu.SMEM((stages, tiling.chunk_size), jnp.float32)
    scratch = {
        "a": plgpu.SMEM((stages, 2, halves, TILE, width), jnp.bfloat16, transforms=TILED),
        "tiles": plgpu.RefUnion(
            plgpu.SMEM((slots, TILE, width), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, width, TILE), jnp.bfloat16, transforms=TILED),
        ),
        "columns": by_columns,
        "deltas": by_columns,
    }
    if halves > 1:
        scratch["rest_ready"] = plgpu.Barrier(num_arrivals=2 * (halves - 1), num_barriers=stages)
    copies = 4
    if tiling.pair_vectors_fit:
        copies += 1 + 2 * reads_memories + (documents is not None)
        scratch["rows"] = plgpu.SMEM((stages, ROWS), jnp.float32)
        if reads_memories:
            scratch["reads"] = plgpu.SMEM((stages, ROWS), jnp.float32)
            scratch["normalizer"] = plgpu.SMEM((stages, width), jnp.float32)
        if documents is not None:
            scratch["chunk_documents"] = by_columns
    scratch |= ring_barriers(stages, 2, copies, ("ready", "free"))
    body.__name__ = "mlstm_pair_gradients"
    gradient, dots = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16), jax.ShapeDtypeStruct((b, h, s), jnp.float32)
    results = launch(
        body,
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "dh": dh,
            "memories": before and before.chunks,
            "normalizers": before and before.normalizers,
            "dmemories": dafter and dafter.chunks,
            "dnormalizers": dafter and dafter.normalizers,
            "reading": reading,
            "written": written,
            "from_memory": from_memory if reads_memories else None,
            "to_memory": to_memory if reads_memories else None,
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
