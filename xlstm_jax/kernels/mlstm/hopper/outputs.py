"""Kernel of the outputs of an mLSTM, given the memory before each chunk; it also computes the gradients of values.

    o[t] = from_memory[t] q[t] memory + sum over the s of t's chunk of (q[t] . k[s]) exp2(row[t] + column[s]) v[s]

over `s <= t`, or `s >= t` for the gradient (anticausal). Without `v` the same sum is the denominator of the outputs. A
single chunk without an initial state reads no memory.

Grid        persistent thread blocks; a work item is the outputs of `ROWS` positions of a chunk, in one or more parts of
            `k` columns of the values.
Shapes      b batch, h heads, s positions, n chunks, k and v head sizes; the first axis of `_smem` buffers is the ring
            stage, and `w` are the two compute warpgroups.
Rings       `items` has the resident data of a work item: queries and vectors. `tiles` streams, in this order, the
            memory in tiles of `TILE` rows, for each step the keys and the parts of the values, and the outputs, which
            the compute warpgroups write to it before they are stored to global memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float

from xlstm_jax.kernels.mlstm.hopper.masking import mask_scores
from xlstm_jax.kernels.mlstm.hopper.schedule import Schedule, WorkItem
from xlstm_jax.kernels.mlstm.hopper.states import Memories
from xlstm_jax.kernels.mlstm.hopper.tiling import Tiling
from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.launch import launch, run_once, specialize_warpgroups
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, Slice, pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import Ring, ring_barriers
from xlstm_jax.kernels.mosaic_gpu.tiles import (
    OPERAND,
    add_matmuls,
    broadcast_rows,
    load_columns,
    load_rows,
    opaque_zero,
    sum_of_matmuls,
    zeros,
)

NORMALIZER_ROWS = 8
"""Rows of a normaliser as an operand of a matmul: bfloat16 parts whose sum is the normaliser, then zeros."""

Sums = tuple[jax.Array, ...]
"""Accumulators of the parts of the outputs."""


@dataclasses.dataclass(kw_only=True)
class _Refs:
    """The references of the kernel; unused ones are `None`."""

    # Inputs in global memory.
    q: Ref  # [b, s, h, k]
    k: Ref
    v: Ref  # [b, s, h, v]
    memories: Ref  # [b, h, n, k, v]
    row: Ref  # [b, h, s], as are the next two
    column: Ref
    from_memory: Ref
    documents: Ref  # [b, s]
    normalizers: Ref  # [b, h, n, NORMALIZER_ROWS, k]
    floor: Ref  # [b, h, s]
    # Outputs in global memory.
    outputs: Ref  # [b, s, h, v]
    denominators: Ref  # [b, h, s]
    # Shared memory.
    q_smem: Ref  # [stages, w, TILE, k]
    tiles_smem: Ref  # [stages, TILE, k]
    row_smem: Ref  # [stages, ROWS]
    column_smem: Ref  # [stages, chunk_size]
    floor_smem: Ref = None  # [stages, ROWS]
    normalizer_smem: Ref = None  # [stages, NORMALIZER_ROWS, k]
    from_memory_smem: Ref = None  # [stages, ROWS]
    documents_smem: Ref = None  # [stages, chunk_size]
    # Barriers.
    items_full: Ref
    items_empty: Ref
    tiles_full: Ref
    tiles_empty: Ref


@dataclasses.dataclass(frozen=True)
class _Work:
    """A work item of one compute warpgroup."""

    item: WorkItem
    warpgroup: Index
    turn: Index
    first_tile: Index
    rows: Slice
    """The positions in the sequence; the next field has those in the work item."""
    rows_of_item: Slice
    stage: Index
    q_tile: Ref


class _RowVectors(NamedTuple):
    """Vectors with one element for each row of a warpgroup."""

    exponent: jax.Array
    floor: jax.Array | None
    document: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel: its references and static parameters."""

    refs: _Refs
    schedule: Schedule
    tiling: Tiling
    anticausal: bool
    eps: float
    interpret: Interpret

    @property
    def items(self) -> Ring:
        """The ring of the resident data of work items."""
        return Ring(self.tiling.output_stages, self.refs.items_full, self.refs.items_empty)

    @property
    def tiles(self) -> Ring:
        """The ring of tiles."""
        return Ring(self.tiling.output_slots, self.refs.tiles_full, self.refs.tiles_empty)

    @property
    def num_parts(self) -> int:
        """The parts of the outputs of a work item, each as wide as queries."""
        return self.tiling.output_parts

    @property
    def num_memory_tiles(self) -> int:
        """The tiles of the part of a memory that a work item reads."""
        return 0 if self.refs.memories is None else self.tiling.qk_dim // TILE * self.num_parts

    @property
    def tiles_per_step(self) -> int:
        """The tiles of a step: keys and the parts of values at `TILE` positions."""
        return 1 + self.num_parts

    @property
    def num_output_tiles(self) -> int:
        """The tiles from which the outputs of a work item are stored."""
        return 2 * self.num_parts

    @property
    def divides(self) -> bool:
        """Whether outputs are divided by their denominators."""
        return self.refs.floor is not None

    def __call__(self) -> None:
        """Run all work items of a thread block."""
        specialize_warpgroups(2, compute=self._compute, load=self._load)

    def _num_tiles(self, item: WorkItem) -> Index:
        """Return the number of tiles of a work item."""
        num_steps = self.schedule.num_tiles(item.part, anticausal=self.anticausal)
        return self.num_memory_tiles + self.tiles_per_step * num_steps + self.num_output_tiles

    def _tile_of_step(self, first_tile: Index, n: Index) -> Index:
        """Return the number of the first tile of a step."""
        return first_tile + self.num_memory_tiles + self.tiles_per_step * n

    def _columns_of_part(self, item: WorkItem, part: int) -> Slice:
        """Return the columns of the values that belong to a part of the outputs."""
        width = self.tiling.qk_dim
        return pl.ds(item.kind * (self.num_parts * width) + part * width, width)

    # The compute warpgroups.

    def _compute(self, warpgroup: Index) -> None:
        end = self.schedule.run(functools.partial(self._compute_item, warpgroup))
        self._finish_stores(warpgroup, end)
        plgpu.wait_smem_to_gmem(0)

    def _output_tile(self, end: Index, warpgroup: Index, part: int) -> Index:
        """Return the number of the tile of a warpgroup's outputs in the work item whose tiles end at `end`."""
        return end - self.num_output_tiles + warpgroup * self.num_parts + part

    def _finish_stores(self, warpgroup: Index, end: Index) -> None:
        """Wait until the outputs of a work item, whose tiles end at `end`, are copied out of shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part in range(self.num_parts):
            self.tiles.release(self._output_tile(end, warpgroup, part))

    def _finish_stores_of_last_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> None:
        pl.when(turn > 0)(lambda: self._finish_stores(warpgroup, first_tile))

    def _compute_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> Index:
        has_one_stage = self.tiling.output_stages == 1
        if has_one_stage:  # there is nothing to do before the queries are loaded
            self._finish_stores_of_last_item(warpgroup, turn, first_tile)
        item = self.schedule.item(turn)
        rows, rows_of_item = item.rows(warpgroup), pl.ds(warpgroup * TILE, TILE)
        stage = self.items.wait(turn) + opaque_zero(first_tile)
        q_tile = self.refs.q_smem.at[stage, warpgroup]
        work = _Work(item, warpgroup, turn, first_tile, rows, rows_of_item, stage, q_tile)
        vectors = self._load_row_vectors(work)
        if self.num_memory_tiles:
            sums, denominator = self._read_memory(work)
        else:
            if not has_one_stage:
                self._finish_stores_of_last_item(warpgroup, turn, first_tile)
            sums = (zeros(TILE, self.tiling.qk_dim),) * self.num_parts
            denominator = zeros(TILE) if self.divides else None
        num_full_tiles = self.schedule.num_full_tiles(item.part, warpgroup, anticausal=self.anticausal)
        add = functools.partial(self._add_step, work, vectors)
        carry = lax.fori_loop(0, num_full_tiles, functools.partial(add, diagonal=False), (sums, denominator))
        sums, denominator = add(num_full_tiles, carry, diagonal=True)
        self.items.release(turn)

        @pl.when(warpgroup == (1 if self.anticausal else 0))
        def _() -> None:  # the last step is for the other warpgroup
            for n in range(self.tiles_per_step):
                self.tiles.skip(self._tile_of_step(first_tile, num_full_tiles + 1) + n)

        if vectors.floor is not None and denominator is not None:
            sums = self._divide(work, sums, denominator, vectors.floor)
        return self._store_outputs(work, sums)

    def _load_row_vectors(self, work: _Work) -> _RowVectors:
        refs, stage = self.refs, work.stage
        exponent = load_rows(refs.row_smem.at[stage, work.rows_of_item])
        floor = load_rows(refs.floor_smem.at[stage, work.rows_of_item]) if self.divides else None
        document = None
        if refs.documents is not None:
            rows_of_chunk = pl.ds(work.item.part * ROWS + work.warpgroup * TILE, TILE)
            document = load_rows(refs.documents_smem.at[stage, rows_of_chunk])
        return _RowVectors(exponent, floor, document)

    def _read_memory(self, work: _Work) -> tuple[Sums, jax.Array | None]:
        """Return the reads from the memory, and from the normaliser if outputs are divided."""
        return pl.run_scoped(
            functools.partial(self._multiply_by_memory, work),
            plgpu.ACC((TILE, NORMALIZER_ROWS), jnp.float32),
            *[plgpu.ACC((TILE, self.tiling.qk_dim), jnp.float32)] * self.num_parts,
        )

    def _multiply_by_memory(self, work: _Work, normalizer_acc: Ref, *accs: Ref) -> tuple[Sums, jax.Array | None]:
        refs, first_tile = self.refs, work.first_tile
        from_memory = load_rows(refs.from_memory_smem.at[work.stage, work.rows_of_item])
        if self.divides:
            plgpu.wgmma(normalizer_acc, work.q_tile, refs.normalizer_smem.at[work.stage].transpose((1, 0)))
        for n in range(self.num_memory_tiles):
            tile_stage = self.tiles.wait(first_tile + n)
            q_columns = work.q_tile.at[:, pl.ds(n // self.num_parts * TILE, TILE)]
            plgpu.wgmma(accs[n % self.num_parts], q_columns, refs.tiles_smem.at[tile_stage])
            if n == 0 and self.tiling.output_stages > 1:
                self._finish_stores_of_last_item(work.warpgroup, work.turn, first_tile)
            if n:
                plgpu.wgmma_wait(1)
                self.tiles.release(first_tile + n - 1)
        results = tuple(acc[...] for acc in accs)
        self.tiles.release(first_tile + self.num_memory_tiles - 1)
        denominator = normalizer_acc[...].sum(axis=1) * from_memory if self.divides else None
        return tuple(x * broadcast_rows(from_memory, self.tiling.qk_dim) for x in results), denominator

    def _scores_operands(self, work: _Work, n: Index) -> list[tuple[Ref, Ref]]:
        """Wait for the keys of a step, and return the operands of its scores."""
        q_tile = self.refs.q_smem.at[work.stage + opaque_zero(self._tile_of_step(work.first_tile, n)), work.warpgroup]
        k_tile = self.refs.tiles_smem.at[self.tiles.wait(self._tile_of_step(work.first_tile, n))]
        return [(q_tile, k_tile.transpose((1, 0)))]

    def _add_step(
        self, work: _Work, vectors: _RowVectors, n: Index, carry: tuple[Sums, jax.Array | None], *, diagonal: bool
    ) -> tuple[Sums, jax.Array | None]:
        """Add the contributions of the `TILE` positions of a step."""
        refs = self.refs
        sums, denominator = carry
        scores = sum_of_matmuls(functools.partial(self._scores_operands, work, n))
        self.tiles.release(self._tile_of_step(work.first_tile, n))
        columns = pl.ds(self.schedule.tile_start(n, anticausal=self.anticausal), TILE)
        exponent = broadcast_rows(vectors.exponent, TILE) + load_columns(refs.column_smem.at[work.stage, columns])
        weights = scores * jnp.exp2(exponent)
        documents = None
        if vectors.document is not None:
            documents = vectors.document, load_columns(refs.documents_smem.at[work.stage, columns])
        weights = mask_scores(weights, diagonal=diagonal, anticausal=self.anticausal, documents=documents)
        if denominator is not None:
            denominator = denominator + weights.sum(axis=1)
        parts = range(self.num_parts)
        v_tiles = [
            refs.tiles_smem.at[self.tiles.wait(self._tile_of_step(work.first_tile, n) + 1 + part)] for part in parts
        ]
        sums = add_matmuls(sums, weights.astype(jnp.bfloat16), v_tiles, self.interpret)
        for part in parts:
            self.tiles.release(self._tile_of_step(work.first_tile, n) + 1 + part)
        return sums, denominator

    def _divide(self, work: _Work, sums: Sums, denominator: jax.Array, floor: jax.Array) -> Sums:
        """Divide the outputs by their denominators, and store the denominators."""
        item = work.item
        inverse = 1.0 / (jnp.maximum(jnp.abs(denominator), floor) + self.eps)
        sums = tuple(x * broadcast_rows(inverse, self.tiling.qk_dim) for x in sums)

        @pl.when(item.kind == 0)
        def _() -> None:
            self.refs.denominators[item.batch, item.head, work.rows] = denominator

        return sums

    def _store_outputs(self, work: _Work, sums: Sums) -> Index:
        """Store the outputs, and return the number after the last tile of the work item."""
        refs, item, warpgroup, parts = self.refs, work.item, work.warpgroup, range(self.num_parts)
        end = work.first_tile + self._num_tiles(item)
        for part in parts:
            staging = refs.tiles_smem.at[self.tiles.wait(self._output_tile(end, warpgroup, part))]
            staging[...] = sums[part].astype(jnp.bfloat16)
        plgpu.commit_smem()
        for part in parts:
            target = refs.outputs.at[item.batch, work.rows, item.head, self._columns_of_part(item, part)]
            staging = refs.tiles_smem.at[self.tiles.stage(self._output_tile(end, warpgroup, part))]
            plgpu.copy_smem_to_gmem(staging, target)
        for part in parts:  # of the other warpgroup
            self.tiles.skip(end - self.num_output_tiles + (1 - warpgroup) * self.num_parts + part)
        return end

    # The load warpgroup.

    def _load(self) -> None:
        count = self.schedule.run(self._load_item)
        if self.interpret:
            self.tiles.drain(count)
            self.items.drain(self.schedule.num_turns)

    def _load_item(self, turn: Index, first_tile: Index) -> Index:
        refs, item = self.refs, self.schedule.item(turn)
        self._load_kept(item, turn)
        for n in range(self.num_memory_tiles):
            rows, columns = pl.ds(n // self.num_parts * TILE, TILE), self._columns_of_part(item, n % self.num_parts)
            source = refs.memories.at[item.batch, item.head, item.chunk, rows, columns]
            self.tiles.fill(first_tile + n, (source, refs.tiles_smem))

        @pl.loop(0, self.schedule.num_tiles(item.part, anticausal=self.anticausal))
        def _(n: Index) -> None:
            positions = pl.ds(item.start + self.schedule.tile_start(n, anticausal=self.anticausal), TILE)
            tile = self._tile_of_step(first_tile, n)
            self.tiles.fill(tile, (refs.k.at[item.batch, positions, item.head], refs.tiles_smem))
            for part in range(self.num_parts):
                source = refs.v.at[item.batch, positions, item.head, self._columns_of_part(item, part)]
                self.tiles.fill(tile + 1 + part, (source, refs.tiles_smem))

        end = first_tile + self._num_tiles(item)
        for n in range(self.num_output_tiles):
            self.tiles.reserve(end - self.num_output_tiles + n)
        return end

    def _load_kept(self, item: WorkItem, turn: Index) -> None:
        """Load the queries and the vectors of a work item."""
        refs = self.refs
        chunk, rows = pl.ds(item.start, self.tiling.chunk_size), pl.ds(item.start + item.part * ROWS, ROWS)
        copies: list[tuple[Any, ...]] = [
            (refs.q.at[item.batch, item.rows(w), item.head], refs.q_smem, w) for w in range(2)
        ]
        if self.divides:
            copies.append((refs.floor.at[item.batch, item.head, rows], refs.floor_smem))
        if refs.normalizers is not None:
            copies.append((refs.normalizers.at[item.batch, item.head, item.chunk], refs.normalizer_smem))
        if refs.from_memory is not None:
            copies.append((refs.from_memory.at[item.batch, item.head, rows], refs.from_memory_smem))
        copies.append((refs.row.at[item.batch, item.head, rows], refs.row_smem))
        copies.append((refs.column.at[item.batch, item.head, chunk], refs.column_smem))
        if refs.documents is not None:
            copies.append((refs.documents.at[item.batch, chunk], refs.documents_smem))
        self.items.fill(turn, *copies)


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
    anticausal: bool = False,
    interpret: Interpret = None,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b h s"] | None]:
    """Compute the outputs of all positions, and their denominators if they are divided.

    Args:
        q: Queries, bfloat16.
        k: Keys, bfloat16.
        v: Values, bfloat16.
        memories: The memory before each chunk, or `None` if all are empty.
        row: The exponents of reading positions.
        column: The exponents of written positions.
        from_memory: The factor of each position's read from the memory of its chunk.
        documents: The index of each position's document within its chunk, if a chunk can have several.
        tiling: The tiles.
        floor: The lower bound of the magnitude of each denominator, if outputs are divided.
        eps: Added to the magnitude of each denominator.
        anticausal: Whether positions read later positions, not earlier ones.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, width = q.shape
    v_dim = v.shape[-1]
    schedule = Schedule(h, s // tiling.chunk_size, v_dim // (tiling.output_parts * width), tiling, b)
    divides, reads_memories = floor is not None, memories is not None
    results = launch(
        lambda refs: _Kernel(refs, schedule, tiling, anticausal, eps, interpret)(),
        _Refs,
        name="mlstm_value_gradients" if anticausal else "mlstm_outputs",
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "memories": memories and memories.chunks,
            "row": row,
            "column": column,
            "from_memory": from_memory if reads_memories else None,
            "documents": documents,
            "normalizers": _as_operand(memories.normalizers) if divides and memories else None,
            "floor": floor,
        },
        outputs={
            "outputs": jax.ShapeDtypeStruct(v.shape, jnp.bfloat16),
            "denominators": jax.ShapeDtypeStruct((b, h, s), jnp.float32) if divides else None,
        },
        scratch=_scratch(tiling, divides=divides, reads_memories=reads_memories, has_documents=documents is not None),
        grid={"block": schedule.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    results = run_once(results)
    return results["outputs"], results.get("denominators")


def _scratch(tiling: Tiling, *, divides: bool, reads_memories: bool, has_documents: bool) -> dict[str, Any]:
    """Return the shared memory and the barriers of a thread block."""
    num_stages, num_slots, width = tiling.output_stages, tiling.output_slots, tiling.qk_dim
    per_row, per_column = (plgpu.SMEM((num_stages, n), jnp.float32) for n in (ROWS, tiling.chunk_size))
    scratch = {
        "q_smem": plgpu.SMEM((num_stages, 2, TILE, width), jnp.bfloat16, transforms=OPERAND),
        "tiles_smem": plgpu.SMEM((num_slots, TILE, width), jnp.bfloat16, transforms=OPERAND),
        "row_smem": per_row,
        "column_smem": per_column,
    }
    if divides:
        scratch["floor_smem"] = per_row
    if divides and reads_memories:
        normalizer_shape = num_stages, NORMALIZER_ROWS, width
        scratch["normalizer_smem"] = plgpu.SMEM(normalizer_shape, jnp.bfloat16, transforms=OPERAND)
    if reads_memories:
        scratch["from_memory_smem"] = per_row
    if has_documents:
        scratch["documents_smem"] = per_column
    num_copies = 4 + divides + (divides and reads_memories) + reads_memories + has_documents
    scratch |= ring_barriers(num_stages, 2, num_copies, ("items_full", "items_empty"))
    return scratch | ring_barriers(num_slots, 2, names=("tiles_full", "tiles_empty"))


def _as_operand(normalizers: Float[Array, "b h n k"]) -> BFloat16[Array, "b h n 8 k"]:
    """Split each normaliser into three bfloat16 numbers with an exact sum, and pad with rows of zeros."""
    parts = []
    for _ in range(3):
        # Not `astype`: XLA may remove a conversion to bfloat16 and back.
        parts.append(lax.reduce_precision(normalizers, exponent_bits=8, mantissa_bits=7))
        normalizers = normalizers - parts[-1]
    rows = jnp.stack(parts, axis=3).astype(jnp.bfloat16)
    return jnp.pad(rows, [(0, 0)] * 3 + [(0, NORMALIZER_ROWS - 3), (0, 0)])
