"""How the kernels for Hopper GPUs cut attention into tiles: plain numbers, known before anything runs."""

import dataclasses

TILE = 64
"""Positions of a warpgroup: the rows of its matrix products."""
ROWS = 2 * TILE
"""Positions of a block, half of them for each of its two computing warpgroups."""
NUM_SMS = 132
"""Multiprocessors of an H100 or H200, each of which holds one block at a time."""
HEAD_DIMS = (64, 128)
"""The sizes of heads that there are kernels for."""


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a block walks over the tiles that its rows see."""

    columns: int
    """Positions of a tile: 64 or 128."""
    slots: int
    """Tiles of a matrix in shared memory that are in flight or in use."""
    stages: int
    """How many pieces of work have their own rows in shared memory: with 2, the next ones are loaded early."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of the three kernels for one head size."""

    outputs: Walk
    """Queries walk over keys."""
    query_gradients: Walk
    """Queries walk over keys."""
    key_gradients: Walk
    """Keys walk over queries."""


TILINGS = {
    64: Tiling(Walk(128, 8, 2), Walk(64, 16, 2), Walk(128, 8, 2)),
    128: Tiling(Walk(128, 4, 2), Walk(64, 8, 1), Walk(64, 8, 1)),
}
"""The fastest of those measured on an H200 for documents of 1000 tokens on average."""


def tiling_problem(head_dim: int, scale: float = 1.0) -> str | None:
    """Return why the kernels cannot compute heads of a size, or `None` if they can."""
    if head_dim not in HEAD_DIMS:
        return f"there are kernels for heads of {' or '.join(map(str, HEAD_DIMS))} features, not {head_dim}"
    return None if scale > 0 else f"the kernels need a scale above zero, not {scale}"
