"""The work items of attention: `ROWS` positions of a head."""

import dataclasses

from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Slice, pl
from xlstm_jax.kernels.mosaic_gpu.schedule import PersistentSchedule, divmod_by


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """`ROWS` positions of a head, `TILE` of them for each compute warpgroup."""

    batch: Index
    head: Index
    part: Index

    def start(self, warpgroup: Index) -> Index:
        """Return the first position of a warpgroup."""
        return self.part * ROWS + warpgroup * TILE

    def rows(self, warpgroup: Index) -> Slice:
        """Return the positions of a warpgroup."""
        return pl.ds(self.start(warpgroup), TILE)


@dataclasses.dataclass(frozen=True)
class Schedule(PersistentSchedule):
    """The work items of a batch. Neighbours have the same head, so they share tiles in the cache."""

    batch_size: int
    num_heads: int
    length: int

    @property
    def items_per_head(self) -> int:
        """The work items of a head."""
        return self.length // ROWS

    @property
    def num_items(self) -> int:
        """The number of work items."""
        return self.batch_size * self.num_heads * self.items_per_head

    def item(self, turn: Index) -> WorkItem:
        """Return the work item of this thread block in a turn."""
        rest, part = divmod_by(self.item_index(turn), self.items_per_head)
        batch, head = divmod_by(rest, self.num_heads)
        return WorkItem(batch, head, part)
