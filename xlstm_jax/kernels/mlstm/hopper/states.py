"""Kernel of the memories of an mLSTM before each chunk, or of their gradients after each, in one pass over positions.

    memory[c] = keep[c] memory[c-1] + sum over the chunk of weight[s] k[s] v[s]^T,    and without v the normaliser

A thread block has its part of the memory in float32 accumulators, and stores it as bfloat16 before every chunk. Keys
are loaded transposed from shared memory into registers, weighted there, and are the left operand of the matmul: no
weighted copy is stored, and the normaliser is the sum of that operand.

Grid        (batch, head, columns, rows) of the memory; one or two compute warpgroups share the rows of a block, or its
            columns if there are too few rows.
Shapes      b batch, h heads, s positions, n chunks, k and v head sizes; the first axis of the ring's `_smem` buffers is
            the stage.
Ring        `TILE` positions: keys, values and weights.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mlstm.hopper.tiling import StateTiling, Tiling
from xlstm_jax.kernels.mosaic_gpu.device import TILE
from xlstm_jax.kernels.mosaic_gpu.launch import launch, run_once, specialize_warpgroups
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, Slice, pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import Ring, ring_barriers
from xlstm_jax.kernels.mosaic_gpu.tiles import ACCUMULATOR, OPERAND, ROW, load_columns, zeros


class Memories(NamedTuple):
    """The memories of a sequence before each of `n` chunks, and at its end."""

    chunks: Float[Array, "b h n k v"]
    normalizers: Float[Array, "b h n k"]
    last: Float[Array, "b h k v"]
    last_normalizer: Float[Array, "b h k"]


@dataclasses.dataclass(kw_only=True)
class _Refs:
    """The references of the kernel; unused ones are `None`."""

    # Inputs in global memory.
    k: Ref  # [b, s, h, k]
    v: Ref  # [b, s, h, v]
    weights: Ref  # [b, h, s]
    normalizer_weights: Ref  # [b, h, s]
    keep: Ref  # [b, h, n]
    first: Ref  # [b, h, k, v]
    first_normalizer: Ref  # [b, h, k]
    # Outputs in global memory.
    chunks: Ref = None  # [b, h, n, k, v]
    normalizers: Ref = None  # [b, h, n, k]
    last: Ref  # [b, h, k, v]
    last_normalizer: Ref  # [b, h, k]
    # Shared memory.
    k_smem: Ref  # [stages, TILE, rows]
    v_smem: Ref  # [stages, TILE, columns]
    weights_smem: Ref  # [stages, TILE]
    normalizer_weights_smem: Ref = None  # [stages, TILE]
    staging_smem: Ref = None  # [warpgroups, TILE, columns of a warpgroup]
    # Barriers.
    full: Ref
    empty: Ref


@dataclasses.dataclass(frozen=True)
class _Work:
    """The part of a memory of one compute warpgroup."""

    batch: Index
    head: Index
    warpgroup: Index
    k_offset: Index
    """The first row within the part of the thread block; the next field has the first column."""
    v_offset: Index
    rows: Slice
    """The rows of the memory; the next field has the columns."""
    columns: Slice
    writes_normalizer: Index


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel: its references and static parameters."""

    refs: _Refs
    tiling: Tiling
    num_chunks: int
    backwards: bool
    interpret: Interpret

    @property
    def block(self) -> StateTiling:
        """The part of a memory of one thread block."""
        return self.tiling.states

    @property
    def ring(self) -> Ring:
        """The ring of tiles."""
        return Ring(self.block.slots, self.refs.full, self.refs.empty)

    @property
    def tiles_per_chunk(self) -> int:
        """The tiles of a chunk."""
        return self.tiling.chunk_size // TILE

    def __call__(self) -> None:
        """Run a thread block."""
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        k_start = lax.axis_index("rows") * self.block.rows
        v_start = lax.axis_index("columns") * self.block.columns
        place = batch, head, k_start, v_start
        specialize_warpgroups(
            self.block.num_warpgroups,
            compute=functools.partial(self._compute, *place),
            load=functools.partial(self._load, *place),
        )

    # The compute warpgroups.

    def _compute(self, batch: Index, head: Index, k_start: Index, v_start: Index, warpgroup: Index) -> None:
        refs, width = self.refs, self.block.width
        k_offset = 0 if self.block.splits_columns else warpgroup * TILE
        v_offset = warpgroup * width if self.block.splits_columns else 0
        rows, columns = pl.ds(k_start + k_offset, TILE), pl.ds(v_start + v_offset, width)
        writes_normalizer = v_start + v_offset == 0
        work = _Work(batch, head, warpgroup, k_offset, v_offset, rows, columns, writes_normalizer)
        if refs.first is None:
            memory, normalizer = zeros(TILE, width), zeros(TILE)
        else:
            memory = plgpu.load(refs.first.at[batch, head, rows, columns], layout=ACCUMULATOR, optimized=False)
            normalizer = plgpu.load(refs.first_normalizer.at[batch, head, rows], layout=ROW, optimized=False)
        carry = memory, normalizer, refs.keep[batch, head, self._chunk_of_step(0)]
        memory, normalizer, _ = lax.fori_loop(0, self.num_chunks, functools.partial(self._pass_chunk, work), carry)
        refs.last[batch, head, rows, columns] = memory

        @pl.when(writes_normalizer)
        def _() -> None:
            refs.last_normalizer[batch, head, rows] = normalizer

        if refs.chunks is not None:
            plgpu.wait_smem_to_gmem(0)

    def _chunk_of_step(self, step: Index) -> Index:
        step = jnp.minimum(step, self.num_chunks - 1)
        return self.num_chunks - 1 - step if self.backwards else step

    def _pass_chunk(self, work: _Work, step: Index, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Store the memory before a chunk, and add the update by the chunk."""
        memory, normalizer, keep = carry
        if self.refs.chunks is not None:
            self._store(work, self._chunk_of_step(step), memory, normalizer)
        memory, normalizer = memory * keep, normalizer * keep
        keep = self.refs.keep[work.batch, work.head, self._chunk_of_step(step + 1)]  # early, to hide the latency
        add_chunk = self._add_chunk_simulated if self.interpret else self._add_chunk
        return *add_chunk(work, step * self.tiles_per_chunk, memory, normalizer), keep

    def _store(self, work: _Work, chunk: Index, memory: jax.Array, normalizer: jax.Array) -> None:
        refs, warpgroup = self.refs, work.warpgroup
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous store has left the staging buffer
        refs.staging_smem[warpgroup] = memory.astype(jnp.bfloat16)
        plgpu.commit_smem()
        target = refs.chunks.at[work.batch, work.head, chunk, work.rows, work.columns]
        plgpu.copy_smem_to_gmem(refs.staging_smem.at[warpgroup], target)

        @pl.when(work.writes_normalizer)
        def _() -> None:
            refs.normalizers[work.batch, work.head, chunk, work.rows] = normalizer

    def _weighted_keys(self, work: _Work, stage: Index) -> tuple[jax.Array, jax.Array]:
        """Return the weighted keys, transposed, and their contribution to the normaliser."""
        refs = self.refs
        k_tile = refs.k_smem.at[stage, :, pl.ds(work.k_offset, TILE)].transpose((1, 0))
        keys = plgpu.load(k_tile, layout=ACCUMULATOR, optimized=False).astype(jnp.float32)
        weighted = keys * load_columns(refs.weights_smem.at[stage])
        if refs.normalizer_weights is None:
            return weighted, weighted.sum(axis=1)
        return weighted, (keys * load_columns(refs.normalizer_weights_smem.at[stage])).sum(axis=1)

    def _v_tile(self, work: _Work, stage: Index) -> Ref:
        v_smem = self.refs.v_smem
        if self.block.splits_columns:
            return v_smem.at[stage, :, pl.ds(work.v_offset, self.block.width)]
        return v_smem.at[stage]

    def _add_chunk(
        self, work: _Work, first_tile: Index, memory: jax.Array, normalizer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Add the update by the positions of a chunk."""

        def accumulate(refs: tuple[Ref, Ref]) -> None:
            memory_acc, normalizer_ref = refs
            for n in range(self.tiles_per_chunk):
                stage = self.ring.wait(first_tile + n)
                keys, added = self._weighted_keys(work, stage)  # overlaps with the previous matmul
                normalizer_ref[...] += added
                plgpu.wgmma(memory_acc, keys.astype(jnp.bfloat16), self._v_tile(work, stage))
                if n:
                    plgpu.wgmma_wait(1)
                    self.ring.release(first_tile + n - 1)
            plgpu.wgmma_wait(0)
            self.ring.release(first_tile + self.tiles_per_chunk - 1)

        memory, normalizer = pl.run_state(accumulate)((plgpu.ACC.init(memory), normalizer))
        return memory, normalizer

    def _add_chunk_simulated(
        self, work: _Work, first_tile: Index, memory: jax.Array, normalizer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Do the same on the simulated GPU, which does not support matmuls with an operand in registers."""
        for n in range(self.tiles_per_chunk):
            stage = self.ring.wait(first_tile + n)
            keys, added = self._weighted_keys(work, stage)
            rounded = keys.astype(jnp.bfloat16).astype(jnp.float32)
            memory = memory + jnp.dot(rounded, self._v_tile(work, stage)[...].astype(jnp.float32))
            normalizer = normalizer + added
            self.ring.release(first_tile + n)
        return memory, normalizer

    # The load warpgroup.

    def _load(self, batch: Index, head: Index, k_start: Index, v_start: Index) -> None:
        refs, num_tiles = self.refs, self.num_chunks * self.tiles_per_chunk

        @pl.loop(0, num_tiles)
        def _(n: Index) -> None:
            positions = pl.ds((num_tiles - 1 - n if self.backwards else n) * TILE, TILE)
            copies = [
                (refs.k.at[batch, positions, head, pl.ds(k_start, self.block.rows)], refs.k_smem),
                (refs.v.at[batch, positions, head, pl.ds(v_start, self.block.columns)], refs.v_smem),
                (refs.weights.at[batch, head, positions], refs.weights_smem),
            ]
            if refs.normalizer_weights is not None:
                copies.append((refs.normalizer_weights.at[batch, head, positions], refs.normalizer_weights_smem))
            self.ring.fill(n, *copies)

        if self.interpret:
            self.ring.drain(num_tiles)


def compute_memories(
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    weights: Float[Array, "b h s"],
    keep: Float[Array, "b h n"],
    tiling: Tiling,
    *,
    first: tuple[Float[Array, "b h k v"], Float[Array, "b h k"]] | None = None,
    normalizer_weights: Float[Array, "b h s"] | None = None,
    backwards: bool = False,
    last_only: bool = False,
    interpret: Interpret = None,
) -> Memories:
    """Compute the memory before each chunk and after the last chunk.

    Args:
        k: Keys, bfloat16.
        v: Values, bfloat16.
        weights: The factor of each position's write.
        keep: The decay factor of the memory over each chunk.
        tiling: The tiles.
        first: The memory and the normaliser before the first chunk; empty by default.
        normalizer_weights: The factor of each position's write to the normaliser, if not `weights`.
        backwards: Whether to scan from the last chunk to the first. Then the memory of a chunk is that of all later
            chunks, and `last` that of all chunks.
        last_only: Whether to omit the memories of chunks.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, qk_dim = k.shape
    v_dim, num_chunks, block = v.shape[-1], s // tiling.chunk_size, tiling.states
    first_memory, first_normalizer = (None, None) if first is None else first
    chunks = {
        "chunks": jax.ShapeDtypeStruct((b, h, num_chunks, qk_dim, v_dim), jnp.bfloat16),
        "normalizers": jax.ShapeDtypeStruct((b, h, num_chunks, qk_dim), jnp.float32),
    }
    last = {
        "last": jax.ShapeDtypeStruct((b, h, qk_dim, v_dim), jnp.float32),
        "last_normalizer": jax.ShapeDtypeStruct((b, h, qk_dim), jnp.float32),
    }
    results = launch(
        lambda refs: _Kernel(refs, tiling, num_chunks, backwards, interpret)(),
        _Refs,
        name="mlstm_memory_gradients" if backwards else "mlstm_memories",
        inputs={
            "k": k,
            "v": v,
            "weights": weights,
            "normalizer_weights": normalizer_weights,
            "keep": keep,
            "first": first_memory,
            "first_normalizer": first_normalizer,
        },
        outputs=last if last_only else chunks | last,
        scratch=_scratch(block, has_normalizer_weights=normalizer_weights is not None, last_only=last_only),
        # The last axis is the fastest, so concurrent blocks share keys and values in the cache.
        grid={"batch": b, "head": h, "columns": v_dim // block.columns, "rows": qk_dim // block.rows},
        num_warpgroups=block.num_warpgroups + 1,
        interpret=interpret,
    )
    results = run_once(results)
    if last_only:
        results |= {
            "chunks": jnp.zeros((b, h, 0, qk_dim, v_dim), jnp.bfloat16),
            "normalizers": jnp.zeros((b, h, 0, qk_dim)),
        }
    return Memories(**results)


def _scratch(block: StateTiling, *, has_normalizer_weights: bool, last_only: bool) -> dict[str, Any]:
    """Return the shared memory and the barriers of a thread block."""

    def tile(num_columns: int) -> Any:
        return plgpu.SMEM((block.slots, TILE, num_columns), jnp.bfloat16, transforms=OPERAND)

    per_position = plgpu.SMEM((block.slots, TILE), jnp.float32)
    scratch = {"k_smem": tile(block.rows), "v_smem": tile(block.columns), "weights_smem": per_position}
    if has_normalizer_weights:
        scratch["normalizer_weights_smem"] = per_position
    if not last_only:
        staging_shape = block.num_warpgroups, TILE, block.width
        scratch["staging_smem"] = plgpu.SMEM(staging_shape, jnp.bfloat16, transforms=OPERAND)
    return scratch | ring_barriers(block.slots, block.num_warpgroups, copies=3 + has_normalizer_weights)
