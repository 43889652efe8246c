"""Tilings of the mLSTM's kernels for Hopper GPUs, chosen ahead of time from plain integers."""

import dataclasses

from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS, ROWS, TILE

MAX_WIDTH = 256
"""Columns of the widest accumulator of a warpgroup."""
SHARED_NUMBERS = 108 * 1024
"""16-bit elements of tiles in the shared memory of a thread block; the rest is for vectors."""
SHARED_NUMBERS_OF_FEW_VECTORS = 112 * 1024
"""The same if less than three kibibytes are needed for vectors."""
HEAD_DIMS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))
"""The supported head sizes of queries and keys, and of values."""
MOST_WIDENING = 2
"""The maximum ratio of the width of a kernel to that of the heads that are padded to it; plain JAX takes almost four
times as long for the same heads."""
CHUNK_SIZES = (128, 256)
SEGMENT_CHUNKS, FEWEST_SEGMENTS = 8, 4
"""The minimum number of chunks in a segment of a sequence, and of segments. Segments are processed in parallel, but
twice, so two segments take as long as the unsplit sequence."""
CUT_WIDTH = 8 * (256 + 512)
"""The maximum columns of keys and values of all heads for splitting sequences: with more, reading twice is too slow."""


@dataclasses.dataclass(frozen=True)
class StateTiling:
    """The part of a memory that one thread block has in registers during its pass over the positions."""

    num_warpgroups: int
    """Compute warpgroups; there is one more for loads."""
    rows: int
    """Rows of the memory per block."""
    columns: int
    """Columns of the memory per block."""
    slots: int
    """Stages of the ring of keys and values."""

    @property
    def splits_columns(self) -> bool:
        """Whether the warpgroups split the columns, as there are too few rows for all."""
        return self.rows < TILE * self.num_warpgroups

    @property
    def width(self) -> int:
        """Columns per warpgroup, which has `TILE` rows."""
        return self.columns // self.num_warpgroups if self.splits_columns else self.columns


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The tiles of one shape."""

    qk_dim: int
    v_dim: int
    chunk_size: int

    @property
    def states(self) -> StateTiling:
        """The tiles of the passes that compute memories."""
        rows, columns = min(self.qk_dim, ROWS), min(self.v_dim, MAX_WIDTH)
        num_warpgroups = 1 if (self.qk_dim, self.v_dim) == (64, 64) else 2
        slots = (SHARED_NUMBERS - rows * columns) // (TILE * (rows + columns))
        return StateTiling(num_warpgroups, rows, columns, min(slots, 6))

    @property
    def output_parts(self) -> int:
        """Parts of `qk_dim` columns of the outputs of a work item."""
        return min(self.v_dim, MAX_WIDTH) // self.qk_dim

    @property
    def output_stages(self) -> int:
        """Stages of the ring of work items: with 2, the queries of the next one are prefetched."""
        return 2 if self.qk_dim < MAX_WIDTH else 1

    @property
    def output_slots(self) -> int:
        """Stages of the ring of tiles of `TILE` times `qk_dim` elements, next to resident queries."""
        return self._slots(SHARED_NUMBERS - ROWS * self.qk_dim * self.output_stages)

    @property
    def pair_stages(self) -> int:
        """Stages of the ring of work items, with their values or gradients of outputs."""
        return 2 if self.qk_dim < MAX_WIDTH else 1

    @property
    def pair_vectors_fit(self) -> bool:
        """Whether shared memory suffices for all vectors of a work item, not only for those of columns."""
        return self.v_dim <= MAX_WIDTH

    @property
    def pair_slots(self) -> int:
        """Stages of the ring of tiles of `TILE` times `qk_dim` elements, next to resident values."""
        numbers = SHARED_NUMBERS if self.pair_vectors_fit else SHARED_NUMBERS_OF_FEW_VECTORS
        return self._slots(numbers - ROWS * self.v_dim * self.pair_stages)

    def _slots(self, numbers: int) -> int:
        return min(numbers // (TILE * self.qk_dim), 20)


def choose_tiling(qk_dim: int, v_dim: int, length: int) -> Tiling:
    """Return the tiling for heads of these sizes, padded to supported ones, and sequences of this length."""
    if problem := tiling_problem(qk_dim, v_dim):
        raise ValueError(f"{problem[0].upper()}{problem[1:]}.")
    dims = _narrowest_kernel(qk_dim, v_dim)
    assert dims is not None
    return Tiling(*dims, min(CHUNK_SIZES[-1], max(CHUNK_SIZES[0], -(-length // ROWS) * ROWS)))


def tiling_problem(qk_dim: int, v_dim: int) -> str | None:
    """Return why the kernels do not support heads of these sizes, or `None` if they do."""
    dims = _narrowest_kernel(qk_dim, v_dim)
    if dims is not None and sum(dims) <= MOST_WIDENING * (qk_dim + v_dim):
        return None
    known = ", ".join(f"{k}/{v}" for k, v in HEAD_DIMS)
    misfit = f"{qk_dim}/{v_dim} {'is larger' if dims is None else f'is less than half of {dims[0]}/{dims[1]}'}"
    return f"the kernels for Hopper GPUs have heads of {known} (queries and keys/values), and {misfit}"


def _narrowest_kernel(qk_dim: int, v_dim: int) -> tuple[int, int] | None:
    return next((dims for dims in HEAD_DIMS if dims[0] >= qk_dim and dims[1] >= v_dim), None)


def num_segments(num_heads: int, tiling: Tiling, num_chunks: int) -> int:
    """Return the number of segments of a sequence whose memories are computed in parallel to occupy a GPU.

    Args:
        num_heads: The number of heads in all sequences of a batch.
        tiling: The tiles.
        num_chunks: The number of chunks of a sequence.
    """
    if num_heads * (tiling.qk_dim + tiling.v_dim) > CUT_WIDTH:
        return 1
    states = tiling.states
    blocks = num_heads * (tiling.qk_dim // states.rows) * (tiling.v_dim // states.columns)
    segments = 1
    most = num_chunks // SEGMENT_CHUNKS
    while blocks * segments * 2 <= NUM_SMS and segments * 2 <= most and num_chunks % (segments * 2) == 0:
        segments *= 2
    return segments if segments >= FEWEST_SEGMENTS else 1
