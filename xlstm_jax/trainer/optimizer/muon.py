"""Muon: momentum, orthogonalized matrix by matrix (Jordan, 2024); all other parameters use Adam.

The step size follows Liu et al. (2025): an orthogonalized update is scaled by 0.2 * sqrt(max(rows, columns)), so that
its root mean square is about that of Adam's updates, and both can share a learning rate and weight decay.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from xlstm_jax.common_types import Parameter, PyTree
from xlstm_jax.distributed.array_utils import gather_whole, slice_own
from xlstm_jax.utils.partitioned import is_partitioned, partition_names, reboxed, unboxed
from xlstm_jax.utils.pytree_utils import get_param_mask_fn

UPDATE_RMS = 0.2
"""Root mean square of the update of a matrix, before the learning rate."""


def scale_by_muon_and_adam(
    *, beta1: float, beta2: float, eps: float, nesterov: bool, exclude: Sequence[str], stacked_params: Sequence[str]
) -> optax.GradientTransformation:
    """Build the update rule of Muon for matrices and of Adam for the rest, without weight decay and learning rate.

    Args:
        beta1: Decay rate of the momentum, for both rules.
        beta2: Decay rate of Adam's second moment.
        eps: Added to the denominators of both rules.
        nesterov: Whether both rules look ahead along the momentum.
        exclude: Regular expressions for the names of matrices that use Adam.
        stacked_params: Regular expressions for the names of leaves that hold one parameter of each block along their
            first axis.

    Returns:
        The gradient transformation.
    """

    def label(params: PyTree) -> PyTree:
        return jax.tree.map(lambda matrix: "muon" if matrix else "adam", find_matrices(params, exclude, stacked_params))

    muon = optax.chain(scale_by_momentum(beta1, nesterov=nesterov), orthogonalize(eps))
    adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps, nesterov=nesterov)
    return optax.partition({"muon": muon, "adam": adam}, label)


def find_matrices(params: PyTree, exclude: Sequence[str], stacked_params: Sequence[str]) -> PyTree:
    """Return for each leaf, boxed or not, whether it is a matrix, or a stack of the matrices of all blocks.

    Args:
        params: Parameters, or a tree like them.
        exclude: Regular expressions for the names of matrices to exclude.
        stacked_params: Regular expressions for the names of leaves whose first axis is the block.

    Returns:
        A tree with one boolean for each leaf.
    """
    return jax.tree.map(
        lambda leaf, included, stacked: included and jnp.ndim(unboxed(leaf)) - stacked == 2,
        params,
        get_param_mask_fn(exclude)(params),
        get_param_mask_fn(None, include=stacked_params)(params),
        is_leaf=is_partitioned,
    )


def scale_by_momentum(decay: float, *, nesterov: bool) -> optax.GradientTransformation:
    """Replace gradients by their bias-corrected running average; with `nesterov`, by that of the next step."""

    def init(params: PyTree) -> optax.EmaState:
        return optax.EmaState(count=jnp.zeros([], jnp.int32), ema=optax.tree.zeros_like(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        del params
        count = optax.safe_increment(state.count)
        average = optax.tree.update_moment(updates, state.ema, decay, 1)
        if nesterov:
            ahead = optax.tree.bias_correction(average, decay, optax.safe_increment(count))
            direction = optax.tree.update_moment(optax.tree.bias_correction(updates, decay, count), ahead, decay, 1)
        else:
            direction = optax.tree.bias_correction(average, decay, count)
        return direction, optax.EmaState(count=count, ema=optax.tree.cast_like(average, state.ema))

    return optax.GradientTransformation(init, update)


def orthogonalize(eps: float) -> optax.GradientTransformation:
    """Replace each matrix by approximately the nearest orthogonal one, with a root mean square of `UPDATE_RMS`.

    The last two axes of a leaf are those of the matrix. A matrix that is sharded over the mesh is all-gathered for its
    orthogonalization; a stack that is sharded along the axis of blocks is not.

    Args:
        eps: Added to the norm that a matrix is divided by.

    Returns:
        The gradient transformation.
    """
    # Without momentum, optax's rule is the Newton-Schulz iteration alone.
    newton_schulz = optax.contrib.scale_by_muon(
        beta=0.0, eps=eps, nesterov=False, weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1)
    )

    def orthogonalize_leaf(leaf: Parameter) -> Parameter:
        split = partition_names(leaf)
        names = (None,) * (len(split) - 2) + split[-2:]
        whole = gather_whole(unboxed(leaf), names)
        orthogonal = jnp.asarray(newton_schulz.update(whole, newton_schulz.init(whole))[0])
        scale = UPDATE_RMS * math.sqrt(max(whole.shape[-2:]))
        return reboxed(leaf, scale * slice_own(orthogonal, names))

    return optax.stateless(lambda updates, _: jax.tree.map(orthogonalize_leaf, updates, is_leaf=is_partitioned))
