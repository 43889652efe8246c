"""Tilings of attention for the kernels for Hopper GPUs, chosen ahead of time from plain integers."""

import dataclasses

HEAD_DIMS = (64, 128)
"""The supported head sizes."""


@dataclasses.dataclass(frozen=True)
class KernelTiling:
    """The tiles of one kernel."""

    columns: int
    """Positions of a streamed tile: 64 or 128."""
    slots: int
    """Stages of the ring of tiles."""
    stages: int
    """Stages of the ring of work items: with 2, the rows of the next one are prefetched."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of the three kernels for one head size."""

    outputs: KernelTiling
    """For each tile of queries, a loop over keys."""
    query_gradients: KernelTiling
    """For each tile of queries, a loop over keys."""
    key_gradients: KernelTiling
    """For each tile of keys, a loop over queries."""


TILINGS = {
    64: Tiling(KernelTiling(128, 8, 2), KernelTiling(64, 16, 2), KernelTiling(128, 8, 2)),
    128: Tiling(KernelTiling(128, 4, 2), KernelTiling(64, 8, 1), KernelTiling(64, 8, 1)),
}
"""The fastest measured tilings on an H200, for documents of 1000 tokens on average."""


def tiling_problem(head_dim: int, scale: float = 1.0) -> str | None:
    """Return why the kernels do not support heads of a size, or `None` if they do."""
    if head_dim not in HEAD_DIMS:
        return f"there are kernels for heads of {' or '.join(map(str, HEAD_DIMS))} features, not {head_dim}"
    return None if scale > 0 else f"the kernels need a scale above zero, not {scale}"
