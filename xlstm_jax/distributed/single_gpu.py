"""Gradient accumulation: one large batch as several small ones."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PRNGKeyArray, PyTree, StepMetrics, TrainState
from xlstm_jax.dataset.batch import Batch


def accumulate_gradients_loop(
    state: TrainState, batch: Batch, rng: PRNGKeyArray, num_minibatches: int, loss_fn: Callable
) -> tuple[PyTree, StepMetrics, PyTree]:
    """Calculate gradients and metrics for a batch using gradient accumulation.

    Args:
        state: Current training state.
        batch: Full training batch.
        rng: Random number generator to use.
        num_minibatches: Number of mini-batches to split the batch into. Equal to the number of gradient accumulation
            steps.
        loss_fn: Loss function to calculate gradients and metrics.

    Returns:
        Tuple with accumulated gradients, metrics, and collected mutable variables over the mini-batches.
    """
    minibatches = _split_batch(batch, num_minibatches)
    gradients_of = _gradient_function(state, loss_fn)
    totals, collected = [], []
    for index, minibatch_rng in enumerate(jax.random.split(rng, num_minibatches)):
        minibatch = jax.tree.map(operator.itemgetter(index), minibatches)
        *sums, mutable_variables = gradients_of(minibatch, minibatch_rng)
        totals = _add(totals, sums) if totals else sums
        collected.append(mutable_variables)
    return _finish(totals, jax.tree.map(lambda *xs: jnp.stack(xs), *collected), num_minibatches)


def accumulate_gradients_scan(
    state: TrainState, batch: Batch, rng: PRNGKeyArray, num_minibatches: int, loss_fn: Callable
) -> tuple[PyTree, StepMetrics, PyTree]:
    """Calculate gradients and metrics for a batch using gradient accumulation.

    In this version, we use `jax.lax.scan` to loop over the mini-batches. This is more efficient in terms of compilation
    time.

    Args:
        state: Current training state.
        batch: Full training batch.
        rng: Random number generator to use.
        num_minibatches: Number of mini-batches to split the batch into. Equal to the number of gradient accumulation
            steps.
        loss_fn: Loss function to calculate gradients and metrics.

    Returns:
        Tuple with accumulated gradients, metrics, and collected mutable variables over the mini-batches.
    """
    minibatches = _split_batch(batch, num_minibatches), jax.random.split(rng, num_minibatches)
    gradients_of = _gradient_function(state, loss_fn)

    def step(totals, minibatch):
        *sums, mutable_variables = gradients_of(*minibatch)
        return _add(totals, sums), mutable_variables

    *sums, _ = jax.eval_shape(gradients_of, *jax.tree.map(operator.itemgetter(0), minibatches))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    totals, mutable_variables = jax.lax.scan(step, zeros, minibatches)
    return _finish(totals, mutable_variables, num_minibatches)


def accumulate_gradients(
    state: TrainState,
    batch: Batch,
    rng: PRNGKeyArray,
    num_minibatches: int,
    loss_fn: Callable,
    use_scan: bool = False,
) -> tuple[PyTree, StepMetrics, PyTree]:
    """Calculate gradients and metrics for a batch using gradient accumulation.

    This function supports scanning over the mini-batches using `jax.lax.scan` or using a for loop.

    Args:
        state: Current training state.
        batch: Full training batch.
        rng: Random number generator to use.
        num_minibatches: Number of mini-batches to split the batch into. Equal to the number of gradient accumulation
            steps.
        loss_fn: Loss function to calculate gradients and metrics. Called as
            `loss_fn(params, apply_fn, minibatch, rng)`, it returns `(loss, (step_metrics, mutable_variables))`.
        use_scan: Whether to use `jax.lax.scan` for looping over the mini-batches.

    Returns:
        Tuple with accumulated gradients, metrics, and collected mutable variables over the mini-batches: gradients are
        averaged, metrics are summed, and mutable variables are stacked on a new leading axis. Leaves of the metrics
        that are no numbers, such as the names of log modes, are passed on.
    """
    accumulate = accumulate_gradients_scan if use_scan else accumulate_gradients_loop
    return accumulate(state, batch, rng, num_minibatches, loss_fn)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A value that JAX carries through traced code as part of a tree's structure."""

    value: Any


def _hide_non_numbers(tree: PyTree) -> PyTree:
    def hide(x):
        is_number = isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)
        return jnp.asarray(x, dtype=jnp.int32 if isinstance(x, bool) else None) if is_number else _Static(x)

    return jax.tree.map(hide, tree)


def _show_non_numbers(tree: PyTree) -> PyTree:
    is_hidden = lambda x: isinstance(x, _Static)  # noqa: E731
    return jax.tree.map(lambda x: x.value if is_hidden(x) else x, tree, is_leaf=is_hidden)


def _gradient_function(state: TrainState, loss_fn: Callable) -> Callable:
    """Return a function from a minibatch and its key to gradients, metrics and mutable variables."""

    def loss_with_numbers_only(params, minibatch, rng):
        loss, (metrics, mutable_variables) = loss_fn(params, state.apply_fn, minibatch, rng)
        return loss, (_hide_non_numbers(metrics), mutable_variables)

    def gradients_of(minibatch, rng):
        grads, (metrics, mutable_variables) = jax.grad(loss_with_numbers_only, has_aux=True)(
            state.params, minibatch, rng
        )
        return grads, metrics, mutable_variables

    return gradients_of


def _split_batch(batch: PyTree, num_minibatches: int) -> PyTree:
    """Reshape each array of a batch to [minibatches, rows of a minibatch, ...]."""

    def split(x):
        if num_minibatches < 1 or x.shape[0] % num_minibatches:
            raise ValueError(
                f"A batch of {x.shape[0]} rows on each device cannot be split into {num_minibatches} minibatches of "
                "one size: change the batch size or the number of accumulation steps so that one divides the other."
            )
        return x.reshape(num_minibatches, x.shape[0] // num_minibatches, *x.shape[1:])

    return jax.tree.map(split, batch)


def _add(totals: list[PyTree], sums: list[PyTree]) -> list[PyTree]:
    return jax.tree.map(jnp.add, totals, sums)


def _finish(totals: list[PyTree], mutable_variables: PyTree, num_minibatches: int) -> tuple:
    grads, metrics = totals
    grads = jax.tree.map(lambda g: g / num_minibatches, grads)
    return grads, _show_non_numbers(metrics), mutable_variables
