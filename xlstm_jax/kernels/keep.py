"""A name for what kernels keep for their backward pass: with it, rematerialisation can keep it too."""

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept by a kernel"

Tree = TypeVar("Tree")


def keep(tree: Tree) -> Tree:
    """Give the arrays of a tree the name `KEPT`, by which a policy of `jax.checkpoint` can save them."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), tree)
