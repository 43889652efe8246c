"""Names for what is kept for the backward pass: with them, rematerialisation can keep it too."""

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept by a kernel"
SMALL = "small, and much work to compute"
"""What is kept even where all else is computed again."""
OPERAND = "operand of the last product of a branch"
STREAM = "residual stream after a branch"
"""Kept in place of the branch's last product, so that the sum is not computed again."""

Tree = TypeVar("Tree")


def keep(tree: Tree, name: str = KEPT) -> Tree:
    """Give the arrays of a tree a name by which a policy of `jax.checkpoint` can save them."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
