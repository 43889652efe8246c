"""The work items of the mLSTM's kernels: `ROWS` positions of a chunk, and the tiles of the chunk that they read.

Positions at the end of a chunk read more tiles than those at its start, so a thread block alternates between them for
balance. Causal rows read earlier tiles, anticausal rows later ones; the diagonal tile is the last one of a warpgroup.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mlstm.hopper.tiling import Tiling
from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Slice, pl
from xlstm_jax.kernels.mosaic_gpu.schedule import PersistentSchedule, divmod_by


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """The results of `ROWS` positions of a chunk, `TILE` of them for each compute warpgroup."""

    batch: Index
    head: Index
    chunk: Index
    kind: Index
    """The index of the kind of result, if there are several for the same positions."""
    part: Index
    """The index of the group of `ROWS` positions within the chunk."""
    start: Index
    """The first position of the chunk in the sequence."""

    def rows(self, warpgroup: Index) -> Slice:
        """Return the positions of a warpgroup in the sequence."""
        return pl.ds(self.start + self.part * ROWS + warpgroup * TILE, TILE)


@dataclasses.dataclass(frozen=True)
class Schedule(PersistentSchedule):
    """The work items of all chunks of a batch."""

    num_heads: int
    num_chunks: int
    num_kinds: int
    tiling: Tiling
    batch_size: int

    @property
    def num_parts(self) -> int:
        """The work items of a chunk, for each kind of result."""
        return self.tiling.chunk_size // ROWS

    @property
    def tiles_per_chunk(self) -> int:
        """The tiles of a chunk."""
        return self.tiling.chunk_size // TILE

    @property
    def num_items(self) -> int:
        """The number of work items."""
        return self.batch_size * self.num_heads * self.num_chunks * self.num_kinds * self.num_parts

    def item(self, turn: Index) -> WorkItem:
        """Return the work item of this thread block in a turn."""
        rest, part = divmod_by(self.item_index(turn), self.num_parts)
        if self.num_blocks % self.num_parts == 0:  # otherwise the parts alternate anyway
            part = lax.rem(part + turn, jnp.int32(self.num_parts))
        rest, kind = divmod_by(rest, self.num_kinds)
        rest, chunk = divmod_by(rest, self.num_chunks)
        batch, head = divmod_by(rest, self.num_heads)
        return WorkItem(batch, head, chunk, kind, part, chunk * self.tiling.chunk_size)

    def num_full_tiles(self, part: Index, warpgroup: Index, *, anticausal: bool) -> Index:
        """Return the number of unmasked tiles of a chunk that a warpgroup reads, before the diagonal one."""
        own = 2 * part + warpgroup
        return self.tiles_per_chunk - 1 - own if anticausal else own

    def num_tiles(self, part: Index, *, anticausal: bool) -> Index:
        """Return the number of tiles of a chunk that at least one warpgroup of a thread block reads."""
        return self.num_full_tiles(part, 0 if anticausal else 1, anticausal=anticausal) + 1

    def tile_start(self, n: Index, *, anticausal: bool) -> Index:
        """Return the position in the chunk at which its `n`-th tile begins."""
        return (self.tiles_per_chunk - 1 - n if anticausal else n) * TILE
