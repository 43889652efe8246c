"""AdEMAMix: Adam with a second, slow momentum (Pagliardini et al., 2024), and the warm-up of its two settings.

The update rule is that of optax; this module adds the schedules and has its own names.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from xlstm_jax.common_types import PyTree

ScaleByAdemamixState = optax.contrib.ScaleByAdemamixState

tree_cast = optax.tree.cast
tree_zeros_like = optax.tree.zeros_like
tree_update_moment = optax.tree.update_moment
tree_update_moment_per_elem_norm = optax.tree.update_moment_per_elem_norm
tree_bias_correction = optax.tree.bias_correction


def alpha_scheduler(alpha: float, alpha_start: float = 0.0, warmup: int = 0) -> optax.Schedule:
    """Build the schedule of the weight of the slow momentum.

    Args:
        alpha: Value after the warm-up.
        alpha_start: Value at step 0.
        warmup: Number of steps of the warm-up; 0 for none.

    Returns:
        A schedule that is linear in the step during the warm-up.
    """
    return optax.linear_schedule(alpha_start, alpha, warmup) if warmup > 0 else optax.constant_schedule(alpha)


def beta3_scheduler(beta_end: float, beta_start: float = 0.0, warmup: int = 0) -> optax.Schedule:
    """Build the schedule of the decay rate of the slow momentum.

    Args:
        beta_end: Decay rate after the warm-up.
        beta_start: Decay rate at step 0.
        warmup: Number of steps of the warm-up; 0 for none.

    Returns:
        A schedule whose half-life, the number of steps after which a gradient counts half, is linear in the step.
    """
    if warmup <= 0:
        return optax.constant_schedule(beta_end)
    half_life = optax.linear_schedule(_half_life(beta_start), _half_life(beta_end), warmup)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        return jnp.where(jnp.asarray(step) < warmup, 0.5 ** (1.0 / jnp.asarray(half_life(step))), beta_end)

    return schedule


def _half_life(decay_rate: float) -> float:
    return math.log(0.5) / math.log(decay_rate) if decay_rate > 0 else 0.0


def ademamix(
    lr: float | optax.Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    alpha: float = 5.0,
    b3_scheduler: optax.Schedule | None = None,
    alpha_scheduler: optax.Schedule | None = None,
    eps: float = 1e-08,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mu_dtype: jnp.dtype | None = None,
    mask: Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformation:
    """Build the AdEMAMix optimizer.

    Args:
        lr: Learning rate.
        b1: Decay rate of the fast momentum.
        b2: Decay rate of the second moment.
        b3: Decay rate of the slow momentum, if it has no schedule.
        alpha: Weight of the slow momentum, if it has no schedule.
        b3_scheduler: Schedule that replaces `b3`.
        alpha_scheduler: Schedule that replaces `alpha`.
        eps: Added to the root of the second moment.
        eps_root: Added to the second moment under the root.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        mu_dtype: Data type of the moments; that of the parameters by default.
        mask: Function from the parameters to a tree of booleans, True where weights decay.

    Returns:
        The optimizer.
    """
    return optax.chain(
        scale_by_ademamix(b1, b2, b3, alpha, b3_scheduler, alpha_scheduler, eps, eps_root, mu_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(lr),
    )


def scale_by_ademamix(
    b1: float,
    b2: float,
    b3: float,
    alpha: float,
    b3_scheduler: optax.Schedule | None,
    alpha_scheduler: optax.Schedule | None,
    eps: float = 1e-08,
    eps_root: float = 0.0,
    mu_dtype: jnp.dtype | None = None,
) -> optax.GradientTransformation:
    """Build the update rule of AdEMAMix, without weight decay and learning rate.

    Args:
        b1: Decay rate of the fast momentum.
        b2: Decay rate of the second moment.
        b3: Decay rate of the slow momentum, if it has no schedule.
        alpha: Weight of the slow momentum, if it has no schedule.
        b3_scheduler: Schedule that replaces `b3`.
        alpha_scheduler: Schedule that replaces `alpha`.
        eps: Added to the root of the second moment.
        eps_root: Added to the second moment under the root.
        mu_dtype: Data type of the moments; that of the parameters by default.

    Returns:
        The gradient transformation.
    """
    rule = optax.contrib.scale_by_ademamix(
        b1=b1,
        b2=b2,
        b3=b3 if b3_scheduler is None else b3_scheduler,
        alpha=alpha if alpha_scheduler is None else alpha_scheduler,
        eps=eps,
        eps_root=eps_root,
        mu_dtype=mu_dtype,
    )

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        updates, new_state = rule.update(updates, state, params)
        # A schedule returns a float32 array, which would promote moments of lower precision.
        return updates, optax.tree.cast_like(new_state, state)

    return optax.GradientTransformation(rule.init, update)
