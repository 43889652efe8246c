"""Gradient accumulation: a large batch is processed as several minibatches."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from xlstm_jax.common_types import PRNGKeyArray, PyTree, StepMetrics, TrainState
from xlstm_jax.dataset.batch import Batch


def accumulate_gradients_loop(
    state: TrainState, batch: Batch, rng: PRNGKeyArray, num_minibatches: int, loss_fn: Callable
) -> tuple[PyTree, StepMetrics | FrozenDict, Sequence[PyTree]]:
    """Calculate gradients and metrics for a batch using gradient accumulation.

    Args:
        state: Current training state.
        batch: Full training batch.
        rng: Random number generator to use.
        num_minibatches: Number of mini-batches to split the batch into. Equal to the number of gradient accumulation
            steps.
        loss_fn: Loss function to calculate gradients and metrics.

    Returns:
        Tuple with accumulated gradients, metrics, and a list of the mutable variables of each mini-batch.
    """
    minibatches = _split_batch(batch, num_minibatches)
    gradients_of = _gradient_function(state, loss_fn)
    totals, collected = [], []
    for index, minibatch_rng in enumerate(jax.random.split(rng, num_minibatches)):
        minibatch = jax.tree.map(operator.itemgetter(index), minibatches)
        *sums, mutable_variables = gradients_of(minibatch, minibatch_rng)
        totals = _join(totals, sums) if totals else sums
        collected.append(mutable_variables)
    return _finish(totals, collected, num_minibatches)


def accumulate_gradients_scan(
    state: TrainState, batch: Batch, rng: PRNGKeyArray, num_minibatches: int, loss_fn: Callable
) -> tuple[PyTree, StepMetrics | FrozenDict, PyTree]:
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
        Tuple with accumulated gradients, metrics, and the mutable variables, stacked over the mini-batches.
    """
    minibatches = _split_batch(batch, num_minibatches), jax.random.split(rng, num_minibatches)
    gradients_of = _gradient_function(state, loss_fn)

    def step(totals, minibatch):
        *sums, mutable_variables = gradients_of(*minibatch)
        return _join(totals, sums), mutable_variables

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
) -> tuple[PyTree, StepMetrics | FrozenDict, Sequence[PyTree] | PyTree]:
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
        averaged, metrics are summed, and mutable variables are a list with one tree for each mini-batch, or, with
        `use_scan`, one tree whose arrays are stacked on a new leading axis. Non-numeric leaves of the metrics, such as
        the names of log modes, are passed through; metrics whose only mode is `max` are combined by their maximum. A
        metric that is to be averaged needs a `count`, which is summed like its value.
    """
    accumulate = accumulate_gradients_scan if use_scan else accumulate_gradients_loop
    return accumulate(state, batch, rng, num_minibatches, loss_fn)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A static value: JAX treats it as part of the structure of a tree."""

    value: Any


def _hide_non_numbers(tree: PyTree) -> PyTree:
    def hide(x):
        is_number = isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex)
        return _summable(jnp.asarray(x)) if is_number else _Static(x)

    return jax.tree.map(hide, tree)


def _summable(x: jax.Array) -> jax.Array:
    """Convert booleans, small integers and half precision to a wider type in which a few values can be added."""
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    return x.astype(wide) if x.dtype.itemsize < 4 else x


def _show_non_numbers(tree: PyTree) -> PyTree:
    is_hidden = lambda x: isinstance(x, _Static)  # noqa: E731
    return jax.tree.map(lambda x: x.value if is_hidden(x) else x, tree, is_leaf=is_hidden)


def _gradient_function(state: TrainState, loss_fn: Callable) -> Callable:
    """Return a function from a minibatch and its key to gradients, metrics and mutable variables."""

    def loss_with_numbers_only(params, minibatch, rng):
        loss, (metrics, mutable_variables) = loss_fn(params, state.apply_fn, minibatch, rng)
        return loss, (_hide_non_numbers(_with_maxima(metrics)), mutable_variables)

    def gradients_of(minibatch, rng):
        grads, (metrics, mutable_variables) = jax.grad(loss_with_numbers_only, has_aux=True)(
            state.params, minibatch, rng
        )
        return grads, metrics, mutable_variables

    return gradients_of


def _is_maximum(metric: Any) -> bool:
    return isinstance(metric, Mapping) and [_show_non_numbers(m) for m in metric.get("log_modes", ())] == ["max"]


def _with_maxima(metrics: PyTree) -> PyTree:
    """Give metrics whose only mode is `max` a count of 1, as they are combined by their maximum, not their sum."""
    if not isinstance(metrics, Mapping):
        return metrics
    ratios = {
        name: {**metric, "value": metric["value"] / metric.get("count", 1), "count": 1}
        for name, metric in metrics.items()
        if _is_maximum(metric)
    }
    return _like(metrics, {**metrics, **ratios})


def _join_metrics(total: PyTree, new: PyTree) -> PyTree:
    """Add metrics, but take the larger of two maxima; a count of 0 means that there is no value yet."""
    if not isinstance(new, Mapping):
        return _add(total, new)
    joined = {}
    for name, metric in new.items():
        joined[name] = _add(total[name], metric)
        if _is_maximum(metric):
            old, value = total[name]["value"], metric["value"]
            larger = jnp.where(total[name]["count"] == 0, value, jnp.maximum(old, value))
            joined[name] = {**metric, "value": larger}
    return _like(new, joined)


def _like(metrics: Mapping, joined: dict) -> Mapping:
    return FrozenDict(joined) if isinstance(metrics, FrozenDict) else joined


def _split_batch(batch: PyTree, num_minibatches: int) -> PyTree:
    """Reshape each array of a batch to [minibatches, rows of a minibatch, ...]."""

    def split(x):
        if not x.ndim:
            raise ValueError("A batch of scalars has no rows to split; every array of a batch needs a leading axis.")
        if num_minibatches < 1 or x.shape[0] % num_minibatches:
            raise ValueError(
                f"A batch of {x.shape[0]} rows on each device cannot be split into {num_minibatches} minibatches of "
                "one size: change the batch size or the number of accumulation steps so that one divides the other."
            )
        return x.reshape(num_minibatches, x.shape[0] // num_minibatches, *x.shape[1:])

    return jax.tree.map(split, batch)


def _add(total: PyTree, new: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, new)


def _join(totals: list[PyTree], new: list[PyTree]) -> list[PyTree]:
    return [_add(totals[0], new[0]), _join_metrics(totals[1], new[1])]


def _finish(totals: list[PyTree], mutable_variables: Sequence[PyTree] | PyTree, num_minibatches: int) -> tuple:
    grads, metrics = totals
    grads = jax.tree.map(lambda g: g / num_minibatches, grads)
    return grads, _show_non_numbers(metrics), mutable_variables
