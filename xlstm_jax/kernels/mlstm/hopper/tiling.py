"""How the kernels for Hopper GPUs cut an mLSTM into tiles: plain numbers, known before anything runs."""

import dataclasses

from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS, ROWS, TILE

MAX_WIDTH = 256
"""Columns of the widest accumulator that a warpgroup can hold."""
SHARED_NUMBERS = 108 * 1024
"""Numbers of two bytes that the tiles of a block may take of its shared memory; the rest is for vectors."""
SHARED_NUMBERS_OF_FEW_VECTORS = 112 * 1024
"""The same where less than three kibibytes are left for vectors."""
HEAD_DIMS = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512))
"""The sizes of queries and keys, and of values, that there are kernels for."""
MOST_WIDENING = 2
"""How much wider a kernel may be than the heads that are filled up for it: at heads of one size, plain JAX takes almost
four times as long."""
CHUNK_SIZES = (128, 256)
SEGMENT_CHUNKS, FEWEST_SEGMENTS = 8, 4
"""Chunks of the shortest part of a sequence that is treated as one of its own, and the least number of such parts: they
are walked over twice, side by side, so two take as long as the whole."""
CUT_WIDTH = 8 * (256 + 512)
"""Columns of keys and values of all heads up to which sequences are cut; to read more of them twice takes too long."""


@dataclasses.dataclass(frozen=True)
class StateTiling:
    """Which part of a memory one block keeps in registers while it walks over the positions."""

    num_warpgroups: int
    """The warpgroups that compute; one more moves data."""
    rows: int
    """Rows of the memory of a block."""
    columns: int
    """Columns of the memory of a block."""
    slots: int
    """Tiles of keys and values that are in flight or in use."""

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
    def pieces(self) -> int:
        """Pieces of `qk_dim` columns that the outputs of a block have."""
        return min(self.v_dim, MAX_WIDTH) // self.qk_dim

    @property
    def output_stages(self) -> int:
        """Pieces of work whose queries are in shared memory, so that those of the next come while one is computed."""
        return 2 if self.qk_dim < MAX_WIDTH else 1

    @property
    def output_slots(self) -> int:
        """Tiles of `TILE` times `qk_dim` numbers that are in flight or in use beside resident queries."""
        return self._slots(SHARED_NUMBERS - ROWS * self.qk_dim * self.output_stages)

    @property
    def pair_stages(self) -> int:
        """Pieces of work whose values, or gradients of outputs, are in shared memory."""
        return 2 if self.qk_dim < MAX_WIDTH else 1

    @property
    def pair_vectors_fit(self) -> bool:
        """Whether there is shared memory for all vectors of a piece, not only for those of columns."""
        return self.v_dim <= MAX_WIDTH

    @property
    def pair_slots(self) -> int:
        """Tiles of `TILE` times `qk_dim` numbers that are in flight or in use beside resident values."""
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
    """Return why no kernel is for heads of these sizes, or `None` if one is."""
    dims = _narrowest_kernel(qk_dim, v_dim)
    if dims is not None and sum(dims) <= MOST_WIDENING * (qk_dim + v_dim):
        return None
    known = ", ".join(f"{k}/{v}" for k, v in HEAD_DIMS)
    misfit = f"{qk_dim}/{v_dim} {'is larger' if dims is None else f'is less than half of {dims[0]}/{dims[1]}'}"
    return f"the kernels for Hopper GPUs have heads of {known} (queries and keys/values), and {misfit}"


def _narrowest_kernel(qk_dim: int, v_dim: int) -> tuple[int, int] | None:
    return next((dims for dims in HEAD_DIMS if dims[0] >= qk_dim and dims[1] >= v_dim), None)


def num_segments(num_heads: int, tiling: Tiling, num_chunks: int) -> int:
    """Return how many parts of a sequence should have their memories computed side by side to fill a GPU.

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
