"""Schedule-free AdamW (Defazio et al., 2024): an average of the weights replaces a decaying learning rate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from xlstm_jax.common_types import PyTree


def schedule_free_adamw(
    learning_rate: float | optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    mask: Callable[[PyTree], PyTree] | None,
) -> optax.GradientTransformation:
    """Build schedule-free AdamW with masked weight decay.

    Args:
        learning_rate: Learning rate; the method is designed for a warm-up and then a constant.
        beta1: Weight of the average in the point at which gradients are evaluated; positive.
        beta2: Decay rate of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        mask: Function from the parameters to a tree of booleans, True where weights decay.

    Returns:
        The optimizer. Trainers evaluate models with `get_eval_params`.
    """
    adamw_without_momentum = optax.chain(
        optax.scale_by_rms(decay=beta2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.contrib.schedule_free(adamw_without_momentum, learning_rate, b1=beta1)


def get_eval_params(opt_state: optax.OptState, params: PyTree) -> PyTree:
    """Return the parameters to evaluate a model with.

    Args:
        opt_state: The state of any optimizer.
        params: The parameters that the optimizer updates.

    Returns:
        The average of the weights if the optimizer is schedule-free, `params` themselves otherwise.
    """
    for state in jax.tree.leaves(opt_state, is_leaf=_is_schedule_free):
        if _is_schedule_free(state):
            return optax.contrib.schedule_free_eval_params(state, params)
    return params


def started_from(opt_state: optax.OptState, params: PyTree) -> optax.OptState:
    """Return the optimizer state to use after the parameters were replaced, for example by loaded ones.

    The state of a schedule-free optimizer has a second copy of the parameters, which has to be replaced too. The states
    of other optimizers are returned unchanged.
    """

    def start(state: Any) -> Any:
        return state._replace(z=jax.tree.map(jnp.copy, params)) if _is_schedule_free(state) else state

    return jax.tree.map(start, opt_state, is_leaf=_is_schedule_free)


def _is_schedule_free(state: object) -> bool:
    return isinstance(state, optax.contrib.ScheduleFreeState)
