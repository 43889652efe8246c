"""The memories of an mLSTM before each chunk, or their gradients after each, in one walk over the positions.

    memory[c] = keep[c] memory[c-1] + sum over the chunk of weight[s] k[s] v[s]^T,    and without v the normaliser

A block keeps its part of the memory in accumulators, in float32, and writes it as bfloat16 before every chunk. Keys are
read transposed from shared memory into registers, weighted there, and are the left operand of the product: there is no
weighted copy of them in memory, and the normaliser is the sum of that operand.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mlstm.hopper.tiles import launch, load_column, zeros
from xlstm_jax.kernels.mlstm.hopper.tiling import TILE, Tiling
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import MATRIX, ROW, TILED, Ring, cooperate, ring_barriers


class Memories(NamedTuple):
    """The memories of a sequence in `n` chunks, and of its end."""

    chunks: Float[Array, "b h n k v"]
    normalizers: Float[Array, "b h n k"]
    last: Float[Array, "b h k v"]
    last_normalizer: Float[Array, "b h k"]


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
    interpret: Any = None,
) -> Memories:
    """Compute the memory before each chunk and after the last.

    Args:
        k: Keys, bfloat16.
        v: Values, bfloat16.
        weights: What each position writes.
        keep: What each chunk leaves of the memory before it.
        tiling: The tiles.
        first: The memory and the normaliser before the first chunk; empty by default.
        normalizer_weights: What each position writes into the normaliser, if not `weights`.
        backwards: Whether to walk from the last chunk to the first. What belongs to a chunk is then what comes from the
            chunks after it, and `last` is what comes from all.
        last_only: Whether to leave out what belongs to each chunk, as if there were none.
        interpret: How to simulate a GPU on a CPU.
    """
    b, s, h, qk_dim = k.shape
    v_dim, num_chunks = v.shape[-1], s // tiling.chunk_size
    tiles = tiling.states
    steps, per_chunk, width = s // TILE, tiling.chunk_size // TILE, tiles.width

    def body(r: SimpleNamespace) -> None:
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        k_start, v_start = lax.axis_index("rows") * tiles.rows, lax.axis_index("columns") * tiles.columns
        ring = Ring(tiles.slots, r.full, r.empty)

        def compute(warpgroup: Any) -> None:
            my_k = 0 if tiles.splits_columns else warpgroup * TILE
            my_v = warpgroup * width if tiles.splits_columns else 0
            rows, columns = pl.ds(k_start + my_k, TILE), pl.ds(v_start + my_v, width)
            writes_normalizer = v_start + my_v == 0

            def weighted(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
                """Return the weighted keys, transposed, and what they add to the normaliser."""
                mine = r.k_tiles.at[slot, :, pl.ds(my_k, TILE)].transpose((1, 0))
                keys = plgpu.load(mine, layout=MATRIX, optimized=False).astype(jnp.float32)
                written = keys * load_column(r.weight_tiles.at[slot])
                if normalizer_weights is None:
                    return written, written.sum(axis=1)
                return written, (keys * load_column(r.normalizer_weight_tiles.at[slot])).sum(axis=1)

            def values(slot: jax.Array) -> Any:
                return r.v_tiles.at[slot, :, pl.ds(my_v, width)] if tiles.splits_columns else r.v_tiles.at[slot]

            def add_chunk(start: Any, memory: jax.Array, normalizer: jax.Array) -> tuple[jax.Array, jax.Array]:
                """Add the positions of a chunk whose first tile is the `start`-th."""
                if interpret:  # without products of registers
                    for n in range(per_chunk):
                        slot = ring.take(start + n)
                        keys, added = weighted(slot)
                        rounded = keys.astype(jnp.bfloat16).astype(jnp.float32)
                        memory = memory + jnp.dot(rounded, values(slot)[...].astype(jnp.float32))
                        normalizer = normalizer + added
                        ring.give_back(start + n)
                    return memory, normalizer

                def accumulate(refs: Any) -> None:
                    memory, normalizer = refs
                    for n in range(per_chunk):
                        slot = ring.take(start + n)
                        keys, added = weighted(slot)  # while the product before is computed
                        normalizer[...] += added
                        plgpu.wgmma(memory, keys.astype(jnp.bfloat16), values(slot))
                        if n:
                            plgpu.wgmma_wait(1)
                            ring.give_back(start + n - 1)
                    plgpu.wgmma_wait(0)
                    ring.give_back(start + per_chunk - 1)

                return tuple(pl.run_state(accumulate)((plgpu.ACC.init(memory), normalizer)))

            def chunk_of(step: Any) -> Any:
                step = jnp.minimum(step, num_chunks - 1)
                return num_chunks - 1 - step if backwards else step

            def chunk(step: Any, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                memory, normalizer, kept = carried
                if not last_only:
                    c = chunk_of(step)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was written before has left the staging
                    r.staging[warpgroup] = memory.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(r.staging.at[warpgroup], r.chunks.at[batch, head, c, rows, columns])

                    @pl.when(writes_normalizer)
                    def _() -> None:
                        r.normalizers[batch, head, c, rows] = normalizer

                memory, normalizer = memory * kept, normalizer * kept
                kept = r.keep[batch, head, chunk_of(step + 1)]  # early, as it comes from far away
                return *add_chunk(step * per_chunk, memory, normalizer), kept

            if first is None:
                memory, normalizer = zeros(TILE, width), zeros(TILE)
            else:
                memory = plgpu.load(r.first.at[batch, head, rows, columns], layout=MATRIX, optimized=False)
                normalizer = plgpu.load(r.first_normalizer.at[batch, head, rows], layout=ROW, optimized=False)
            start = memory, normalizer, r.keep[batch, head, chunk_of(0)]
            memory, normalizer, _ = lax.fori_loop(0, num_chunks, chunk, start)
            r.last[batch, head, rows, columns] = memory

            @pl.when(writes_normalizer)
            def _() -> None:
                r.last_normalizer[batch, head, rows] = normalizer

            if not last_only:
                plgpu.wait_smem_to_gmem(0)

        def move() -> None:
            @pl.loop(0, steps)
            def _(n: Any) -> None:
                positions = pl.ds((steps - 1 - n if backwards else n) * TILE, TILE)
                copies = [
                    (r.k.at[batch, positions, head, pl.ds(k_start, tiles.rows)], r.k_tiles),
                    (r.v.at[batch, positions, head, pl.ds(v_start, tiles.columns)], r.v_tiles),
                    (r.weights.at[batch, head, positions], r.weight_tiles),
                ]
                if normalizer_weights is not None:
                    copies.append((r.normalizer_weights.at[batch, head, positions], r.normalizer_weight_tiles))
                ring.fill(n, *copies)

            if interpret:
                ring.drain(steps)

        cooperate(tiles.num_warpgroups, compute=compute, move=move)

    def tile(width: int) -> Any:
        return plgpu.SMEM((tiles.slots, TILE, width), jnp.bfloat16, transforms=TILED)

    vectors = plgpu.SMEM((tiles.slots, TILE), jnp.float32)
    scratch = {"k_tiles": tile(tiles.rows), "v_tiles": tile(tiles.columns), "weight_tiles": vectors}
    if normalizer_weights is not None:
        scratch["normalizer_weight_tiles"] = vectors
    if not last_only:
        scratch["staging"] = plgpu.SMEM((tiles.num_warpgroups, TILE, width), jnp.bfloat16, transforms=TILED)
    copies = 3 if normalizer_weights is None else 4
    float32, bfloat16 = jnp.float32, jnp.bfloat16
    kept = {
        "chunks": jax.ShapeDtypeStruct((b, h, num_chunks, qk_dim, v_dim), bfloat16),
        "normalizers": jax.ShapeDtypeStruct((b, h, num_chunks, qk_dim), float32),
    }
    body.__name__ = "mlstm_memories" if not backwards else "mlstm_memory_gradients"
    results = launch(
        body,
        inputs={
            "k": k,
            "v": v,
            "weights": weights,
            "normalizer_weights": normalizer_weights,
            "keep": keep,
            "first": None if first is None else first[0],
            "first_normalizer": None if first is None else first[1],
        },
        outputs=({} if last_only else kept)
        | {
            "last": jax.ShapeDtypeStruct((b, h, qk_dim, v_dim), float32),
            "last_normalizer": jax.ShapeDtypeStruct((b, h, qk_dim), float32),
        },
        scratch=scratch | ring_barriers(tiles.slots, tiles.num_warpgroups, copies),
        # The last axis is the fastest: blocks that run at the same time share keys and values in the cache.
        grid={"batch": b, "head": h, "columns": v_dim // tiles.columns, "rows": qk_dim // tiles.rows},
        num_warpgroups=tiles.num_warpgroups + 1,
        interpret=interpret,
    )
    if last_only:
        results |= {
            "chunks": jnp.zeros((b, h, 0, qk_dim, v_dim), bfloat16),
            "normalizers": jnp.zeros((b, h, 0, qk_dim)),
        }
    return Memories(**results)
