"""The outputs of an mLSTM from the memories before each chunk, and with other roles the gradient of its values.

    o[t] = from_memory[t] q[t] memory + sum over the s of t's chunk of (q[t] . k[s]) exp2(row[t] + column[s]) v[s]

over `s <= t`, or `s >= t` for the gradient. Without `v` the same sum is the denominator of the outputs.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from xlstm_jax.kernels.mlstm.mosaic.items import Items
from xlstm_jax.kernels.mlstm.mosaic.tiles import (
    TILED,
    Ring,
    add_products,
    by_row,
    cooperate,
    launch,
    load_column,
    load_row,
    masked,
    product,
    ring_barriers,
)
from xlstm_jax.kernels.mlstm.mosaic.tiling import TILE, Tiling
from xlstm_jax.kernels.mosaic_gpu import pl, plgpu

NORMALIZER_ROWS = 8
"""Rows that a normaliser takes as an operand of a product: parts of it that add up, then zeros."""


def compute_outputs(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    memories: Float[Array, "b h n k v"],
    row: Float[Array, "b h s"],
    column: Float[Array, "b h s"],
    from_memory: Float[Array, "b h s"],
    documents: Float[Array, "b s"] | None,
    tiling: Tiling,
    *,
    normalizers: Float[Array, "b h n k"] | None = None,
    floor: Float[Array, "b h s"] | None = None,
    eps: float = 0.0,
    later: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b h s"] | None]:
    """Compute the outputs of all positions, and their denominators if there are normalisers to divide by.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        memories: The memory that each chunk reads.
        row: The exponents of reading positions.
        column: The exponents of positions that are read.
        from_memory: What each position reads of its chunk's memory.
        documents: The number of each position's document within its chunk, if a chunk can have several.
        tiling: The tiles.
        normalizers: The normaliser that each chunk reads.
        floor: The least size of each denominator.
        eps: Added to the size of each denominator.
        later: Whether positions read what comes after them, not what came before.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, width = q.shape
    v_dim, pieces, slots = v.shape[-1], tiling.pieces, tiling.output_slots
    block_width = pieces * width
    items = Items(h, s // tiling.chunk_size, v_dim // block_width, tiling, b)
    memory_tiles = width // TILE * pieces
    tiles_per_step = 1 + pieces
    divides = normalizers is not None
    # Tiles of memories that can be on their way before the queries, whose place is taken until the outputs have left.
    early = min(slots, memory_tiles)

    def body(r: SimpleNamespace) -> None:
        ring = Ring(slots, r.full, r.empty)

        def tiles_of(item: Any) -> Any:
            return memory_tiles + tiles_per_step * items.seen_tiles(item.part, later=later)

        def compute(warpgroup: Any) -> None:
            queries = r.queries.at[warpgroup, 0]

            def outputs(turn: Any, start: Any) -> Any:
                item = items.item(turn)
                rows = item.rows(warpgroup)

                def per_row(ref: Any) -> jax.Array:
                    return load_row(ref.at[item.batch, item.head, rows])

                # All at once and early, as they come from far away.
                exponent, read = per_row(r.row), per_row(r.from_memory)
                least = per_row(r.floor) if divides else None
                document = load_row(r.documents.at[item.batch, rows]) if documents is not None else None
                plgpu.barrier_wait(r.ready)
                denominator = read
                if divides:
                    parts = product(queries, r.normalizer.transpose((1, 0)), NORMALIZER_ROWS)
                    denominator = parts.sum(axis=1) * read

                def from_memory(*sums: Any) -> tuple[jax.Array, ...]:
                    for n in range(memory_tiles):
                        slot = ring.take(start + n)
                        part = queries.at[:, pl.ds(n // pieces * TILE, TILE)]
                        plgpu.wgmma(sums[n % pieces], part, r.tiles.at[slot])
                        if n:
                            plgpu.wgmma_wait(1)
                            ring.give_back(start + n - 1)
                    results = tuple(x[...] for x in sums)
                    ring.give_back(start + memory_tiles - 1)
                    return results

                sums = pl.run_scoped(from_memory, *[plgpu.ACC((TILE, width), jnp.float32)] * pieces)
                sums = tuple(x * by_row(read, width) for x in sums)

                def add_tile(n: Any, carried: Any, *, diagonal: bool) -> Any:
                    sums, denominator = carried
                    number = start + memory_tiles + tiles_per_step * n
                    scores = product(queries, r.tiles.at[ring.take(number)].transpose((1, 0)), TILE)
                    ring.give_back(number)
                    positions = pl.ds(items.position(n, later=later), TILE)
                    weights = scores * jnp.exp2(by_row(exponent, TILE) + load_column(r.columns.at[positions]))
                    pair = None
                    if document is not None:
                        pair = document, load_column(r.column_documents.at[positions])
                    weights = masked(weights, diagonal=diagonal, later=later, documents=pair)
                    if divides:
                        denominator = denominator + weights.sum(axis=1)
                    weights = weights.astype(jnp.bfloat16)
                    values = [r.tiles.at[ring.take(number + 1 + piece)] for piece in range(pieces)]
                    sums = add_products(sums, weights, values, interpret)
                    for piece in range(pieces):
                        ring.give_back(number + 1 + piece)
                    return sums, denominator

                clear = items.clear_tiles(item.part, warpgroup, later=later)
                carried = lax.fori_loop(0, clear, functools.partial(add_tile, diagonal=False), (sums, denominator))
                sums, denominator = add_tile(clear, carried, diagonal=True)

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

                for piece in range(pieces):
                    r.queries[warpgroup, piece] = sums[piece].astype(jnp.bfloat16)
                plgpu.commit_smem()
                for piece in range(pieces):
                    columns = pl.ds(item.kind * block_width + piece * width, width)
                    target = r.outputs.at[item.batch, rows, item.head, columns]
                    plgpu.copy_smem_to_gmem(r.queries.at[warpgroup, piece], target)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(r.free)
                return start + tiles_of(item)

            items.each(outputs)
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

                for n in range(early):
                    load_memory(n)

                items.after_first(turn, lambda: plgpu.barrier_wait(r.free))

                for w in range(2):
                    source = r.q.at[item.batch, item.rows(w), item.head]
                    plgpu.copy_gmem_to_smem(source, r.queries.at[w, 0], r.ready)
                chunk = pl.ds(item.first, tiling.chunk_size)
                plgpu.copy_gmem_to_smem(r.column.at[item.batch, item.head, chunk], r.columns, r.ready)
                if divides:
                    source = r.normalizers.at[item.batch, item.head, item.chunk]
                    plgpu.copy_gmem_to_smem(source, r.normalizer, r.ready)
                if documents is not None:
                    plgpu.copy_gmem_to_smem(r.documents.at[item.batch, chunk], r.column_documents, r.ready)
                for n in range(early, memory_tiles):
                    load_memory(n)

                @pl.loop(0, items.seen_tiles(item.part, later=later))
                def _(n: Any) -> None:
                    positions = pl.ds(item.first + items.position(n, later=later), TILE)
                    number = start + memory_tiles + tiles_per_step * n
                    ring.fill(number, (r.k.at[item.batch, positions, item.head], r.tiles))
                    for piece in range(pieces):
                        source = r.v.at[item.batch, positions, item.head, columns(piece)]
                        ring.fill(number + 1 + piece, (source, r.tiles))

                return start + tiles_of(item)

            count = items.each(load)
            if interpret:
                ring.drain(count)
                plgpu.barrier_wait(r.free)

        cooperate(2, compute=compute, move=move)

    scratch = {
        "queries": plgpu.SMEM((2, pieces, TILE, width), jnp.bfloat16, transforms=TILED),  # later the outputs
        "tiles": plgpu.SMEM((slots, TILE, width), jnp.bfloat16, transforms=TILED),
        "columns": plgpu.SMEM((tiling.chunk_size,), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=3 + divides + (documents is not None)),
        "free": plgpu.Barrier(num_arrivals=2),
    }
    if divides:
        scratch["normalizer"] = plgpu.SMEM((NORMALIZER_ROWS, width), jnp.bfloat16, transforms=TILED)
    if documents is not None:
        scratch["column_documents"] = plgpu.SMEM((tiling.chunk_size,), jnp.float32)
    body.__name__ = "mlstm_value_gradients" if later else "mlstm_outputs"
    results = launch(
        body,
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "memories": memories,
            "row": row,
            "column": column,
            "from_memory": from_memory,
            "documents": documents,
            "normalizers": None if normalizers is None else _as_operand(normalizers),
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
