"""Layouts of tiles in shared memory and registers, and operations on them.

A warpgroup has accumulators of `TILE` rows: `acc[row, column]` in the layout `ACCUMULATOR`, distributed over its
threads. A vector has one element per row (`ROW`) or per column (`COLUMN`), and is broadcast before it is combined.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.device import TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, pl, plgpu

OPERAND = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""The layout in shared memory of a 16-bit operand of a matmul."""
ACCUMULATOR = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


def zeros(*shape: int) -> jax.Array:
    """Return zeros in the layout of an accumulator, or with one element per row."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACCUMULATOR if len(shape) == 2 else ROW)


def broadcast_rows(x: jax.Array, num_columns: int) -> jax.Array:
    """Broadcast a vector with one element per row over the columns."""
    return lax.broadcast_in_dim(x, (TILE, num_columns), [0])


def broadcast_columns(x: jax.Array) -> jax.Array:
    """Broadcast a vector with one element per column over the rows."""
    return lax.broadcast_in_dim(x, (TILE, x.shape[0]), [1])


def load_rows(ref: Ref) -> jax.Array:
    """Load a vector with one element per row."""
    return plgpu.load(ref, layout=ROW, optimized=False)


def load_columns(ref: Ref) -> jax.Array:
    """Load a vector with one element per column from shared memory, broadcast over the rows."""
    return broadcast_columns(plgpu.load(ref, layout=COLUMN))


def positions(first: Index, num_columns: int, axis: int) -> jax.Array:
    """Return the position of each row or column of an accumulator."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE, num_columns), axis, layout=ACCUMULATOR) + first


def add_matmuls(
    accumulators: Sequence[jax.Array], left: jax.Array, right: Sequence[Ref], interpret: Interpret
) -> tuple[jax.Array, ...]:
    """Add to each accumulator the matmul of a matrix in registers and one in shared memory.

    The simulated GPU does not support matmuls with an operand in registers, so it uses a plain matmul.
    """
    if interpret:
        added = (jnp.dot(left.astype(jnp.float32), x[...].astype(jnp.float32)) for x in right)
        return tuple(acc + x for acc, x in zip(accumulators, added, strict=True))

    def multiply(acc_refs: Sequence[Ref]) -> None:
        for acc_ref, x in zip(acc_refs, right, strict=True):
            plgpu.wgmma(acc_ref, left, x)

    return tuple(pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in accumulators)))


def matmuls(*operands: tuple[Ref, Ref], num_columns: int) -> list[jax.Array]:
    """Multiply pairs of matrices in shared memory, each into its own accumulator."""

    def multiply(*acc_refs: Ref) -> list[jax.Array]:
        for acc_ref, (left, right) in zip(acc_refs, operands, strict=True):
            plgpu.wgmma(acc_ref, left, right)
        return [acc_ref[...] for acc_ref in acc_refs]  # waits for the matmuls

    return pl.run_scoped(multiply, *[plgpu.ACC((TILE, num_columns), jnp.float32)] * len(operands))


def sum_of_matmuls(operands: Callable[[], Sequence[tuple[Ref, Ref]]]) -> jax.Array:
    """Multiply pairs of matrices in shared memory into one accumulator of `TILE` columns.

    Args:
        operands: Waits for the matrices, and returns them.
    """

    def multiply(acc_ref: Ref) -> jax.Array:
        for left, right in operands():
            plgpu.wgmma(acc_ref, left, right)
        return acc_ref[...]  # waits for the matmuls

    return pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))


def opaque_zero(count: Index) -> jax.Array:
    """Return zero for any count of tiles, computed so that the compiler cannot fold it to a constant.

    Addresses that depend on it are computed at their use. The compiler hoists other addresses out of all loops, where
    they occupy registers for the lifetime of a thread block.
    """
    return lax.shift_right_logical(count, jnp.int32(30))
