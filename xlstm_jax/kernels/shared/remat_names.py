"""Names of residuals, by which policies of `jax.checkpoint` save them instead of recomputing them."""

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept by a kernel"
SMALL = "small, and much work to compute"
"""Residuals that are saved even where all others are recomputed."""
OPERAND = "operand of the last product of a branch"
STREAM = "residual stream after a branch"
"""Saved instead of the branch's last matmul, so that the sum is not recomputed."""

Tree = TypeVar("Tree")


def keep(tree: Tree, name: str = KEPT) -> Tree:
    """Name the arrays of a tree, so that a policy of `jax.checkpoint` can save them."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
