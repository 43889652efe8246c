"""What the kernels have in common: pieces of work, which tiles each of them sees, products, vectors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.attention.hopper.tiling import NUM_SMS, ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import COLUMN, MATRIX, ROW


@dataclasses.dataclass(frozen=True)
class Piece:
    """One piece of work: `ROWS` positions of a head."""

    batch: Any
    head: Any
    part: Any

    def rows(self, warpgroup: Any) -> Any:
        """Return the positions of a warpgroup."""
        return pl.ds(self.part * ROWS + warpgroup * TILE, TILE)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """All pieces of work, dealt out to the blocks of a grid with the one axis `block`.

    Neighbours have the same head, so the tiles that they share are in the cache.
    """

    batch_size: int
    num_heads: int
    length: int

    @property
    def parts(self) -> int:
        """The pieces of a head."""
        return self.length // ROWS

    @property
    def total(self) -> int:
        """The number of pieces."""
        return self.batch_size * self.num_heads * self.parts

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return min(NUM_SMS, self.total)

    @property
    def turns(self) -> Any:
        """The number of pieces of this block."""
        return lax.div(jnp.int32(self.total - 1) - lax.axis_index("block"), jnp.int32(self.num_blocks)) + 1

    def each(self, work: Callable[[Any, Any], Any]) -> Any:
        """Do the pieces of this block.

        Args:
            work: Does the piece of a turn, given how many tiles came before it, and returns how many came then.

        Returns:
            The number of tiles of all pieces.
        """
        return lax.fori_loop(0, self.turns, work, jnp.int32(0))

    def piece(self, turn: Any) -> Piece:
        """Return the piece that this block gets in a turn."""
        index = lax.axis_index("block") + turn * self.num_blocks
        rest, part = lax.div(index, jnp.int32(self.parts)), lax.rem(index, jnp.int32(self.parts))
        batch, head = lax.div(rest, jnp.int32(self.num_heads)), lax.rem(rest, jnp.int32(self.num_heads))
        return Piece(batch, head, part)


def products(*operands: tuple[Any, Any], columns: int) -> list[jax.Array]:
    """Multiply matrices in shared memory, of `TILE` rows and so many columns."""

    def multiply(*accumulators: Any) -> list[jax.Array]:
        for accumulator, (left, right) in zip(accumulators, operands, strict=True):
            plgpu.wgmma(accumulator, left, right)
        return [accumulator[...] for accumulator in accumulators]  # which waits for them

    return pl.run_scoped(multiply, *[plgpu.ACC((TILE, columns), jnp.float32)] * len(operands))


def add_product(total: jax.Array, left: jax.Array, right: Any, interpret: Any) -> jax.Array:
    """Add the product of a matrix in registers and one in shared memory. The simulation has no such product."""
    left = left.astype(jnp.bfloat16)
    if interpret:
        return total + jnp.dot(left.astype(jnp.float32), right[...].astype(jnp.float32))
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, left, right))(plgpu.ACC.init(total))


def zeros(*shape: int) -> jax.Array:
    """Return zeros where the numbers of an accumulator are, or those of its rows."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), MATRIX if len(shape) == 2 else ROW)


def by_row(x: jax.Array, columns: int) -> jax.Array:
    """Repeat a number for each row over the columns."""
    return lax.broadcast_in_dim(x, (TILE, columns), [0])


def load_rows(ref: Any) -> jax.Array:
    """Load a number for each row."""
    return plgpu.load(ref, layout=ROW, optimized=False)


def load_columns(ref: Any) -> jax.Array:
    """Load a number for each column from shared memory, repeated over the rows."""
    x = plgpu.load(ref, layout=COLUMN)
    return lax.broadcast_in_dim(x, (TILE, x.shape[0]), [1])


def positions(first: Any, columns: int, axis: int) -> jax.Array:
    """Return the position of each row or column of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, (TILE, columns), axis, layout=MATRIX) + first
