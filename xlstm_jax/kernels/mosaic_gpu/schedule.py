"""Persistent scheduling: one thread block per multiprocessor; work items are assigned round-robin."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS
from xlstm_jax.kernels.mosaic_gpu.pallas import Index


class PersistentSchedule:
    """The work items of persistent thread blocks, with a grid of the single axis `block`.

    The epilogue of one work item overlaps with the loads of the next.
    """

    @property
    def num_items(self) -> int:
        """The number of work items."""
        raise NotImplementedError

    @property
    def num_blocks(self) -> int:
        """The number of thread blocks."""
        return min(NUM_SMS, self.num_items)

    @property
    def num_turns(self) -> jax.Array:
        """The number of work items of this thread block."""
        return lax.div(jnp.int32(self.num_items - 1) - lax.axis_index("block"), jnp.int32(self.num_blocks)) + 1

    def item_index(self, turn: Index) -> jax.Array:
        """Return the work item of this thread block in a turn."""
        return lax.axis_index("block") + turn * self.num_blocks

    def run(self, work: Callable[[Index, Index], Index]) -> jax.Array:
        """Run the work items of this thread block.

        Args:
            work: Runs the work item of a turn, given the number of its first tile; returns that of the next item.

        Returns:
            The number of tiles of all work items.
        """
        return lax.fori_loop(0, self.num_turns, work, jnp.int32(0))


def divmod_by(index: Index, count: int) -> tuple[jax.Array, jax.Array]:
    """Split an index into the quotient and the remainder."""
    return lax.div(index, jnp.int32(count)), lax.rem(index, jnp.int32(count))
