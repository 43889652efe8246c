"""Sizes of Hopper GPUs and of tiles, as plain integers from which tilings are chosen ahead of time."""

NUM_SMS = 132
"""Multiprocessors of an H100 or H200."""
TILE = 64
"""Rows of a matmul of one warpgroup."""
ROWS = 2 * TILE
"""Rows of a thread block with two compute warpgroups."""
