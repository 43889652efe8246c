"""Tilings of logits for the kernels for Hopper GPUs, chosen ahead of time from plain integers."""

from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS, ROWS, TILE

COLUMNS = 256
"""Columns of a tile of logits of a warpgroup."""
CLUSTER = 2
"""Thread blocks of a cluster, which share the loads of the projection."""
NUM_CLUSTERS = NUM_SMS // CLUSTER
"""Clusters that run concurrently on an H100 or H200."""
MAX_SPLITS = 8
ENOUGH = 0.9
"""The target occupancy: the fraction of the GPU that should be busy."""
MULTIPLE_OF_TOKENS = CLUSTER * ROWS
MULTIPLE_OF_FEATURES = TILE
MULTIPLE_OF_VOCABULARY = 64


def num_splits(num_tokens: int) -> int:
    """Return the number of splits of the vocabulary with which thread blocks occupy a GPU evenly."""
    clusters = num_tokens // MULTIPLE_OF_TOKENS

    def share(splits: int) -> float:
        rounds = -(-clusters * splits // NUM_CLUSTERS)
        return clusters * splits / (NUM_CLUSTERS * rounds)

    candidates = range(1, MAX_SPLITS + 1)
    return next((splits for splits in candidates if share(splits) >= ENOUGH), max(candidates, key=share))


def tiling_problem(num_tokens: int, num_features: int, vocab_size: int) -> str | None:
    """Return why the kernels do not support a size, or `None` if they do."""
    for name, value, multiple in (
        ("tokens", num_tokens, MULTIPLE_OF_TOKENS),
        ("features", num_features, MULTIPLE_OF_FEATURES),
        ("logits of a token", vocab_size, MULTIPLE_OF_VOCABULARY),
    ):
        if value % multiple:
            return f"the kernels for Hopper GPUs need a multiple of {multiple} {name}, not {value}"
    return None
