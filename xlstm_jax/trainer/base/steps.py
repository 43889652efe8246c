"""One step of training or evaluation, as each device runs it inside `jax.shard_map`.

The mesh has four axes, and the rows of a batch are sharded over all of them. The devices of the last two (pipeline and
model) work on the same rows, so these are gathered first. A loss function sees the rows of its device, and the
objective is the mean of its results over all devices and minibatches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from xlstm_jax.common_types import ImmutableMetrics, Metrics, PyTree, StepMetrics, TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.data_parallel import sync_gradients
from xlstm_jax.distributed.single_gpu import accumulate_gradients
from xlstm_jax.trainer.base.guard import BadStepConfig, BadStepPolicy, Verdict, judge, select
from xlstm_jax.trainer.base.param_utils import get_grad_norms, get_param_norms, get_sharded_global_norm
from xlstm_jax.trainer.metrics import reduce_step_metrics, update_metrics
from xlstm_jax.trainer.optimizer.optimizer import count_updates
from xlstm_jax.trainer.optimizer.schedule_free import get_eval_params
from xlstm_jax.trainer.user_functions import StepContext, StepLoss, describe, gather_rows
from xlstm_jax.utils.partitioned import is_partitioned, reboxed, unboxed
from xlstm_jax.utils.pytree_utils import flatten_pytree

INTERMEDIATES = "intermediates"
OBJECTIVE = "__objective__"
BAD_STEPS = "bad_steps"
EVALUATION_LOG_MODES = ("mean_nopostfix",)


class StepLogging(NamedTuple):
    """The metrics of a training step in addition to those of the loss function."""

    default_modes: Sequence[str] = ("mean",)
    """Modes of metrics that name none themselves."""
    intermediates_modes: Sequence[str] | None = None
    """Modes of the intermediates that models sow; `None` does not report them."""
    grad_norm: bool = True
    grad_norm_per_param: bool = False
    param_norm: bool = True
    param_norm_per_param: bool = False
    clip: optax.GradientTransformation | None = None
    """The gradient clipping of the optimizer; the norm after clipping is reported too."""
    schedule: optax.Schedule | None = None
    """The learning rate by step."""


def train_step(
    state: TrainState,
    batch: Batch,
    metrics: Metrics | None,
    *,
    axis_names: Sequence[str],
    loss_function: StepLoss,
    count_targets: Callable[[Batch], jax.Array | None],
    num_minibatches: int = 1,
    use_scan: bool = False,
    logging: StepLogging | None = None,
    bad_steps: BadStepConfig | None = None,
) -> tuple[TrainState, ImmutableMetrics]:
    """Update the parameters with a batch.

    Args:
        state: The state of the training.
        batch: This device's rows.
        metrics: The metrics so far.
        axis_names: The mesh axes.
        loss_function: Returns `(loss, (step_metrics, mutable_variables))`; see `documented_loss` for user functions.
        count_targets: Counts the targets of rows.
        num_minibatches: The number of minibatches that go through the model one after the other.
        use_scan: Whether to scan over minibatches instead of unrolling them.
        logging: What to report.
        bad_steps: Which updates to reject, if the state has a guard; `None` applies all.

    Returns:
        The new state and metrics.
    """
    logging = logging or StepLogging()
    axis_names = tuple(axis_names)
    batch = gather_rows(batch, axis_names)
    next_rng, step_rng = jax.random.split(state.rng)
    parts = _count_parts(batch, count_targets, axis_names, num_minibatches)
    context = StepContext(train=True, mutable_variables=state.mutable_variables, **parts)
    loss = _reporting(loss_function, context)
    gradients, step_metrics, variables = accumulate_gradients(state, batch, step_rng, num_minibatches, loss, use_scan)
    if not use_scan:
        variables = jax.tree.map(lambda *of_minibatches: jnp.stack(of_minibatches), *variables)
    sown, variables = _split_off_intermediates(variables)
    gradients = sync_gradients(gradients, axis_names)
    variables = state.mutable_variables if variables is None else _joined_variables(variables, axis_names)
    new_state = state.apply_gradients(grads=gradients, rng=next_rng, mutable_variables=variables)
    if logging.intermediates_modes:
        step_metrics = {**step_metrics, **_intermediate_metrics(sown, logging.intermediates_modes)}
    step_metrics = reduce_step_metrics(step_metrics, axis_names, logging.default_modes)
    objective: Any = step_metrics.pop(OBJECTIVE)
    step_metrics |= _norm_metrics(gradients, new_state.params, logging)
    if logging.schedule is not None:
        lr = jnp.asarray(logging.schedule(count_updates(state.opt_state, otherwise=state.step)), jnp.float32)
        step_metrics["lr"] = {"value": lr, "log_modes": ["mean_nopostfix"]}
    if bad_steps is None or state.guard is None:
        return new_state, update_metrics(metrics, step_metrics, logging.default_modes)

    verdict, guard = judge(
        state.guard,
        bad_steps,
        step=state.step + 1,
        loss=objective["value"] / objective["count"],
        grad_norm=get_sharded_global_norm(gradients)[0],
        axis_names=axis_names,
    )
    new_state = _applied(verdict, new_state, state, bad_steps.policy).replace(guard=guard)
    new_metrics = update_metrics(metrics, step_metrics, logging.default_modes)
    if metrics is not None:
        # A run that stops reports the bad step; one that continues leaves it out of its averages.
        is_shown = verdict.is_applied | verdict.is_bad if bad_steps.policy == "stop" else verdict.is_applied
        new_metrics = select(is_shown, new_metrics, metrics)
    return new_state, update_metrics(new_metrics, {BAD_STEPS: {"value": guard.num_bad, "log_modes": ["single"]}})


def eval_step(
    state: Any,
    batch: Batch,
    metrics: Metrics | None,
    *,
    axis_names: Sequence[str],
    loss_function: StepLoss,
    count_targets: Callable[[Batch], jax.Array | None],
    seed: int = 0,
) -> ImmutableMetrics:
    """Add the metrics of a batch to those of an evaluation.

    Args:
        state: The state of the training, or an object with its parameters, `apply_fn` and `mutable_variables`.
        batch: This device's rows.
        metrics: The metrics so far.
        axis_names: The mesh axes.
        loss_function: As for `train_step`.
        count_targets: Counts the targets of rows.
        seed: The seed of the random key of the loss function, the same for all batches.

    Returns:
        The new metrics.
    """
    batch = gather_rows(batch, axis_names)
    parts = _count_parts(batch, count_targets, axis_names, num_minibatches=1)
    context = StepContext(train=False, mutable_variables=state.mutable_variables, **parts)
    loss = _reporting(loss_function, context)
    params = get_eval_params(getattr(state, "opt_state", ()), state.params)
    _, (step_metrics, _) = loss(params, state.apply_fn, batch, jax.random.PRNGKey(seed))
    del step_metrics[OBJECTIVE]
    return update_metrics(metrics, reduce_step_metrics(step_metrics, axis_names), EVALUATION_LOG_MODES)


def _reporting(loss_function: StepLoss, context: StepContext) -> Callable:
    """Check the result of a loss function, and add the loss to its metrics."""

    def report(params, apply_fn, batch, rng):
        result = loss_function(params, apply_fn, batch, rng, context)
        try:
            loss, (metrics, variables) = result
            shape = jnp.shape(loss)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "The loss function has to return (loss, (metrics, mutable_variables)), with `None` where there are no "
                f"variables. It returned {describe(result)}."
            ) from error
        if shape:
            raise ValueError(f"The loss function returned a loss of shape {shape}: it has to be one number, a mean.")
        if not isinstance(metrics, Mapping):
            raise ValueError(f"The loss function returned {describe(metrics)} as metrics: a dictionary is needed.")
        for name, metric in metrics.items():
            _check_metric(name, metric)
        metrics = {name: {"count": 1, **_parts(metric)} for name, metric in metrics.items()}  # Minibatches are counted.
        return loss, ({**metrics, OBJECTIVE: {"value": loss, "count": 1, "log_modes": ["mean"]}}, variables)

    return report


def _parts(metric: Any) -> Mapping[str, Any]:
    return metric if isinstance(metric, Mapping) else {"value": metric}


def _check_metric(name: str, metric: Any) -> None:
    parts = _parts(metric)
    value, modes = parts.get("value", 0), parts.get("log_modes", ())
    if jnp.shape(value) and not any("noreduce" in mode for mode in modes):
        raise ValueError(
            f"Metric {name!r} has shape {jnp.shape(value)}, but has to be one number: sum it, and give the number of "
            "items as its count. Only the log modes `single_noreduce` and `single_noreduce_wcount` keep arrays."
        )


def _norm_metrics(gradients: PyTree, params: PyTree, logging: StepLogging) -> dict[str, Any]:
    metrics = {}
    if logging.grad_norm:
        metrics |= get_grad_norms(gradients, logging.grad_norm_per_param)
        clipped = gradients
        if logging.clip is not None:
            clipped, _ = logging.clip.update(gradients, logging.clip.init(params))
        metrics["grad_norm_clipped"] = get_sharded_global_norm(clipped)[0]
    if logging.param_norm:
        norms = get_param_norms(params, logging.param_norm_per_param)
        metrics |= {name: {"value": norm, "log_modes": ["mean_nopostfix"]} for name, norm in norms.items()}
    return metrics


def _applied(verdict: Verdict, new: TrainState, old: TrainState, policy: BadStepPolicy) -> TrainState:
    """Choose the state after a step: a skipped step counts as one, a step at which the run stops does not."""
    kept = old.replace(step=new.step, rng=new.rng) if policy == "skip" else old
    return select(verdict.is_applied, new, kept)


def _count_parts(
    batch: Batch, count_targets: Callable, axis_names: Sequence[str], num_minibatches: int
) -> dict[str, Any]:
    """Return `num_targets` and `num_parts` of the context of a step."""
    count = count_targets(batch)
    total = None if count is None else lax.psum(count, tuple(axis_names))
    return {"num_targets": total, "num_parts": axis_size(tuple(axis_names)) * num_minibatches}


def _split_off_intermediates(variables: PyTree) -> tuple[PyTree, PyTree]:
    """Separate sown intermediates from variables."""
    if not isinstance(variables, Mapping):
        return {}, variables
    kept = {name: value for name, value in variables.items() if name != INTERMEDIATES}
    return variables.get(INTERMEDIATES, {}), kept or None


def _joined_variables(variables: PyTree, axis_names: Sequence[str]) -> PyTree:
    """Average variables over minibatches and over the devices that share them; take the last value of integers."""

    def join(x: Any) -> Any:
        stacked = unboxed(x)
        if not jnp.issubdtype(stacked.dtype, jnp.inexact):
            return reboxed(x, stacked[-1])
        return sync_gradients(reboxed(x, jnp.mean(stacked, axis=0)), axis_names)

    return jax.tree.map(join, variables, is_leaf=is_partitioned)


def _intermediate_metrics(sown: PyTree, log_modes: Sequence[str]) -> StepMetrics:
    """Average intermediates over minibatches, with one number per block of scanned blocks."""
    metrics = {}
    for name, value in flatten_pytree(sown).items():
        value = jnp.mean(value.astype(jnp.float32), axis=0)
        numbers = jnp.atleast_1d(value if value.ndim < 2 else jnp.mean(value))
        for index, number in enumerate(numbers):
            metrics[f"{name}_{index}"] = {"value": number, "count": 1, "log_modes": list(log_modes)}
    return metrics
