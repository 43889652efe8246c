"""Logits on Hopper GPUs that need not leave the chip: their sums over the vocabulary, and their gradients.

A block has the features of some tokens and walks over the vocabulary. Each of its two computing warpgroups has half of
the tokens and multiplies by itself, so that one sums up, or writes, a tile of logits while the other keeps the tensor
cores busy. Two blocks form a cluster, have other tokens and the same part of the kernel, and load it together.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from xlstm_jax.kernels.cross_entropy.plain import FARTHEST, KeptLogits
from xlstm_jax.kernels.cross_entropy.tiling import CLUSTER, COLUMNS, MULTIPLE_OF_TOKENS, ROWS, TILE, num_splits
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import MATRIX, ROW, TILED, Ring, cooperate

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Below all logits, and finite."""


def vocabulary_sums(
    x: BFloat16[Array, "t d"],
    kernel: BFloat16[Array, "d v"],
    targets: Int[Array, " t"],
    *,
    cap: float | None,
    keep_logits: bool = False,
    interpret: Any = None,
) -> tuple[tuple[Float[Array, " t"], Float[Array, " t"], Float[Array, " t"]], KeptLogits | None]:
    """Compute the largest logit of each token, the sum of the exponentials of logits less that, and its target's logit.

    Args:
        x: The features of tokens.
        kernel: The projection to the vocabulary.
        targets: The target of each token; that of one without a target here is outside of the vocabulary.
        cap: Logits are squashed into (-cap, cap); `None` leaves them as they are.
        keep_logits: Whether to write logits, as distances from the largest of those before them.
        interpret: How to simulate a GPU on a CPU.
    """
    num_tokens, vocab_size = x.shape[0], kernel.shape[1]
    splits = num_splits(num_tokens)

    def compute(r: Any, walk: Callable, rows: Any, split: Any) -> None:
        index = _load_rows(r.targets.at[rows])

        def add_tile(logits: jax.Array, columns: jax.Array, start: Any, carried: Any) -> Any:
            largest, total, target = carried
            if vocab_size % COLUMNS:
                logits = jnp.where(columns < vocab_size, logits, LOWEST)
            new = jnp.maximum(largest, logits.max(axis=1))
            distances = logits - _by_row(new)
            total = total * jnp.exp2((largest - new) * LOG2_E) + jnp.exp2(distances * LOG2_E).sum(axis=1)
            target = target + jnp.where(columns == _by_row(index), logits, 0.0).sum(axis=1)
            if keep_logits:
                _write_tile(r, jnp.maximum(distances, FARTHEST), r.distances.at[rows, pl.ds(start, COLUMNS)])
                r.references[lax.div(start, jnp.int32(COLUMNS)), rows] = new
            return new, total, target

        zeros = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROW)
        results = walk(add_tile, (zeros + LOWEST, zeros, zeros))
        for ref, result in zip((r.largest, r.totals, r.target_logits), results, strict=True):
            ref[split, rows] = result
        if keep_logits:
            plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((splits, num_tokens), jnp.float32)
    outputs = {"largest": shape, "totals": shape, "target_logits": shape}
    if keep_logits:
        outputs["distances"] = jax.ShapeDtypeStruct((num_tokens, vocab_size), jnp.float16)
        outputs["references"] = jax.ShapeDtypeStruct((-(-vocab_size // COLUMNS), num_tokens), jnp.float32)
    largest, totals, target_logits, *kept = _launch(
        "vocabulary_sums_and_logits" if keep_logits else "vocabulary_sums",
        compute,
        {"x": x, "kernel": kernel, "targets": targets},
        outputs,
        splits=splits,
        cap=cap,
        interpret=interpret,
        writes=jnp.float16 if keep_logits else None,
    )
    most = jnp.max(largest, axis=0)
    sums = most, jnp.sum(totals * jnp.exp(largest - most), axis=0), jnp.sum(target_logits, axis=0)
    return sums, KeptLogits(kept[0], kept[1].T) if kept else None


def logit_gradients(
    x: BFloat16[Array, "t d"],
    kernel: BFloat16[Array, "d v"],
    targets: Int[Array, " t"],
    log_totals: Float[Array, " t"],
    dlosses: Float[Array, " t"],
    *,
    cap: float | None,
    interpret: Any = None,
) -> BFloat16[Array, "t v"]:
    """Compute the gradients of logits before they are capped.

    Args:
        x: The features of tokens.
        kernel: The projection to the vocabulary.
        targets: The target of each token.
        log_totals: The logarithm of the sum of the exponentials of all logits of each token.
        dlosses: The gradient of each token's loss.
        cap: Logits are squashed into (-cap, cap).
        interpret: How to simulate a GPU on a CPU.
    """

    def compute(r: Any, walk: Callable, rows: Any, split: Any) -> None:
        del split
        index, log_total, dloss = (_load_rows(ref.at[rows]) for ref in (r.targets, r.log_totals, r.dlosses))
        shift = log_total * LOG2_E

        def write_tile(logits: jax.Array, columns: jax.Array, start: Any, carried: Any) -> Any:
            gradients = jnp.exp2(logits * LOG2_E - _by_row(shift))
            gradients = jnp.where(columns == _by_row(index), gradients - 1.0, gradients) * _by_row(dloss)
            if cap is not None:
                gradients = gradients * (1.0 - jnp.square(logits * (1.0 / cap)))
            _write_tile(r, gradients, r.gradients.at[rows, pl.ds(start, COLUMNS)])
            return carried

        walk(write_tile, ())
        plgpu.wait_smem_to_gmem(0)

    (gradients,) = _launch(
        "logit_gradients",
        compute,
        {"x": x, "kernel": kernel, "targets": targets, "log_totals": log_totals, "dlosses": dlosses},
        {"gradients": jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), jnp.bfloat16)},
        splits=num_splits(x.shape[0]),
        cap=cap,
        interpret=interpret,
        writes=jnp.bfloat16,
    )
    return gradients


def _launch(
    name: str,
    compute: Callable[[Any, Callable, Any, Any], None],
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    splits: int,
    cap: float | None,
    interpret: Any,
    writes: DTypeLike | None = None,
) -> list[jax.Array]:
    """Run a kernel that walks over the vocabulary.

    Args:
        name: The name of the kernel.
        compute: What a warpgroup does, given the references, `walk`, its tokens and which part of the vocabulary it
            has. `walk(act, carried)` calls `act(logits, columns, start, carried) -> carried` for each tile of logits:
            where each is in the vocabulary, and where the tile begins.
        inputs: `x`, `kernel` and what else `compute` reads.
        outputs: What it writes.
        splits: The parts of the vocabulary.
        cap: Logits are squashed into (-cap, cap).
        interpret: How to simulate a GPU on a CPU; it has no clusters.
        writes: The precision of tiles that `compute` writes, if it does; they leave from the shared memory `staging`.
    """
    (num_tokens, dim), vocab_size = inputs["x"].shape, inputs["kernel"].shape[1]
    depth, num_tiles = dim // TILE, -(-vocab_size // COLUMNS)
    tiles_per_split = -(-num_tiles // splits)
    slots = 4 if writes is None else 3  # tiles of features and of the kernel that are in flight or in use
    cluster = {} if interpret else {"cluster": (CLUSTER,), "cluster_names": ("cluster",)}
    empty = {"num_arrivals": 2, "num_barriers": slots}
    scratch = {
        "x_tiles": plgpu.SMEM((slots, 2, TILE, TILE), jnp.bfloat16, transforms=TILED),
        "kernel_tiles": plgpu.SMEM((slots, TILE, COLUMNS), jnp.bfloat16, transforms=TILED),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        # What one block loads, it loads for both, so both have to be done with what was there before.
        "empty": plgpu.Barrier(**empty) if interpret else plgpu.ClusterBarrier(collective_axes=("cluster",), **empty),
    }
    if writes is not None:
        scratch["staging"] = plgpu.SMEM((2, TILE, COLUMNS), writes, transforms=TILED)
    names = [*inputs, *outputs, *scratch]

    def body(*refs: Any) -> None:
        r = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
        ring = Ring(slots, r.full, r.empty)
        split, block = lax.axis_index("split"), lax.axis_index("rows")
        if not interpret:
            block = block * CLUSTER + lax.axis_index("cluster")
        first = split * tiles_per_split
        count = jnp.minimum(tiles_per_split, num_tiles - first)

        def rows_of(warpgroup: Any) -> Any:
            return pl.ds(block * ROWS + warpgroup * TILE, TILE)

        def compute_with(warpgroup: Any) -> None:
            def multiply(before: Any, accumulator: Any) -> jax.Array:
                @pl.loop(0, depth)
                def _(n: Any) -> None:
                    slot = ring.take(before + n)
                    plgpu.wgmma(accumulator, r.x_tiles.at[slot, warpgroup], r.kernel_tiles.at[slot])
                    plgpu.wgmma_wait(1)
                    pl.when(n > 0)(lambda: ring.give_back(before + n - 1))

                product = accumulator[...]  # which waits for it
                ring.give_back(before + depth - 1)
                return product

            def walk(act: Callable, carried: Any) -> Any:
                def tile(n: Any, carried: Any) -> Any:
                    accumulator = plgpu.ACC((TILE, COLUMNS), jnp.float32)
                    logits = pl.run_scoped(functools.partial(multiply, n * depth), accumulator)
                    if cap is not None:
                        # The hyperbolic tangent of the hardware has eleven bits.
                        logits = cap - (2.0 * cap) / (1.0 + jnp.exp2(logits * (2.0 * LOG2_E / cap)))
                    start = (first + n) * COLUMNS
                    columns = plgpu.broadcasted_iota(jnp.int32, (TILE, COLUMNS), 1, layout=MATRIX) + start
                    return act(logits, columns, start, carried)

                return lax.fori_loop(0, count, tile, carried)

            compute(r, walk, rows_of(warpgroup), split)

        def move() -> None:
            @pl.loop(0, count * depth)
            def _(n: Any) -> None:
                features = pl.ds(lax.rem(n, jnp.int32(depth)) * TILE, TILE)
                columns = pl.ds((first + lax.div(n, jnp.int32(depth))) * COLUMNS, COLUMNS)
                own = [(r.x.at[rows_of(w), features], r.x_tiles, w) for w in range(2)]
                shared = [(r.kernel.at[features, columns], r.kernel_tiles)]
                if interpret:
                    ring.fill(n, *own, *shared)
                else:
                    ring.fill(n, *own, shared=shared)

            ring.drain(count * depth)

        cooperate(2, compute=compute_with, move=move)

    body.__name__ = name
    blocks_of_rows = num_tokens // ROWS if interpret else num_tokens // MULTIPLE_OF_TOKENS
    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        grid=(splits, blocks_of_rows),
        grid_names=("split", "rows"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
        **cluster,
    )(*inputs.values())
    return list(results)


def _write_tile(r: Any, tile: jax.Array, target: Any) -> None:
    """Send a warpgroup's tile on its way, once the one before has left the staging."""
    own = r.staging.at[lax.axis_index("warpgroup")]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    own[...] = tile.astype(own.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own, target)


def _load_rows(ref: Any) -> jax.Array:
    """Load a number for each token of a warpgroup."""
    return plgpu.load(ref, layout=ROW, optimized=False)


def _by_row(x: jax.Array) -> jax.Array:
    """Repeat a number of each token over its logits."""
    return lax.broadcast_in_dim(x, (TILE, COLUMNS), [0])
