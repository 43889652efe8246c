"""One step of training or of evaluation, as each device runs it inside `jax.shard_map`.

The mesh has four axes; the rows of a batch are split over all of them. The devices of the last two (pipeline and model)
work on the same rows, so these are gathered first. What a loss function sees is thus its device's rows, and the
objective is the mean over all devices and minibatches of what it returns.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import ImmutableMetrics, Metrics, PyTree, StepMetrics, TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.data_parallel import sync_gradients
from xlstm_jax.distributed.single_gpu import accumulate_gradients
from xlstm_jax.trainer.base.param_utils import get_grad_norms, get_param_norms
from xlstm_jax.trainer.metrics import reduce_step_metrics, update_metrics
from xlstm_jax.utils.pytree_utils import flatten_pytree

INTERMEDIATES = "intermediates"
EVALUATION_LOG_MODES = ("mean_nopostfix",)


class Whole(NamedTuple):
    """What the minibatch of a loss function is a part of."""

    num_targets: jax.Array | None
    """Targets of the whole batch, counted once for every device that works on them; `None` if nobody counts them."""
    num_parts: int
    """Into how many minibatches the batch is split, over all devices."""


class StepLogging(NamedTuple):
    """What a training step reports beside the metrics of the loss function."""

    default_modes: Sequence[str] = ("mean",)
    """Modes of metrics that name none themselves."""
    intermediates_modes: Sequence[str] | None = None
    """Modes of what models sow; `None` leaves it out."""
    grad_norm: bool = True
    grad_norm_per_param: bool = False
    param_norm: bool = True
    param_norm_per_param: bool = False


def train_step(
    state: TrainState,
    batch: Batch,
    metrics: Metrics | None,
    *,
    axis_names: Sequence[str],
    loss_function: Callable,
    count_targets: Callable[[Batch], jax.Array | None],
    num_minibatches: int = 1,
    use_scan: bool = False,
    logging: StepLogging | None = None,
) -> tuple[TrainState, ImmutableMetrics]:
    """Update the parameters with a batch.

    Args:
        state: The state of the training.
        batch: This device's rows.
        metrics: The metrics so far.
        axis_names: The mesh axes.
        loss_function: Called as `loss_function(params, apply_fn, batch, rng, train=True)`, it returns
            `(loss, (step_metrics, mutable_variables))`. Where it takes them, it also gets `mutable_variables`, those of
            the state, and `whole`, with which it can weigh its targets.
        count_targets: Counts the targets of some rows.
        num_minibatches: How many parts of the batch go through the model one after the other.
        use_scan: Whether these are scanned over, rather than compiled one by one.
        logging: What to report.

    Returns:
        The new state and metrics.
    """
    logging = logging or StepLogging()
    batch = _gather_rows(batch, axis_names)
    next_rng, step_rng = jax.random.split(state.rng)
    whole = _measure(batch, count_targets, axis_names, num_minibatches)
    loss = with_accepted(loss_function, train=True, mutable_variables=state.mutable_variables, whole=whole)
    gradients, step_metrics, variables = accumulate_gradients(state, batch, step_rng, num_minibatches, loss, use_scan)
    sown, variables = _split_off_intermediates(variables)
    gradients = sync_gradients(gradients, axis_names)
    state = state.apply_gradients(
        grads=gradients, rng=next_rng, mutable_variables=_synced_variables(variables, axis_names)
    )
    if logging.intermediates_modes:
        step_metrics = {**step_metrics, **_intermediate_metrics(sown, logging.intermediates_modes)}
    step_metrics = reduce_step_metrics(step_metrics, axis_names, logging.default_modes)
    if logging.grad_norm:
        step_metrics |= get_grad_norms(gradients, logging.grad_norm_per_param)
    if logging.param_norm:
        norms = get_param_norms(state.params, logging.param_norm_per_param)
        step_metrics |= {name: {"value": norm, "log_modes": ["mean_nopostfix"]} for name, norm in norms.items()}
    return state, update_metrics(metrics, step_metrics, logging.default_modes)


def eval_step(
    state: Any,
    batch: Batch,
    metrics: Metrics | None,
    *,
    axis_names: Sequence[str],
    loss_function: Callable,
    count_targets: Callable[[Batch], jax.Array | None],
    seed: int = 0,
) -> ImmutableMetrics:
    """Add the metrics of a batch to those of an evaluation.

    Args:
        state: The state of the training, or what has its parameters, `apply_fn` and `mutable_variables`.
        batch: This device's rows.
        metrics: The metrics so far.
        axis_names: The mesh axes.
        loss_function: As for `train_step`, but called with `train=False`.
        count_targets: Counts the targets of some rows.
        seed: The seed of the key that the loss function gets, the same for all batches.

    Returns:
        The new metrics.
    """
    batch = _gather_rows(batch, axis_names)
    whole = _measure(batch, count_targets, axis_names, num_minibatches=1)
    loss = with_accepted(loss_function, train=False, mutable_variables=state.mutable_variables, whole=whole)
    _, (step_metrics, _) = loss(state.params, state.apply_fn, batch, jax.random.PRNGKey(seed))
    return update_metrics(metrics, reduce_step_metrics(step_metrics, axis_names), EVALUATION_LOG_MODES)


def with_accepted(function: Callable, **arguments: Any) -> Callable:
    """Bind those of the arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    accepted = {name: value for name, value in arguments.items() if takes_all or name in names}
    return lambda *positional: function(*positional, **accepted)


def _gather_rows(batch: Batch, axis_names: Sequence[str]) -> Batch:
    """Give all devices that differ only in the pipeline and model axes the rows of all of them."""
    shared = tuple(axis for axis in axis_names[2:] if axis_size(axis) > 1)
    return jax.tree.map(lambda x: lax.all_gather(x, shared, axis=0, tiled=True), batch) if shared else batch


def _measure(batch: Batch, count_targets: Callable, axis_names: Sequence[str], num_minibatches: int) -> Whole:
    count = count_targets(batch)
    total = None if count is None else lax.psum(count, tuple(axis_names))
    return Whole(total, axis_size(tuple(axis_names)) * num_minibatches)


def _split_off_intermediates(variables: PyTree) -> tuple[PyTree, PyTree]:
    """Separate what models sow from the variables that they keep."""
    if not isinstance(variables, Mapping):
        return {}, variables
    kept = {name: value for name, value in variables.items() if name != INTERMEDIATES}
    return variables.get(INTERMEDIATES, {}), kept or None


def _synced_variables(variables: PyTree, axis_names: Sequence[str]) -> PyTree:
    """Take the variables after the last minibatch, averaged over the devices that have the same ones."""
    return sync_gradients(jax.tree.map(lambda x: x[-1], variables), axis_names)


def _intermediate_metrics(sown: PyTree, log_modes: Sequence[str]) -> StepMetrics:
    """Average what was sown over the minibatches; one number for each block, where blocks are scanned over."""
    metrics = {}
    for name, value in flatten_pytree(sown).items():
        value = jnp.mean(value.astype(jnp.float32), axis=0)
        numbers = jnp.atleast_1d(value if value.ndim < 2 else jnp.mean(value))
        for index, number in enumerate(numbers):
            metrics[f"{name}_{index}"] = {"value": number, "count": 1, "log_modes": list(log_modes)}
    return metrics
