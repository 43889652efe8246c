"""The tiles of attention in the kernels for Hopper GPUs: plain numbers, known before anything runs."""

import dataclasses

HEAD_DIMS = (64, 128)
"""The head sizes that have kernels."""


@dataclasses.dataclass(frozen=True)
class KernelTiling:
    """The tiles of one kernel."""

    columns: int
    """Positions of a tile that the rows of a work item see: 64 or 128."""
    slots: int
    """Stages of the ring of tiles."""
    stages: int
    """Stages of the ring of work items: with 2, the rows of the next one are loaded early."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of the three kernels for one head size."""

    outputs: KernelTiling
    """Queries run over keys."""
    query_gradients: KernelTiling
    """Queries run over keys."""
    key_gradients: KernelTiling
    """Keys run over queries."""


TILINGS = {
    64: Tiling(KernelTiling(128, 8, 2), KernelTiling(64, 16, 2), KernelTiling(128, 8, 2)),
    128: Tiling(KernelTiling(128, 4, 2), KernelTiling(64, 8, 1), KernelTiling(64, 8, 1)),
}
"""The fastest of those measured on an H200 for documents of 1000 tokens on average."""


def tiling_problem(head_dim: int, scale: float = 1.0) -> str | None:
    """Return why the kernels cannot compute heads of a size, or `None` if they can."""
    if head_dim not in HEAD_DIMS:
        return f"there are kernels for heads of {' or '.join(map(str, HEAD_DIMS))} features, not {head_dim}"
    return None if scale > 0 else f"the kernels need a scale above zero, not {scale}"
