"""What kernels for Hopper GPUs that multiply have in common: layouts, a ring of tiles in shared memory, roles."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How an operand of a matrix product has to lie in shared memory."""
MATRIX = plgpu.Layout.WGMMA
"""Where the numbers of an accumulator are among the threads of a warpgroup."""
ROW = plgpu.Layout.WGMMA.reduce(1)
"""One number for each row of an accumulator."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""One number for each column of an accumulator."""

COMPUTING_REGISTERS, MOVING_REGISTERS = 240, 24


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that one warpgroup fills and the computing ones empty, in one order.

    Tiles are counted from the start of a block, and the n-th tile is in slot `n % slots`. Every computing warpgroup
    takes every tile, also those that it does not need: barriers count arrivals.
    """

    slots: int
    full: Any
    empty: Any

    def slot(self, n: Any) -> jax.Array:
        """Return the slot of a tile."""
        return lax.rem(jnp.int32(n), jnp.int32(self.slots))

    def fill(self, n: Any, *copies: tuple[Any, ...], shared: Sequence[tuple[Any, ...]] = ()) -> None:
        """Copy what belongs to a tile from device memory, once its slot is free.

        Args:
            n: The number of the tile.
            *copies: Where each part comes from, the view whose slot it goes to, and where in the slot that is.
            shared: Such parts that all blocks of a cluster, the axis `cluster`, need and load together.
        """
        slot = self._free(n)
        for parts, options in ((copies, {}), (shared, {"collective_axes": "cluster"})):
            for source, view, *index in parts:
                plgpu.copy_gmem_to_smem(source, view.at[(slot, *index)], self.full.at[slot], **options)

    def reserve(self, n: Any) -> None:
        """Leave the place of a tile to the warpgroups that take it, once its slot is free."""
        plgpu.barrier_arrive(self.full.at[self._free(n)])

    def _free(self, n: Any) -> jax.Array:
        """Wait until the slot of a tile is free, and return it."""
        slot = self.slot(n)

        @pl.when(n >= self.slots)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def take(self, n: Any) -> jax.Array:
        """Wait until a tile is there, and return its slot."""
        slot = self.slot(n)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def give_back(self, n: Any) -> None:
        """Say that this warpgroup does not need a tile any longer."""
        plgpu.barrier_arrive(self.empty.at[self.slot(n)])

    def drain(self, count: Any) -> None:
        """Wait until all `count` tiles were given back.

        The simulation of a GPU insists on it, and a block of a cluster must not end before the others told it so.
        """
        for offset in range(self.slots):

            @pl.when(offset < count)
            def _(slot: Any = offset) -> None:
                plgpu.barrier_wait(self.empty.at[slot])


def ring_barriers(
    slots: int, num_warpgroups: int, copies: int = 1, names: tuple[str, str] = ("full", "empty")
) -> dict[str, Any]:
    """Return the barriers of a ring whose tiles consist of some copies each."""
    full, empty = names
    return {
        full: plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        empty: plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=slots),
    }


def cooperate(num_warpgroups: int, *, compute: Callable[[Any], None], move: Callable[[], None]) -> None:
    """Give the computing warpgroups most registers and their work, and the last one that of moving data."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(MOVING_REGISTERS, action="decrease")
        move()
