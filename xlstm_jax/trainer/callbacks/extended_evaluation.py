"""Custom evaluations in addition to the loss: a subclass implements the metrics of a device's rows.

They are computed inside `jax.shard_map` on any mesh, in one compiled program. Metrics are summed, or concatenated in
the order of the rows of the batch, first over devices and then over batches.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import ImmutableMetrics, Metrics, PyTree, StepMetrics, TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.array_utils import axis_index
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataIterator, DataloaderModule, kept_in_place
from xlstm_jax.trainer.metrics import aggregate_metrics, get_metrics, reduce_step_metrics, update_metrics
from xlstm_jax.trainer.optimizer.schedule_free import get_eval_params
from xlstm_jax.trainer.placement import compile_step, on_mesh, zeros_on_mesh
from xlstm_jax.trainer.run.trainer_like import TrainerLike
from xlstm_jax.trainer.user_functions import describe, gather_rows, takes_argument

LOGGER = logging.getLogger(__name__)

EvalStep = Callable[[Any, Batch, Metrics | None], ImmutableMetrics]


class EvalState(struct.PyTreeNode):
    """The part of a train state that an evaluation needs, without the optimizer state.

    As in a train state, fields hold arrays, or the results of a tree map over them.

    Args:
        step: The number of training steps so far.
        rng: The random key of the train state.
        apply_fn: Usually `model.apply`.
        params: The parameters.
        mutable_variables: Variables of the model that are not parameters.
    """

    step: Any
    rng: Any
    apply_fn: Callable = struct.field(pytree_node=False)
    params: PyTree
    mutable_variables: Any = None

    @classmethod
    def from_train_state(cls, *, train_state: TrainState) -> "EvalState":
        """Take the parts of a train state; the parameters are those that its optimizer evaluates with."""
        return cls(
            step=train_state.step,
            rng=train_state.rng,
            apply_fn=train_state.apply_fn,
            params=get_eval_params(train_state.opt_state, train_state.params),
            mutable_variables=train_state.mutable_variables,
        )

    @classmethod
    def create(cls, *, apply_fn: Callable, params: PyTree, **kwargs: Any) -> "EvalState":
        """Create a state at step 0; further arguments are fields."""
        return cls(apply_fn=apply_fn, params=params, **{"step": 0, **kwargs})


@dataclasses.dataclass(kw_only=True, frozen=False)
class ExtendedEvaluationConfig(CallbackConfig):
    """When an evaluation runs, and in which mode it is logged."""

    log_mode: str = "extended"
    """Results are logged in the modes `val_<log_mode>` and `test_<log_mode>`."""

    def __post_init__(self):
        self._check_runs_in_all_processes()

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "ExtendedEvaluation":
        """Build the callback."""
        return ExtendedEvaluation(self, trainer, data_module)


def device_metrics_aggregation(trainer: TrainerLike, metrics: StepMetrics | Mapping[str, Any]) -> StepMetrics:
    """Reduce the step metrics over all devices, inside `jax.shard_map`.

    The devices of the pipeline and model axes work on the same rows, and only the first of them counts: metrics may be
    the same on all of them, or zero on all but the first, as those of `LLMTrainer.loss_function` are.

    Args:
        trainer: The trainer, for the mesh axes.
        metrics: The metrics of this device. Arrays of the modes `single_noreduce` and `single_noreduce_wcount` have the
            rows as their first axis.

    Returns:
        The metrics of the whole batch, the same on all devices. Arrays of those two modes have the rows of all devices
        in the order of the batch; the second mode also in its counts. Other metrics are summed, or the maximum is taken
        if `max` is their only mode.
    """
    data_axes = (trainer.data_axis_name, trainer.fsdp_axis_name)
    shared_axes = (trainer.pipeline_axis_name, trainer.model_axis_name)
    is_first = axis_index(shared_axes) == 0
    gathered, counted = {}, {}
    for name, element in metrics.items():
        if any("noreduce" in mode for mode in _log_modes(element)):
            gathered[name] = _gather_over_devices(name, element, data_axes)
        else:
            parts = {"count": 1, **(element if isinstance(element, Mapping) else {"value": element})}
            numbers = {key: jnp.where(is_first, parts[key], 0) for key in ("value", "count") if key in parts}
            counted[name] = parts | numbers
    return reduce_step_metrics(counted, data_axes + shared_axes) | gathered


class ExtendedEvaluation(Callback):
    """Runs an evaluation before validations and tests, on their data, and logs its metrics.

    A subclass has to implement `eval_function` only. The result of `finalize_metrics` is logged unchanged. To evaluate
    on other data or at other times, override the hooks or call `eval_model`; with `every_n_epochs` below 1, only such
    calls evaluate.

    Args:
        config: When to run.
        trainer: The trainer.
        data_module: The data of the run, if it is known already.

    Attributes:
        exmp_batch: An example of a batch.
        eval_step: `(state, batch, metrics) -> metrics`, compiled unless the trainer debugs.
    """

    config: ExtendedEvaluationConfig

    def __init__(
        self, config: ExtendedEvaluationConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None
    ):
        super().__init__(config, trainer, data_module)
        self.exmp_batch = self.create_modified_exemplary_batch(trainer.exmp_batch)
        self.eval_step: Any = None
        self._eval_metric_shapes: dict[Any, PyTree] | None = None
        self.create_jitted_functions()

    # Methods to override.

    def create_modified_exemplary_batch(self, exmp_batch: Batch) -> Batch:
        """Turn the example batch of the trainer into one of this evaluation, which may have further arrays."""
        return exmp_batch

    def eval_function(
        self, params: Any, apply_fn: Any, batch: Batch, rng: jax.Array
    ) -> tuple[StepMetrics | Mapping[str, Any], PyTree]:
        """Compute the metrics of a device's rows, inside `jax.shard_map`. A subclass implements it.

        If it has a parameter `mutable_variables`, it also gets those of the state.

        Args:
            params: The parameters, this device's part of them.
            apply_fn: The `apply` method of the model.
            batch: This device's rows. Devices of the pipeline and model axes have the same ones, and have to return the
                same metrics, or zeros on all but the first of them.
            rng: A random key, the same for all devices and batches; `fold_rng_over_axis` makes one for each device.

        Returns:
            A tuple of metrics and mutable variables; an evaluation changes no variables, so `None` suffices. A metric
            is a number or `{"value": ..., "count": ..., "log_modes": [...]}`, where the value is a sum over `count`
            items; with a count for each element, it is an array of sums. The modes `single_noreduce` and
            `single_noreduce_wcount` keep one entry per row instead: rows are the first axis of the value, and in the
            second mode also of the count.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `eval_function`, which computes its metrics.")

    def aggregate_metrics(
        self, aggregated_metrics: Mapping[str, Any], eval_metrics: Metrics | Mapping[str, Any]
    ) -> dict[str, Any]:
        """Add the metrics of a batch to those on the host; see `metrics.aggregate_metrics`.

        Args:
            aggregated_metrics: The result of the previous call, or an empty dictionary.
            eval_metrics: The result of `eval_step`: sums over all batches so far, and the rows of this batch.

        Returns:
            The metrics including those of the batch.
        """
        return aggregate_metrics(aggregated_metrics, eval_metrics)

    def finalize_metrics(self, aggregated_metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Turn the metrics of a data set into those to report: sums over counts, and arrays unchanged.

        Args:
            aggregated_metrics: The result of `aggregate_metrics` for the last batch.

        Returns:
            The metrics, named as in any evaluation: `<name>`, or `<name>_<mode>` for a mode other than the default.
        """
        _, host_metrics = get_metrics(dict(aggregated_metrics), reset_metrics=False)
        return host_metrics

    def on_extended_evaluation_start(self) -> None:
        """Run before each evaluation."""

    def on_extended_evaluation_end(self, final_metrics: dict[str, Any]) -> None:
        """Run after each evaluation, with its results."""

    # The program of the evaluation.

    def create_jitted_functions(self) -> None:
        """Create the step, compiled at its first call unless the trainer debugs."""
        step = self.create_evaluation_step_function()
        self.eval_step = compile_step(step, donate=(), debug=self.trainer.trainer_config.debug)

    def create_evaluation_step_function(self) -> EvalStep:
        """Return the step over global arrays.

        Returns:
            A function `(state, batch, metrics) -> metrics` of an `EvalState` or a train state.
        """
        trainer, takes_variables = self.trainer, takes_argument(self.eval_function, "mutable_variables")

        def device_step(state: EvalState, batch: Batch, metrics: Metrics | None) -> ImmutableMetrics:
            variables = {"mutable_variables": state.mutable_variables} if takes_variables else {}
            rows = gather_rows(batch, trainer.axis_names)
            key = jax.random.PRNGKey(trainer.trainer_config.seed_eval)
            step_metrics = _checked(self.eval_function(state.params, state.apply_fn, rows, key, **variables))
            return update_metrics(metrics, device_metrics_aggregation(trainer, step_metrics))

        specs = EvalState.from_train_state(train_state=trainer.state_partition_specs.replace(opt_state=()))
        step_on_mesh = on_mesh(device_step, trainer.mesh, (specs, trainer.batch_partition_specs, P()), P())

        def step(state: EvalState | TrainState, batch: Batch, metrics: Metrics | None) -> ImmutableMetrics:
            if isinstance(state, TrainState):
                state = EvalState.from_train_state(train_state=state)
            return step_on_mesh(state, batch, metrics)

        return step

    def init_eval_metrics(
        self, batch: Batch | None = None, alternative_eval_step: Callable | None = None
    ) -> FrozenDict:
        """Return the metrics before the first batch: zeros, so that all batches are one program.

        Args:
            batch: A batch to infer shapes from; `exmp_batch` by default.
            alternative_eval_step: A function that is called instead of `eval_step`.

        Returns:
            Zeros with the shapes of the metrics.
        """
        batch = self.exmp_batch if batch is None else batch
        step = self.eval_step if alternative_eval_step is None else alternative_eval_step
        known = self._eval_metric_shapes = self._eval_metric_shapes or {}
        leaves, structure = jax.tree.flatten(batch)
        kind = (step, structure, *((x.shape, x.dtype) for x in leaves))
        if kind not in known:
            known[kind] = jax.eval_shape(step, self._eval_state(), batch, None)
        return zeros_on_mesh(known[kind], self.trainer.mesh)

    # The evaluation.

    def eval_model(
        self, data_loader: DataIterator | dict[str, DataIterator], mode: str = "test", epoch_idx: int = 0
    ) -> dict[str, Any]:
        """Evaluate the model on a data set.

        Args:
            data_loader: The batches, or several sets of them by name.
            mode: The name of the data, such as `val` or `test`.
            epoch_idx: The index of the epoch.

        Returns:
            The metrics over all batches; those of named sets under `<set>_<metric>`.
        """
        self.on_extended_evaluation_start()
        if isinstance(data_loader, Mapping):
            final_metrics = {
                f"{name}_{key}": value
                for name, loader in data_loader.items()
                for key, value in self._evaluate(loader, f"{mode}/{name}", epoch_idx).items()
            }
        else:
            final_metrics = self._evaluate(data_loader, mode, epoch_idx)
        self.on_extended_evaluation_end(final_metrics)
        return final_metrics

    def on_filtered_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Evaluate on the data of the validation."""
        self._run("val", epoch_idx, step_idx)

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Evaluate on the data of the test."""
        if self._active_on_epochs:
            self._run("test", epoch_idx, self.trainer.global_step)

    def _run(self, mode: str, epoch_idx: int, step_idx: int) -> None:
        base, own = ExtendedEvaluation, type(self)
        writers = ("eval_function", "create_evaluation_step_function")
        if all(getattr(own, name) is getattr(base, name) for name in writers):
            return
        loader = getattr(self.data_module, f"{mode}_dataloader", None)
        if loader is None:
            LOGGER.warning("%s has no data to evaluate in mode %s: give it some by set_dataset.", own.__name__, mode)
            return
        start = time.perf_counter()
        with kept_in_place(loader):
            metrics = self.eval_model(loader, mode=mode, epoch_idx=epoch_idx)
        metrics = {**metrics, "epoch_time": time.perf_counter() - start}
        self.trainer.logger.log_host_metrics(metrics, step_idx, mode=f"{mode}_{self.config.log_mode}")

    def _evaluate(self, data_loader: DataIterator, mode: str, epoch_idx: int) -> dict[str, Any]:
        state, metrics, aggregated = self._eval_state(), None, {}
        batches = iter(self.trainer.tracker(data_loader, desc=f"{mode} {epoch_idx}"))
        for batch in self.trainer.token_check.check_batches(batches, data_loader):
            _check_rows(batch, self.trainer.mesh.size)
            metrics = self.eval_step(state, batch, self.init_eval_metrics(batch) if metrics is None else metrics)
            aggregated = self.aggregate_metrics(aggregated, metrics)
        if metrics is None:
            raise ValueError(f"The loader for {mode!r} gave no batch: it is empty or used up.")
        return self.finalize_metrics(aggregated)

    def _eval_state(self) -> EvalState:
        return EvalState.from_train_state(train_state=self.trainer.state)


def _log_modes(element: Any) -> tuple[str, ...]:
    modes = element.get("log_modes") if isinstance(element, Mapping) else None
    return (modes,) if isinstance(modes, str) else tuple(modes or ())


def _gather_over_devices(name: str, element: Any, data_axes: tuple[str, str]) -> dict[str, Any]:
    modes = _log_modes(element)
    if len(modes) > 1:
        raise ValueError(
            f"Metric {name!r} has the log modes {', '.join(modes)}: one that keeps rows stands alone. Return the "
            "metric under two names."
        )
    value, count = jnp.atleast_1d(element["value"]), jnp.asarray(element.get("count", 1))
    if modes == ("single_noreduce",):
        count = lax.psum(count, data_axes)
    else:
        count = jnp.broadcast_to(count, value.shape[:1]) if count.ndim == 0 else count
        if count.shape[0] != value.shape[0]:
            raise ValueError(
                f"Metric {name!r} has values of shape {value.shape} and counts of shape {count.shape}: in the mode "
                "single_noreduce_wcount, their first axes are the same rows."
            )
        count = lax.all_gather(count, data_axes, tiled=True)
    return {**element, "value": lax.all_gather(value, data_axes, tiled=True), "count": count}


def _checked(result: Any) -> Mapping[str, Any]:
    """Return the metrics in the result of an `eval_function`, or raise an error that explains a wrong result."""
    if not (isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[0], Mapping)):
        raise ValueError(
            "eval_function has to return (metrics, mutable_variables): a dictionary, and `None` where there are no "
            f"variables. It returned {describe(result)}."
        )
    metrics = result[0]
    for name, element in metrics.items():
        parts = element if isinstance(element, Mapping) else {"value": element}
        if "value" not in parts:
            raise ValueError(f"Metric {name!r} has only the keys {list(parts)}: a value is needed.")
        shape, count_shape = (jnp.shape(parts.get(key, 1)) for key in ("value", "count"))
        if shape != count_shape and not any("noreduce" in mode for mode in _log_modes(element)):
            raise ValueError(
                f"Metric {name!r} has a value of shape {shape} and a count of shape {count_shape}. Sum it, and give "
                "the number of items as its count; or give a count for each element, to average each by itself; or "
                "keep the rows with the log modes single_noreduce or single_noreduce_wcount."
            )
    return metrics


def _check_rows(batch: Batch, num_devices: int) -> None:
    num_rows = {x.shape[0] for x in jax.tree.leaves(batch)}
    if any(rows % num_devices for rows in num_rows):
        raise ValueError(
            f"A batch of {min(num_rows)} rows cannot be split over {num_devices} devices: the number of rows has to be "
            "a multiple of it. Fill the last batch with rows of padding, which eval_function can tell by their "
            "segmentation (0) or document_idx (0), or leave it out."
        )
