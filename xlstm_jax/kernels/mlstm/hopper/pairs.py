"""Kernel of the gradients of queries and keys of an mLSTM, which have the same form.

    g[t] = sum over the s of t's chunk of (lhs[t] . rhs[s] + delta) exp2(row[t] + column[s]) summed[s]
           + from_memory[t] (memory lhs[t] + delta normalizer)

    queries    lhs = dh, rhs = v, summed = k, with the memory before the chunk, over s <= t;
               delta belongs to t, in both lines
    keys       lhs = v, rhs = dh, summed = q, with the gradient of the memory after the chunk, over s >= t;
               delta belongs to s in the first line and is one in the second

Grid        persistent thread blocks; a work item is the gradient of queries or of keys at `ROWS` positions of a chunk.
            The work items of a chunk are neighbours, so they run at the same time and share tiles in the cache.
Shapes      b batch, h heads, s positions, n chunks, k and v head sizes; the first axis of `_smem` buffers is the ring
            stage, and `w` are the two compute warpgroups. `lhs` and `rhs` have the width of values: `v / k` parts of
            `k` columns.
Rings       `items` has the resident data of a work item: `lhs` and vectors. `tiles` streams, in this order, the memory
            in tiles of `TILE` columns, for each step the parts of `rhs` and then `summed`, and one tile per warpgroup
            of the primal (queries or keys), which the gradient overwrites before it is stored to global memory.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mlstm.hopper.masking import mask_scores
from xlstm_jax.kernels.mlstm.hopper.pair_refs import PairRefs, Role, roles_of, scratch_of
from xlstm_jax.kernels.mlstm.hopper.schedule import Schedule, WorkItem
from xlstm_jax.kernels.mlstm.hopper.states import Memories
from xlstm_jax.kernels.mlstm.hopper.tiling import Tiling
from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.launch import launch, run_once, specialize_warpgroups
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, Slice, pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import Ring
from xlstm_jax.kernels.mosaic_gpu.tiles import (
    ACCUMULATOR,
    COLUMN,
    add_matmuls,
    broadcast_columns,
    broadcast_rows,
    load_columns,
    load_rows,
    opaque_zero,
    sum_of_matmuls,
    zeros,
)


class PairGradients(NamedTuple):
    """The gradients of queries and keys, and their inner products with the queries and keys at each position."""

    dq: Float[Array, "b s h k"]
    q_dq: Float[Array, "b h s"]
    dk: Float[Array, "b s h k"]
    k_dk: Float[Array, "b h s"]


@dataclasses.dataclass(frozen=True)
class _Work:
    """A work item of one compute warpgroup."""

    role: Role
    item: WorkItem
    warpgroup: Index
    turn: Index
    first_tile: Index
    rows: Slice
    """The positions in the sequence; the next fields have those in the work item and in the chunk."""
    rows_of_item: Slice
    rows_of_chunk: Slice
    stage: Index


class _RowVectors(NamedTuple):
    """Vectors with one element for each row of a warpgroup."""

    exponent: jax.Array
    from_memory: jax.Array | None
    document: jax.Array | None
    delta: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel: its references and static parameters."""

    refs: PairRefs
    schedule: Schedule
    tiling: Tiling
    interpret: Interpret
    tile_buffer: Ref
    """The stages of the ring of tiles, as tiles of rows and as tiles of the memory's columns."""
    memory_buffer: Ref

    @property
    def items(self) -> Ring:
        """The ring of the resident data of work items."""
        return Ring(self.tiling.pair_stages, self.refs.items_full, self.refs.items_empty)

    @property
    def tiles(self) -> Ring:
        """The ring of tiles."""
        return Ring(self.tiling.pair_slots, self.refs.tiles_full, self.refs.tiles_empty)

    @property
    def num_parts(self) -> int:
        """The parts of a row of `lhs` and `rhs`, each as wide as queries."""
        return self.tiling.v_dim // self.tiling.qk_dim

    @property
    def num_memory_tiles(self) -> int:
        """The tiles of a memory."""
        return 0 if self.refs.memories is None else self.tiling.v_dim // TILE

    @property
    def tiles_per_step(self) -> int:
        """The tiles of a step: `rhs` and `summed` at `TILE` positions."""
        return self.num_parts + 1

    @property
    def roles(self) -> tuple[Role, Role]:
        """The roles of the references, by the kind of the work item."""
        return roles_of(self.refs)

    def __call__(self) -> None:
        """Run all work items of a thread block."""
        specialize_warpgroups(2, compute=self._compute, load=self._load)

    def _num_tiles(self, item: WorkItem) -> Index:
        """Return the number of tiles of a work item."""
        queries, keys = (self.schedule.num_tiles(item.part, anticausal=role.anticausal) for role in self.roles)
        return self.num_memory_tiles + self.tiles_per_step * jnp.where(item.kind == 0, queries, keys) + 2

    # The compute warpgroups.

    def _compute(self, warpgroup: Index) -> None:
        def work(turn: Index, first_tile: Index) -> Index:
            item = self.schedule.item(turn)
            if self.tiling.pair_stages == 1:  # there is nothing to do before `lhs` is loaded
                self._finish_stores_of_last_item(warpgroup, turn, first_tile)
            for kind, role in enumerate(self.roles):
                run = functools.partial(self._compute_item, role, item, warpgroup, turn, first_tile)
                pl.when(item.kind == kind)(run)
            return first_tile + self._num_tiles(item)

        self._finish_stores(warpgroup, self.schedule.run(work))
        plgpu.wait_smem_to_gmem(0)

    def _finish_stores(self, warpgroup: Index, end: Index) -> None:
        """Wait until the gradients of a work item, whose tiles end at `end`, are copied out of shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.tiles.release(end - 2 + warpgroup)

    def _finish_stores_of_last_item(self, warpgroup: Index, turn: Index, first_tile: Index) -> None:
        pl.when(turn > 0)(lambda: self._finish_stores(warpgroup, first_tile))

    def _compute_item(self, role: Role, item: WorkItem, warpgroup: Index, turn: Index, first_tile: Index) -> None:
        rows = item.rows(warpgroup)
        rows_of_item = pl.ds(warpgroup * TILE, TILE)
        rows_of_chunk = pl.ds(item.part * ROWS + warpgroup * TILE, TILE)
        stage = self.items.stage(turn) + opaque_zero(first_tile)
        work = _Work(role, item, warpgroup, turn, first_tile, rows, rows_of_item, rows_of_chunk, stage)
        vectors = self._load_row_vectors(work)
        if vectors.from_memory is None:
            if self.num_parts > 1:
                plgpu.barrier_wait(self.refs.rest_of_lhs_full.at[stage])
            if self.tiling.pair_stages > 1:
                self._finish_stores_of_last_item(warpgroup, turn, first_tile)
            total = zeros(TILE, self.tiling.qk_dim)
        else:
            total = self._gradient_from_memory(work, vectors.from_memory, vectors.delta)
        num_full_tiles = self.schedule.num_full_tiles(item.part, warpgroup, anticausal=role.anticausal)
        add = functools.partial(self._add_step, work, vectors)
        total = lax.fori_loop(0, num_full_tiles, functools.partial(add, diagonal=False), total)
        total = add(num_full_tiles, total, diagonal=True)
        self.items.release(turn)

        @pl.when(warpgroup == (1 if role.anticausal else 0))
        def _() -> None:  # the last step is for the other warpgroup
            for n in range(self.tiles_per_step):
                self.tiles.skip(self._tile_of_step(first_tile, num_full_tiles + 1) + n)

        self._store_gradient(work, total)

    def _load_row_vectors(self, work: _Work) -> _RowVectors:
        """Load the row vectors of a warpgroup: from shared memory if they fit, else from global memory early."""
        refs, item, stage = self.refs, work.item, work.stage
        is_staged = self.tiling.pair_vectors_fit

        def load(staged: Ref, ref: Ref) -> jax.Array:
            return load_rows(
                staged.at[stage, work.rows_of_item] if is_staged else ref.at[item.batch, item.head, work.rows]
            )

        if is_staged:
            self.items.wait(work.turn)
        exponent = load(refs.row_smem, work.role.row)
        from_memory = load(refs.from_memory_smem, work.role.from_memory) if self.num_memory_tiles else None
        document = None
        if refs.documents is not None:
            if is_staged:
                document = load_rows(refs.documents_smem.at[stage, work.rows_of_chunk])
            else:
                document = load_rows(refs.documents.at[item.batch, work.rows])
        if not is_staged:
            self.items.wait(work.turn)
        delta = None if work.role.anticausal else load_rows(refs.delta_smem.at[stage, work.rows_of_chunk])
        return _RowVectors(exponent, from_memory, document, delta)

    def _gradient_from_memory(self, work: _Work, from_memory: jax.Array, delta: jax.Array | None) -> jax.Array:
        """Return the second line of the module's formula."""
        width = self.tiling.qk_dim
        acc_shape = plgpu.ACC((TILE, width), jnp.float32)
        total, normalizer = pl.run_scoped(functools.partial(self._multiply_by_memory, work), acc_shape)
        normalizer = broadcast_columns(normalizer)
        if delta is not None:
            normalizer = normalizer * broadcast_rows(delta, width)
        return (total + normalizer) * broadcast_rows(from_memory, width)

    def _multiply_by_memory(self, work: _Work, acc: Ref) -> tuple[jax.Array, jax.Array]:
        """Return the matmul of `lhs` and the memory, and the normaliser."""
        refs, item, first_tile = self.refs, work.item, work.first_tile
        for n in range(self.num_memory_tiles):
            part, column = divmod(n * TILE, self.tiling.qk_dim)
            if part and column == 0:
                plgpu.barrier_wait(refs.rest_of_lhs_full.at[work.stage])
            tile_stage = self.tiles.wait(first_tile + n)
            lhs = refs.lhs_smem.at[work.stage, work.warpgroup, part, :, pl.ds(column, TILE)]
            plgpu.wgmma(acc, lhs, self.memory_buffer.at[tile_stage].transpose((1, 0)))
            if n == 0 and self.tiling.pair_stages > 1:
                self._finish_stores_of_last_item(work.warpgroup, work.turn, first_tile)
            if n:
                plgpu.wgmma_wait(1)
                self.tiles.release(first_tile + n - 1)
        # While the last matmul runs.
        source = work.role.normalizers.at[item.batch, item.head, item.chunk]
        if self.tiling.pair_vectors_fit:
            source = refs.normalizer_smem.at[work.stage]
        normalizer = plgpu.load(source, layout=COLUMN, optimized=False)
        result = acc[...]
        self.tiles.release(first_tile + self.num_memory_tiles - 1)
        return result, normalizer

    def _tile_of_step(self, first_tile: Index, n: Index) -> Index:
        """Return the number of the first tile of a step."""
        return first_tile + self.num_memory_tiles + self.tiles_per_step * n

    def _scores_operands(self, work: _Work, n: Index) -> list[tuple[Ref, Ref]]:
        """Wait for `rhs` of a step, and return the operands of its scores."""
        stage = work.stage + opaque_zero(self._tile_of_step(work.first_tile, n))
        tile_stages = [self.tiles.wait(self._tile_of_step(work.first_tile, n) + part) for part in range(self.num_parts)]
        rhs = [self.tile_buffer.at[tile_stage].transpose((1, 0)) for tile_stage in tile_stages]
        return [(self.refs.lhs_smem.at[stage, work.warpgroup, part], x) for part, x in enumerate(rhs)]

    def _add_step(self, work: _Work, vectors: _RowVectors, n: Index, total: jax.Array, *, diagonal: bool) -> jax.Array:
        """Add the contributions of the `TILE` positions of a step."""
        refs, item, anticausal = self.refs, work.item, work.role.anticausal
        scores = sum_of_matmuls(functools.partial(self._scores_operands, work, n))
        for part in range(self.num_parts):
            self.tiles.release(self._tile_of_step(work.first_tile, n) + part)
        start = self.schedule.tile_start(n, anticausal=anticausal)
        columns = pl.ds(start, TILE)
        documents = None
        if vectors.document is not None:
            source = refs.documents.at[item.batch, pl.ds(item.start + start, TILE)]
            if self.tiling.pair_vectors_fit:
                source = refs.documents_smem.at[work.stage, columns]
            documents = vectors.document, broadcast_columns(plgpu.load(source, layout=COLUMN, optimized=False))
        if vectors.delta is None:
            weights = scores + load_columns(refs.delta_smem.at[work.stage, columns])
        else:
            weights = scores + broadcast_rows(vectors.delta, TILE)
        exponent = broadcast_rows(vectors.exponent, TILE) + load_columns(refs.column_smem.at[work.stage, columns])
        weights *= jnp.exp2(exponent)
        weights = mask_scores(weights, diagonal=diagonal, anticausal=anticausal, documents=documents)
        weights = weights.astype(jnp.bfloat16)
        tile = self._tile_of_step(work.first_tile, n) + self.num_parts
        summed = self.tile_buffer.at[self.tiles.wait(tile)]
        (total,) = add_matmuls((total,), weights, [summed], self.interpret)
        self.tiles.release(self._tile_of_step(work.first_tile, n) + self.num_parts)
        return total

    def _store_gradient(self, work: _Work, total: jax.Array) -> None:
        """Store a gradient and its inner product with its primal; it overwrites the primal's tile in shared memory."""
        role, item = work.role, work.item
        end = work.first_tile + self._num_tiles(item)
        own, other = end - 2 + work.warpgroup, end - 1 - work.warpgroup
        staging = self.tile_buffer.at[self.tiles.wait(own)]
        primal = plgpu.load(staging, layout=ACCUMULATOR, optimized=False).astype(jnp.float32)
        role.primal_gradient[item.batch, item.head, work.rows] = (total * primal).sum(axis=1)
        self.tiles.skip(other)
        plgpu.commit_smem()  # all threads have read the primal
        staging[...] = total.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, role.gradient.at[item.batch, work.rows, item.head])

    # The load warpgroup.

    def _load(self) -> None:
        def work(turn: Index, first_tile: Index) -> Index:
            item = self.schedule.item(turn)
            for kind, role in enumerate(self.roles):
                pl.when(item.kind == kind)(functools.partial(self._load_item, role, item, turn, first_tile))
            return first_tile + self._num_tiles(item)

        count = self.schedule.run(work)
        if self.interpret:
            self.tiles.drain(count)
            self.items.drain(self.schedule.num_turns)

    def _load_item(self, role: Role, item: WorkItem, turn: Index, first_tile: Index) -> None:
        self._load_kept(role, item, turn)
        for n in range(self.num_memory_tiles):
            source = role.memories.at[item.batch, item.head, item.chunk, :, pl.ds(n * TILE, TILE)]
            self.tiles.fill(first_tile + n, (source, self.memory_buffer))
        num_tiles = self.schedule.num_tiles(item.part, anticausal=role.anticausal)

        @pl.loop(0, num_tiles)
        def _(n: Index) -> None:
            start = self.schedule.tile_start(n, anticausal=role.anticausal)
            columns = pl.ds(item.start + start, TILE)
            tile = self._tile_of_step(first_tile, n)
            for part in range(self.num_parts):
                source = role.rhs.at[item.batch, columns, item.head, self._columns_of_part(part)]
                self.tiles.fill(tile + part, (source, self.tile_buffer))
            self.tiles.fill(tile + self.num_parts, (role.summed.at[item.batch, columns, item.head], self.tile_buffer))

        for w in range(2):
            source = role.primal.at[item.batch, item.rows(w), item.head]
            self.tiles.fill(self._tile_of_step(first_tile, num_tiles) + w, (source, self.tile_buffer))

    def _load_kept(self, role: Role, item: WorkItem, turn: Index) -> None:
        """Load `lhs` and the vectors of a work item."""
        refs = self.refs

        def lhs(part: int, w: int) -> Ref:
            return role.lhs.at[item.batch, item.rows(w), item.head, self._columns_of_part(part)]

        copies: list[tuple[Any, ...]] = [(lhs(0, w), refs.lhs_smem, w, 0) for w in range(2)]
        chunk, rows = pl.ds(item.start, self.tiling.chunk_size), pl.ds(item.start + item.part * ROWS, ROWS)
        copies.append((refs.delta.at[item.batch, item.head, chunk], refs.delta_smem))
        copies.append((role.column.at[item.batch, item.head, chunk], refs.column_smem))
        if self.tiling.pair_vectors_fit:
            copies.append((role.row.at[item.batch, item.head, rows], refs.row_smem))
            if self.num_memory_tiles:
                copies.append((role.from_memory.at[item.batch, item.head, rows], refs.from_memory_smem))
                copies.append((role.normalizers.at[item.batch, item.head, item.chunk], refs.normalizer_smem))
            if refs.documents is not None:
                copies.append((refs.documents.at[item.batch, chunk], refs.documents_smem))
        self.items.fill(turn, *copies)
        stage = self.items.stage(turn)
        for part in range(1, self.num_parts):
            for w in range(2):
                full = refs.rest_of_lhs_full.at[stage]
                plgpu.copy_gmem_to_smem(lhs(part, w), refs.lhs_smem.at[stage, w, part], full)

    def _columns_of_part(self, part: int) -> Slice:
        return pl.ds(part * self.tiling.qk_dim, self.tiling.qk_dim)


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
    interpret: Interpret = None,
) -> PairGradients:
    """Compute the gradients of queries and keys.

    Args:
        q: Queries, bfloat16, like the next three.
        k: Keys.
        v: Values.
        dh: The gradients of the outputs.
        before: The memories before each chunk; `None` if all are empty.
        dafter: The gradients of the memories after each chunk; `None` if `before` is.
        reading: The exponents of reading positions, with their divisors.
        written: The exponents of written positions.
        from_memory: The factor of each position's read from the memory before its chunk, with its divisor.
        to_memory: The factor of each position's write to the memory after its chunk.
        delta: The gradients of the divisors, in units of the divisors.
        documents: The index of each position's document within its chunk, if a chunk can have several.
        tiling: The tiles.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, _ = q.shape
    schedule = Schedule(h, s // tiling.chunk_size, 2, tiling, b)
    reads_memories = before is not None
    gradient, inner_products = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16), jax.ShapeDtypeStruct((b, h, s), jnp.float32)

    def kernel(refs: PairRefs) -> None:
        tile_buffer, memory_buffer = refs.tiles_smem
        _Kernel(refs, schedule, tiling, interpret, tile_buffer, memory_buffer)()

    results = launch(
        kernel,
        PairRefs,
        name="mlstm_pair_gradients",
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
        outputs={"dq": gradient, "q_dq": inner_products, "dk": gradient, "k_dk": inner_products},
        scratch=scratch_of(tiling, reads_memories=reads_memories, has_documents=documents is not None),
        grid={"block": schedule.num_blocks},
        num_warpgroups=3,
        interpret=interpret,
    )
    return PairGradients(**run_once(results))
