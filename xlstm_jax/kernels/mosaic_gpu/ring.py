"""A ring buffer of stages in shared memory, between the load warpgroup and the compute warpgroups."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Ref, pl, plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of shared-memory stages that the load warpgroup fills and the compute warpgroups release, in order.

    Tiles are numbered from the start of a thread block, and tile `n` is in stage `n % num_stages`. Every compute
    warpgroup waits for and releases every tile, including those that it does not use, as barriers count arrivals.
    """

    num_stages: int
    full: Ref
    empty: Ref

    def stage(self, n: Index) -> jax.Array:
        """Return the stage of a tile."""
        return lax.rem(jnp.int32(n), jnp.int32(self.num_stages))

    def fill(self, n: Index, *copies: tuple[Ref, ...], shared: Sequence[tuple[Ref, ...]] = ()) -> None:
        """Start the copies of a tile from global memory, once its stage is empty.

        Args:
            n: The number of the tile.
            *copies: The source of each part, the buffer whose first axis is stages, and an index into the stage.
            shared: The same for parts that are multicast to all blocks of a cluster (the axis `cluster`).
        """
        stage = self._wait_until_empty(n)
        for parts, options in ((copies, {}), (shared, {"collective_axes": "cluster"})):
            for source, buffer, *index in parts:
                plgpu.copy_gmem_to_smem(source, buffer.at[(stage, *index)], self.full.at[stage], **options)

    def reserve(self, n: Index) -> None:
        """Pass the empty stage of a tile to the compute warpgroups, which write to it."""
        plgpu.barrier_arrive(self.full.at[self._wait_until_empty(n)])

    def _wait_until_empty(self, n: Index) -> jax.Array:
        """Wait until the stage of a tile is empty, and return it."""
        stage = self.stage(n)

        @pl.when(n >= self.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

        return stage

    def wait(self, n: Index) -> jax.Array:
        """Wait until a tile is loaded, and return its stage."""
        stage = self.stage(n)
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, n: Index) -> None:
        """Release a tile: this warpgroup no longer needs it."""
        plgpu.barrier_arrive(self.empty.at[self.stage(n)])

    def skip(self, n: Index) -> None:
        """Wait for and release a tile that only the other warpgroup uses."""
        self.wait(n)
        self.release(n)

    def drain(self, count: Index) -> None:
        """Wait until all `count` tiles are released.

        The simulated GPU requires this, and a block of a cluster must not exit while others arrive at its barriers.
        """
        for offset in range(self.num_stages):

            @pl.when(offset < count)
            def _(stage: int = offset) -> None:
                plgpu.barrier_wait(self.empty.at[stage])


def ring_barriers(
    num_stages: int, num_warpgroups: int, copies: int = 1, names: tuple[str, str] = ("full", "empty")
) -> dict[str, Any]:
    """Return the barriers of a ring whose tiles consist of several copies each."""
    full, empty = names
    return {
        full: plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages),
        empty: plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
    }
