"""The work of blocks. Each takes one piece after the other, and one's end hides the next's start.

A piece is the outputs of `ROWS` positions of a chunk. Those at the end of a chunk see more positions than those at its
start, so a block gets both kinds in turn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mlstm.hopper.tiling import NUM_SMS, ROWS, TILE, Tiling
from xlstm_jax.kernels.mosaic_gpu.pallas import pl


@dataclasses.dataclass(frozen=True)
class Item:
    """One piece of work."""

    batch: Any
    head: Any
    chunk: Any
    kind: Any
    """Which of several results of the same positions."""
    part: Any
    """Which `ROWS` positions of the chunk."""
    first: Any
    """The first position of the chunk in the sequence."""

    def rows(self, warpgroup: Any) -> Any:
        """Return the positions of a warpgroup in the sequence."""
        return pl.ds(self.first + self.part * ROWS + warpgroup * TILE, TILE)


@dataclasses.dataclass(frozen=True)
class Items:
    """All pieces of work, dealt out to the blocks of a grid with the one axis `block`."""

    num_heads: int
    num_chunks: int
    num_kinds: int
    tiling: Tiling
    batch_size: int

    @property
    def num_parts(self) -> int:
        """The parts of a chunk."""
        return self.tiling.chunk_size // ROWS

    @property
    def tiles(self) -> int:
        """The tiles of a chunk."""
        return self.tiling.chunk_size // TILE

    @property
    def total(self) -> int:
        """The number of pieces."""
        return self.batch_size * self.num_heads * self.num_chunks * self.num_kinds * self.num_parts

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

    def item(self, turn: Any) -> Item:
        """Return the piece that this block gets in a turn."""
        index = lax.axis_index("block") + turn * self.num_blocks
        rest, part = self._split(index, self.num_parts)
        if self.num_blocks % self.num_parts == 0:  # else the parts alternate by themselves
            part = lax.rem(part + turn, jnp.int32(self.num_parts))
        rest, kind = self._split(rest, self.num_kinds)
        rest, chunk = self._split(rest, self.num_chunks)
        batch, head = self._split(rest, self.num_heads)
        return Item(batch, head, chunk, kind, part, chunk * self.tiling.chunk_size)

    def clear_tiles(self, part: Any, warpgroup: Any, *, later: bool) -> Any:
        """Return how many tiles of a chunk a warpgroup sees whole; it sees half of one more, on the diagonal."""
        own = 2 * part + warpgroup
        return self.tiles - 1 - own if later else own

    def seen_tiles(self, part: Any, *, later: bool) -> Any:
        """Return how many tiles of a chunk at least one warpgroup of a block sees."""
        return self.clear_tiles(part, 0 if later else 1, later=later) + 1

    def position(self, n: Any, *, later: bool) -> Any:
        """Return where in a chunk the `n`-th tile begins; the one on the diagonal is a warpgroup's last."""
        return (self.tiles - 1 - n if later else n) * TILE

    @staticmethod
    def _split(index: Any, count: int) -> tuple[Any, Any]:
        return lax.div(index, jnp.int32(count)), lax.rem(index, jnp.int32(count))
