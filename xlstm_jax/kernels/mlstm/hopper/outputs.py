"""The outputs of an mLSTM from the memories before each chunk, and with other roles the gradient of its values.

    o[t] = from_memory[t] q[t] memory + sum over the s of t's chunk of (q[t] . k[s]) exp2(row[t] + column[s]) v[s]

over `s <= t`, or `s >= t` for the gradient. Without `v` the same sum is the denominator of the outputs. A chunk that is
alone reads no memory.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from xlstm_jax.kernels.mlstm.hopper.items import Items
from xlstm_jax.kernels.mlstm.hopper.states import Memories
from xlstm_jax.kernels.mlstm.hopper.tiles import (
    add_products,
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
from xlstm_jax.kernels.mosaic_gpu.ring import TILED, Ring, cooperate, ring_barriers

NORMALIZER_ROWS = 8
"""Rows that a normaliser takes as an operand of a product: parts of it that add up, then zeros."""


def compute_outputs(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    memories: Memories | None,
    row: Float[Array, "b h s"],
    column: Float[Array, "b h s"],
    from_memory: Float[Array, "b h s"],
    documents: Float[Array, "b s"] | None,
    tiling: Tiling,
    *,
    floor: Float[Array, "b h s"] | None = None,
    eps: float = 0.0,
    later: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b h s"] | None]:
    """Compute the outputs of all positions, and their denominators if they are divided.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        memories: The memory that each chunk reads, or `None` if all are empty.
        row: The exponents of reading positions.
        column: The exponents of positions that are read.
        from_memory: What each position reads of its chunk's memory.
        documents: The number of each position's document within its chunk, if a chunk can have several.
        tiling: The tiles.
        floor: The least size of each denominator, if outputs are divided.
        eps: Added to the size of each denominator.
        later: Whether positions read what comes after them, not what came before.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, width = q.shape
    v_dim, pieces, slots, stages = v.shape[-1], tiling.pieces, tiling.output_slots, tiling.output_stages
    block_width = pieces * width
    items = Items(h, s // tiling.chunk_size, v_dim // block_width, tiling, b)
    memory_tiles = 0 if memories is None else width // TILE * pieces
    tiles_per_step = 1 + pieces
    divides = floor is not None
    reads_normalizers = divides and memories is not None
    staging_tiles = 2 * pieces  # from which the outputs leave, at the end of a piece of work

    def body(r: SimpleNamespace) -> None:
        ring, needs = Ring(slots, r.full, r.empty), Ring(stages, r.ready, r.free)

        def tiles_of(item: Any) -> Any:
            return memory_tiles + tiles_per_step * items.seen_tiles(item.part, later=later) + staging_tiles

        def compute(warpgroup: Any) -> None:
            def staging(end: Any, piece: int) -> Any:
                """Return the number of a tile for outputs of this warpgroup; `end` is the first of the next piece."""
                return end - staging_tiles + warpgroup * pieces + piece

            def let_outputs_leave(end: Any) -> None:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for piece in range(pieces):
                    ring.give_back(staging(end, piece))

            def outputs(turn: Any, start: Any) -> Any:
                if stages == 1:  # there is nothing to do before the queries are there
                    pl.when(turn > 0)(lambda: let_outputs_leave(start))
                item = items.item(turn)
                rows, own = item.rows(warpgroup), pl.ds(warpgroup * TILE, TILE)
                stage = needs.take(turn) + unknown_zero(start)
                queries = r.queries.at[stage, warpgroup]
                exponent = load_row(r.rows.at[stage, own])
                least = load_row(r.floors.at[stage, own]) if divides else None
                document = None
                if documents is not None:
                    document = load_row(r.chunk_documents.at[stage, pl.ds(item.part * ROWS + warpgroup * TILE, TILE)])

                def from_memory(normalizer: Any, *sums: Any) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
                    read = load_row(r.reads.at[stage, own])
                    if reads_normalizers:
                        plgpu.wgmma(normalizer, queries, r.normalizer.at[stage].transpose((1, 0)))
                    for n in range(memory_tiles):
                        slot = ring.take(start + n)
                        part = queries.at[:, pl.ds(n // pieces * TILE, TILE)]
                        plgpu.wgmma(sums[n % pieces], part, r.tiles.at[slot])
                        if n == 0 and stages > 1:
                            pl.when(turn > 0)(lambda: let_outputs_leave(start))
                        if n:
                            plgpu.wgmma_wait(1)
                            ring.give_back(start + n - 1)
                    results = tuple(x[...] for x in sums)
                    ring.give_back(start + memory_tiles - 1)
                    denominator = normalizer[...].sum(axis=1) * read if divides else None
                    return tuple(x * by_row(read, width) for x in results), denominator

                if memories is None:
                    if stages > 1:
                        pl.when(turn > 0)(lambda: let_outputs_leave(start))
                    sums, denominator = (zeros(TILE, width),) * pieces, zeros(TILE) if divides else None
                else:
                    sums, denominator = pl.run_scoped(
                        from_memory,
                        plgpu.ACC((TILE, NORMALIZER_ROWS), jnp.float32),
                        *[plgpu.ACC((TILE, width), jnp.float32)] * pieces,
                    )

                clear = items.clear_tiles(item.part, warpgroup, later=later)

                def number_of(n: Any) -> Any:
                    return start + memory_tiles + tiles_per_step * n

                def operands(n: Any) -> list[tuple[Any, Any]]:
                    """Wait for the keys of a step, and return what its scores are the product of."""
                    left = r.queries.at[stage + unknown_zero(number_of(n)), warpgroup]
                    return [(left, r.tiles.at[ring.take(number_of(n))].transpose((1, 0)))]

                def add(n: Any, carried: Any, *, diagonal: bool) -> Any:
                    """Add what a step has."""
                    sums, denominator = carried
                    scores = product(functools.partial(operands, n))
                    ring.give_back(number_of(n))
                    positions = pl.ds(items.position(n, later=later), TILE)
                    weights = scores * jnp.exp2(by_row(exponent, TILE) + load_column(r.columns.at[stage, positions]))
                    pair = None
                    if document is not None:
                        pair = document, load_column(r.chunk_documents.at[stage, positions])
                    weights = masked(weights, diagonal=diagonal, later=later, documents=pair)
                    if divides:
                        denominator = denominator + weights.sum(axis=1)
                    values = [r.tiles.at[ring.take(number_of(n) + 1 + piece)] for piece in range(pieces)]
                    sums = add_products(sums, weights.astype(jnp.bfloat16), values, interpret)
                    for piece in range(pieces):
                        ring.give_back(number_of(n) + 1 + piece)
                    return sums, denominator

                carried = lax.fori_loop(0, clear, functools.partial(add, diagonal=False), (sums, denominator))
                sums, denominator = add(clear, carried, diagonal=True)
                needs.give_back(turn)

                @pl.when(warpgroup == (1 if later else 0))
                def _() -> None:  # the last tiles are for the other warpgroup
                    for n in range(tiles_per_step):
                        number = start + memory_tiles + tiles_per_step * (clear + 1) + n
                        ring.take(number)
                        ring.give_back(number)

                if least is not None:
                    inverse = 1.0 / (jnp.maximum(jnp.abs(denominator), least) + eps)
                    sums = tuple(x * by_row(inverse, width) for x in sums)

                    @pl.when(item.kind == 0)
                    def _() -> None:
                        r.denominators[item.batch, item.head, rows] = denominator

                end = start + tiles_of(item)
                for piece in range(pieces):
                    place = r.tiles.at[ring.take(staging(end, piece))]
                    place[...] = sums[piece].astype(jnp.bfloat16)
                plgpu.commit_smem()
                for piece in range(pieces):
                    columns = pl.ds(item.kind * block_width + piece * width, width)
                    target = r.outputs.at[item.batch, rows, item.head, columns]
                    plgpu.copy_smem_to_gmem(r.tiles.at[ring.slot(staging(end, piece))], target)
                for piece in range(pieces):  # of the other warpgroup
                    number = end - staging_tiles + (1 - warpgroup) * pieces + piece
                    ring.take(number)
                    ring.give_back(number)
                return end

            let_outputs_leave(items.each(outputs))
            plgpu.wait_smem_to_gmem(0)

        def move() -> None:
            def load(turn: Any, start: Any) -> Any:
                item = items.item(turn)

                def columns(piece: int) -> Any:
                    return pl.ds(item.kind * block_width + piece * width, width)

                def load_memory(n: int) -> None:
                    part = pl.ds(n // pieces * TILE, TILE)
                    source = r.memories.at[item.batch, item.head, item.chunk, part, columns(n % pieces)]
                    ring.fill(start + n, (source, r.tiles))

                chunk, mine = pl.ds(item.first, tiling.chunk_size), pl.ds(item.first + item.part * ROWS, ROWS)
                copies: list[tuple[Any, ...]] = [
                    (r.q.at[item.batch, item.rows(w), item.head], r.queries, w) for w in range(2)
                ]
                if divides:
                    copies.append((r.floor.at[item.batch, item.head, mine], r.floors))
                if reads_normalizers:
                    copies.append((r.normalizers.at[item.batch, item.head, item.chunk], r.normalizer))
                if memories is not None:
                    copies.append((r.from_memory.at[item.batch, item.head, mine], r.reads))
                copies.append((r.row.at[item.batch, item.head, mine], r.rows))
                copies.append((r.column.at[item.batch, item.head, chunk], r.columns))
                if documents is not None:
                    copies.append((r.documents.at[item.batch, chunk], r.chunk_documents))
                needs.fill(turn, *copies)
                for n in range(memory_tiles):
                    load_memory(n)

                @pl.loop(0, items.seen_tiles(item.part, later=later))
                def _(n: Any) -> None:
                    positions = pl.ds(item.first + items.position(n, later=later), TILE)
                    number = start + memory_tiles + tiles_per_step * n
                    ring.fill(number, (r.k.at[item.batch, positions, item.head], r.tiles))
                    for piece in range(pieces):
                        source = r.v.at[item.batch, positions, item.head, columns(piece)]
                        ring.fill(number + 1 + piece, (source, r.tiles))

                end = start + tiles_of(item)
                for n in range(staging_tiles):
                    ring.reserve(end - staging_tiles + n)
                return end

            count = items.each(load)
            if interpret:
                ring.drain(count)
                needs.drain(items.turns)

        cooperate(2, compute=compute, move=move)

    by_rows, by_columns = (plgpu.SMEM((stages, n), jnp.float32) for n in (ROWS, tiling.chunk_size))
    scratch = {
        "queries": plgpu.SMEM((stages, 2, TILE, width), jnp.bfloat16, transforms=TILED),
        "tiles": plgpu.SMEM((slots, TILE, width), jnp.bfloat16, transforms=TILED),
        "rows": by_rows,
        "columns": by_columns,
    }
    if divides:
        scratch["floors"] = by_rows
    if reads_normalizers:
        scratch["normalizer"] = plgpu.SMEM((stages, NORMALIZER_ROWS, width), jnp.bfloat16, transforms=TILED)
    if memories is not None:
        scratch["reads"] = by_rows
    if documents is not None:
        scratch["chunk_documents"] = by_columns
    copies = 4 + divides + reads_normalizers + (memories is not None) + (documents is not None)
    scratch |= ring_barriers(stages, 2, copies, ("ready", "free"))
    body.__name__ = "mlstm_value_gradients" if later else "mlstm_outputs"
    results = launch(
        body,
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "memories": memories and memories.chunks,
            "row": row,
            "column": column,
            "from_memory": from_memory if memories else None,
            "documents": documents,
            "normalizers": _as_operand(memories.normalizers) if divides and memories else None,
            "floor": floor,
        },
        outputs={
            "outputs": jax.ShapeDtypeStruct(v.shape, jnp.bfloat16),
            "denominators": jax.ShapeDtypeStruct((b, h, s), jnp.float32) if divides else None,
        },
        scratch=scratch | ring_barriers(slots, 2),
        grid={"block": items.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    return results["outputs"], results.get("denominators")


def _as_operand(normalizers: Float[Array, "b h n k"]) -> BFloat16[Array, "b h n 8 k"]:
    """Write each normaliser as a sum of three bfloat16 numbers, which is exact, and add rows of zeros."""
    parts = []
    for _ in range(3):
        # Not `astype`: XLA may drop a conversion to bfloat16 and back.
        parts.append(lax.reduce_precision(normalizers, exponent_bits=8, mantissa_bits=7))
        normalizers = normalizers - parts[-1]
    rows = jnp.stack(parts, axis=3).astype(jnp.bfloat16)
    return jnp.pad(rows, [(0, 0)] * 3 + [(0, NORMALIZER_ROWS - 3), (0, 0)])
