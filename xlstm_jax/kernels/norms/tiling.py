"""Tilings of rows over the threads of a Hopper GPU, chosen ahead of time from plain integers."""

import dataclasses
from collections.abc import Mapping

from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS

WARPS, LANES = 4, 32
"""Warps per thread block, and lanes per warp."""
NUMBERS = 16
"""Elements of an array that a thread loads at a time, if rows are short; as many are prefetched."""
ENOUGH_NUMBERS, MAX_NUMBERS = 24, 32
"""The maximum elements of a row per thread: if more warps can share the row, and otherwise."""
MAX_HEAD_WIDTH = 1024
MAX_SIZE = 2**31
"""Offsets have 32 bits."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A tile of whole rows for a thread block of four warps."""

    width: int
    """Elements of a row."""
    warps: int
    """Warps that share a row; with one warp, reductions of a row need no shared memory."""
    lanes: int
    """Lanes of a warp that share a row."""
    vector: int
    """Adjacent elements per lane."""
    rows: int
    """Rows of a tile."""

    @property
    def numbers(self) -> int:
        """Return the number of elements of a tile per thread."""
        return self.rows * self.width // (WARPS * LANES)


def choose_tiling(width: int) -> Tiling | None:
    """Return the tiling for rows of the given width, `None` if there is none.

    The preferences are, in this order, few elements per thread, few warps per row, long vectors, and few lanes, as sums
    over lanes are more expensive than sums within a thread.
    """
    choices = [
        (numbers > ENOUGH_NUMBERS, warps, -vector, lanes if numbers <= NUMBERS else LANES, numbers, lanes)
        for warps in (1, 2, 4)
        for vector in (8, 4, 2)
        for lanes in ((8, 16, LANES) if warps == 1 else (LANES,))
        if width % (warps * lanes * vector) == 0 and (numbers := width // (warps * lanes)) <= MAX_NUMBERS
    ]
    if not choices:
        return None
    _, warps, vector, _, numbers, lanes = min(choices)
    rows = (WARPS // warps) * (LANES // lanes) * max(1, NUMBERS // numbers)
    return Tiling(width, warps, lanes, -vector, rows)


def num_blocks(resident: Mapping[int, int], tiling: Tiling, num_rows: int, num_heads: int) -> int:
    """Return the number of thread blocks that share the rows of each head.

    Args:
        resident: Resident blocks per multiprocessor, limited by registers, by the maximum elements per thread.
        tiling: The tiles.
        num_rows: The number of rows.
        num_heads: The number of heads in a row.
    """
    of_multiprocessor = next(blocks for numbers, blocks in resident.items() if tiling.numbers <= numbers)
    return max(1, min(num_rows // tiling.rows, NUM_SMS * of_multiprocessor // num_heads))


def shape_problem(num_rows: int, num_heads: int, width: int) -> str | None:
    """Return why the kernels do not support rows of this shape, or `None` if they do.

    Args:
        num_rows: The number of rows.
        num_heads: The number of heads in a row.
        width: The number of features in a head.
    """
    tiling = choose_tiling(width)
    if tiling is None:
        return f"the kernels of norms take widths of 64 and multiples of 128 or 256, up to 4096, and this is {width}"
    if num_heads > 1 and width > MAX_HEAD_WIDTH:
        return f"the kernels of norms take heads of at most {MAX_HEAD_WIDTH} numbers, and these have {width}"
    if num_rows % tiling.rows:
        return f"the kernels of norms take a multiple of {tiling.rows} rows, and these are {num_rows}"
    if num_rows * num_heads < NUM_SMS * tiling.rows:
        return f"{num_rows} rows leave multiprocessors idle"
    if num_rows * num_heads * width >= MAX_SIZE:
        return f"the kernels of norms take arrays of less than {MAX_SIZE:,} numbers"
    return None
