"""What the kernels of the mLSTM for Hopper GPUs have in common: products, vectors, masks, a launch."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mlstm.hopper.tiling import TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import COLUMN, MATRIX, ROW


def add_products(
    accumulators: Sequence[jax.Array], left: jax.Array, right: Sequence[Any], interpret: Any
) -> tuple[jax.Array, ...]:
    """Add to each accumulator the product of a matrix in registers and one in shared memory.

    The simulation has no such product, and computes it in another way.
    """
    if interpret:
        added = (jnp.dot(left.astype(jnp.float32), x[...].astype(jnp.float32)) for x in right)
        return tuple(a + x for a, x in zip(accumulators, added, strict=True))

    def multiply(refs: Sequence[Any]) -> None:
        for ref, x in zip(refs, right, strict=True):
            plgpu.wgmma(ref, left, x)

    return tuple(pl.run_state(multiply)(tuple(plgpu.ACC.init(a) for a in accumulators)))


def product(operands: Callable[[], Sequence[tuple[Any, Any]]]) -> jax.Array:
    """Compute the sum of products of `TILE` rows and as many columns, of matrices that come to shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        for left, right in operands():
            plgpu.wgmma(accumulator, left, right)
        return accumulator[...]  # which waits for it

    return pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))


def unknown_zero(count: jax.Array) -> jax.Array:
    """Return zero for any count of tiles, in a way that a compiler cannot know.

    Addresses that depend on it are computed where they are used. Others are computed ahead of all loops, and take
    registers for as long as a block runs.
    """
    return lax.shift_right_logical(count, jnp.int32(30))


def zeros(*shape: int) -> jax.Array:
    """Return zeros where the numbers of an accumulator are, or those of its rows."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX if len(shape) == 2 else ROW)


def by_row(x: jax.Array, width: int) -> jax.Array:
    """Repeat a number for each row over the columns."""
    return lax.broadcast_in_dim(x, (TILE, width), [0])


def by_column(x: jax.Array) -> jax.Array:
    """Repeat a number for each column over the rows."""
    return lax.broadcast_in_dim(x, (TILE, x.shape[0]), [1])


def load_row(ref: Any) -> jax.Array:
    """Load a number for each row of an accumulator."""
    return plgpu.load(ref, layout=ROW, optimized=False)


def load_column(ref: Any) -> jax.Array:
    """Load a number for each column of an accumulator from shared memory, repeated over the rows."""
    return by_column(plgpu.load(ref, layout=COLUMN))


def masked(x: jax.Array, *, diagonal: bool, later: bool, documents: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Set to zero what lies on the far side of the diagonal and between documents.

    Args:
        x: Numbers between `TILE` rows and as many columns; what is dropped may be infinite.
        diagonal: Whether rows and columns are the same positions; if not, rows see all columns.
        later: Whether a row sees columns after it, not before it.
        documents: The documents of rows and columns, if there are several.
    """
    seen = None
    if diagonal:
        row = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=MATRIX)
        column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=MATRIX)
        seen = column >= row if later else row >= column
    if documents is not None:
        same = by_row(documents[0], TILE) == documents[1]
        seen = same if seen is None else seen & same
    return x if seen is None else jnp.where(seen, x, 0.0)


def launch(
    body: Callable[[types.SimpleNamespace], None],
    *,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
    num_warpgroups: int,
    interpret: Any,
) -> dict[str, jax.Array]:
    """Run a kernel whose body finds its references by name. What is `None` stays so.

    Args:
        body: The kernel.
        inputs: Its arrays.
        outputs: What it computes.
        scratch: Shared memory and barriers of a block.
        grid: The axes over blocks, the fastest last.
        num_warpgroups: Warpgroups of a block; the axis over them is `warpgroup`.
        interpret: How to simulate a GPU on a CPU, or `None` to run on one.
    """
    absent = dict.fromkeys(name for name, x in (*inputs.items(), *outputs.items()) if x is None)
    inputs = {name: x for name, x in inputs.items() if x is not None}
    outputs = {name: x for name, x in outputs.items() if x is not None}
    names = [*inputs, *outputs, *scratch]

    def kernel(*refs: Any) -> None:
        body(types.SimpleNamespace(**absent, **dict(zip(names, refs, strict=True))))

    kernel.__name__ = body.__name__
    results = plgpu.kernel(
        kernel,
        out_type=list(outputs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        # No region of shared memory is both read and written by ordinary loads and stores of one warpgroup. Sums over
        # rows stay within the threads that hold them, so they need no scratch memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*inputs.values())
    # In a scan that stacks results, XLA would run the kernel once for the stack and once more for other uses.
    return dict(zip(outputs, lax.optimization_barrier(results), strict=True))
