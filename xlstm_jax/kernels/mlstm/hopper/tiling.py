"""The tiles of the mLSTM's kernels for Hopper GPUs: plain numbers, known before anything runs."""

import dataclasses

from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS, ROWS, TILE

MAX_WIDTH = 256
"""Columns of the widest accumulator that a warpgroup can hold."""
SHARED_NUMBERS = 108 * 1024
"""16-bit numbers of the tiles in the shared memory of a thread block; the rest is for vectors."""
SHARED_NUMBERS_OF_FEW_VECTORS = 112 * 1024
"""The same where less than three kibibytes are left for vectors."""
HEAD_DIMS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))
"""The head sizes of queries and keys, and of values, that have kernels."""
MOST_WIDENING = 2
"""How much wider a kernel may be than the heads that are padded for it: for the same heads, plain JAX takes almost four
times as long."""
CHUNK_SIZES = (128, 256)
SEGMENT_CHUNKS, FEWEST_SEGMENTS = 8, 4
"""Chunks of the shortest segment of a sequence, and the lowest number of segments: they are passed over twice, in
parallel, so two segments take as long as the whole."""
CUT_WIDTH = 8 * (256 + 512)
"""Columns of keys and values of all heads up to which sequences are split: reading more of them twice is too slow."""


@dataclasses.dataclass(frozen=True)
class StateTiling:
    """The part of a memory that one thread block keeps in registers while it passes over the positions."""

    num_warpgroups: int
    """The computing warpgroups; one more loads."""
    rows: int
    """Rows of the memory of a block."""
    columns: int
    """Columns of the memory of a block."""
    slots: int
    """Stages of the ring of keys and values."""

    @property
    def splits_columns(self) -> bool:
        """Whether the warpgroups share the columns, as there are not enough rows for all."""
        return self.rows < TILE * self.num_warpgroups

    @property
    def width(self) -> int:
        """Columns of a warpgroup, which has `TILE` rows."""
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
        """Work items whose queries are in shared memory, so that the next ones are loaded while one is computed."""
        return 2 if self.qk_dim < MAX_WIDTH else 1

    @property
    def output_slots(self) -> int:
        """Stages of the ring of tiles of `TILE` times `qk_dim` numbers, next to resident queries."""
        return self._slots(SHARED_NUMBERS - ROWS * self.qk_dim * self.output_stages)

    @property
    def pair_stages(self) -> int:
        """Work items whose values, or gradients of outputs, are in shared memory."""
        return 2 if self.qk_dim < MAX_WIDTH else 1

    @property
    def pair_vectors_fit(self) -> bool:
        """Whether there is shared memory for all vectors of a work item, not only for those of columns."""
        return self.v_dim <= MAX_WIDTH

    @property
    def pair_slots(self) -> int:
        """Stages of the ring of tiles of `TILE` times `qk_dim` numbers, next to resident values."""
        numbers = SHARED_NUMBERS if self.pair_vectors_fit else SHARED_NUMBERS_OF_FEW_VECTORS
        return self._slots(numbers - ROWS * self.v_dim * self.pair_stages)

    def _slots(self, numbers: int) -> int:
        return min(numbers // (TILE * self.qk_dim), 20)


def choose_tiling(qk_dim: int, v_dim: int, length: int) -> Tiling:
    """Return the tiles for heads of these sizes, or of the next larger ones, and sequences of this length."""
    if problem := tiling_problem(qk_dim, v_dim):
        raise ValueError(f"{problem[0].upper()}{problem[1:]}.")
    dims = _narrowest_kernel(qk_dim, v_dim)
    assert dims is not None
    return Tiling(*dims, min(CHUNK_SIZES[-1], max(CHUNK_SIZES[0], -(-length // ROWS) * ROWS)))


def tiling_problem(qk_dim: int, v_dim: int) -> str | None:
    """Return why no kernel can compute heads of these sizes, or `None` if one can."""
    dims = _narrowest_kernel(qk_dim, v_dim)
    if dims is not None and sum(dims) <= MOST_WIDENING * (qk_dim + v_dim):
        return None
    known = ", ".join(f"{k}/{v}" for k, v in HEAD_DIMS)
    misfit = f"{qk_dim}/{v_dim} {'is larger' if dims is None else f'is less than half of {dims[0]}/{dims[1]}'}"
    return f"the kernels for Hopper GPUs have heads of {known} (queries and keys/values), and {misfit}"


def _narrowest_kernel(qk_dim: int, v_dim: int) -> tuple[int, int] | None:
    return next((dims for dims in HEAD_DIMS if dims[0] >= qk_dim and dims[1] >= v_dim), None)


def num_segments(num_heads: int, tiling: Tiling, num_chunks: int) -> int:
    """Return into how many segments to split a sequence, whose memories are then computed in parallel to fill a GPU.

    Args:
        num_heads: Heads of all sequences of a batch.
        tiling: The tiles.
        num_chunks: Chunks of a sequence.
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
