"""The trainer: builds a model on a mesh, then trains, validates and tests it.

The numbers of a step are in `steps`; this class places them on the mesh, loops over batches and calls back.
"""

import contextlib
import dataclasses
import enum
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import HostMetrics, ImmutableMetrics, Metrics, PyTree, StepMetrics, TrainState
from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.mesh_utils import initialize_mesh
from xlstm_jax.distributed.xla_utils import deterministic_options
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer.base.compiled_step import CompiledMemory, out_of_memory_is_reported
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.evaluation import DataLoaders, EvalStep
from xlstm_jax.trainer.base.guard import GuardState
from xlstm_jax.trainer.base.param_utils import get_num_params, tabulate_params
from xlstm_jax.trainer.base.run_metrics import RunMonitor
from xlstm_jax.trainer.base.steps import StepLogging, eval_step, train_step
from xlstm_jax.trainer.base.validation import Validation
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.callbacks.checkpointing import check_folders
from xlstm_jax.trainer.data_module import DataIterator, DataloaderModule, as_replayable
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig, build_gradient_transformations, build_optimizer
from xlstm_jax.trainer.placement import compile_step, init_sharded, on_mesh, place_batch, shapes_on_mesh, zeros_on_mesh
from xlstm_jax.trainer.run.batches import BatchStream
from xlstm_jax.trainer.run.clock import USEFUL, Clock, Heartbeat
from xlstm_jax.trainer.run.plan import Plan, describe_data, describe_mesh, plan_run
from xlstm_jax.trainer.run.progress import Progress
from xlstm_jax.trainer.run.signals import Interrupts, TrainingInterrupted
from xlstm_jax.trainer.token_check import TokenCheck
from xlstm_jax.trainer.user_functions import gather_rows
from xlstm_jax.utils.startup import STARTUP, describe_startup

__all__ = ["TrainerConfig", "TrainerModule"]

LOGGER = logging.getLogger(__name__)

TrainStep = Callable[[TrainState, Batch, Metrics | None], tuple[TrainState, ImmutableMetrics]]


class _Outcome(enum.Enum):
    """Why a stretch of training ended."""

    END_OF_EPOCH = enum.auto()
    FINISHED = enum.auto()
    BAD_STEP = enum.auto()
    INTERRUPTED = enum.auto()


class TrainerModule(Validation):
    """Trains a model. A subclass writes `loss_function`, and overrides what else it needs to.

    Args:
        trainer_config: How to train.
        model_config: What to train.
        optimizer_config: How to update parameters.
        batch: An example of a batch over all devices; shapes (`jax.ShapeDtypeStruct`) will do.
        mesh: The devices; made as `model_config.parallel` says by default. A mesh without devices is for subclasses
            that run nothing.

    Attributes:
        state: The train state, spread over the mesh.
        train_step: `(state, batch, metrics) -> (state, metrics)`, compiled; it overwrites what it gets.
        eval_step: `(state, batch, metrics) -> metrics`, compiled.
        progress: How far the run has come, as checkpoints keep it.
        global_step: The number of steps so far.
        exmp_batch: The example batch.
        batch_partition_specs: How the rows of a batch are split.
        state_partition_specs: How the state is split.
        optimizer: The gradient transformation.
        lr_scheduler: The learning rate by step.
        logger: Where metrics go.
        log_path: The folder of the run, or `None`.
        callbacks: What else happens in a run.
        dataset: Anything that `set_dataset` was given.
        should_stop: Set to true, the run ends after the step or validation at hand.
        status: How the last training ended: `success`, `nan` at a bad step, `skipped` if too many steps were skipped,
            `interrupted` or `error`; `None` before the first.
        clock: Where the time went.
        monitor: Counts tokens and bad steps.
        token_check: Compares the token ids of data with those of the model.
        compiled_memory: What the training step needs, once `compile_train_step` has compiled it.
    """

    config_class: type[TrainerConfig] = TrainerConfig
    """What the config of a trainer in a checkpoint is read as."""

    def __init__(
        self,
        trainer_config: TrainerConfig,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        batch: Batch,
        mesh: Mesh | AbstractMesh | None = None,
    ):
        self.clock = Clock()
        self.token_check = TokenCheck(model_config.num_token_ids)
        self.trainer_config = trainer_config
        self.model_config = model_config
        self.optimizer_config = optimizer_config
        self.exmp_batch = batch
        self.first_step = True
        self.progress = Progress()
        self._validation_metrics: dict[str, Any] = {}
        self._num_bad_seen = 0
        self._batch_of_step: dict[int, int] = {}  # since the host last looked for bad steps
        self.should_stop = False
        self.status: str | None = None
        self.dataset: Any = None
        self._train_metric_shapes: PyTree = None
        self._eval_metric_shapes: PyTree = None
        self._interrupts = Interrupts()
        self._signal_number = 0
        self.compiled_memory: CompiledMemory | None = None
        self.init_mesh(model_config, mesh)  # Processes find each other here, before anything asks for their number.
        self.init_logger(trainer_config.logger)
        self.build_model(model_config)
        self.init_optimizer(optimizer_config)
        self.init_model(batch)
        self.create_jitted_functions()
        self.init_callbacks(trainer_config.callbacks)

    @property
    def global_step(self) -> int:
        """The number of steps so far."""
        return self.progress.step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.progress.step = step

    def init_mesh(self, model_config: ModelConfig, mesh: Mesh | AbstractMesh | None = None) -> None:
        """Arrange the devices, and name the axes."""
        self.mesh: Any = initialize_mesh(model_config.parallel) if mesh is None else mesh
        names = tuple(str(name) for name in self.mesh.axis_names)
        if len(names) < 4:
            raise ConfigError(
                f"The mesh has the axes {', '.join(names)}, but a trainer needs four: data, FSDP, pipeline and model, "
                "in this order. An axis may have one device."
            )
        self.data_axis_name, self.fsdp_axis_name, self.pipeline_axis_name, self.model_axis_name = names[:4]
        self.axis_names = names
        self.batch_partition_specs = P(names)

    def init_logger(self, logger_config: LoggerConfig | None) -> None:
        """Make the logger: files go to the folder of the run unless other tools are named, and progress to stdout."""
        if logger_config is not None:
            tools = list(logger_config.log_tools)
            if logger_config.log_path is not None and all(isinstance(tool, ConsoleLoggerConfig) for tool in tools):
                tools.append(FileLoggerConfig())
            has_console = any(isinstance(tool, ConsoleLoggerConfig) for tool in tools)
            if self.trainer_config.enable_progress_bar and not has_console:
                tools.append(ConsoleLoggerConfig())
            logger_config = dataclasses.replace(logger_config, log_tools=tools)
        self.logger = Logger(logger_config, metric_postprocess_fn=self.get_metric_postprocess_fn())
        self.log_path = self.logger.log_path
        self.logger.log_config(
            {"trainer": self.trainer_config, "model": self.model_config, "optimizer": self.optimizer_config}
        )
        shape = self.model_config.model_config
        self.monitor = RunMonitor(self.clock, self.progress, shape, self.mesh.size)
        self.logger.monitors.append(self.monitor)
        self.logger.step_clock = lambda: self.clock.training_seconds
        is_first = jax.process_index() == 0
        self.heartbeat = Heartbeat(self.log_path / "heartbeat.json" if self.log_path and is_first else None)

    def build_model(self, model_config: ModelConfig) -> None:
        """Make the model from its class and config."""
        self.model = model_config.model_class(
            model_config if model_config.model_config is None else model_config.model_config
        )

    def init_optimizer(self, optimizer_config: OptimizerConfig) -> None:
        """Make the optimizer and its learning rate schedule."""
        self.optimizer, self.lr_scheduler = build_optimizer(optimizer_config)

    def init_model(self, exmp_input: Batch) -> None:
        """Draw the parameters; each is born where it belongs."""
        self.exmp_batch = exmp_input
        example = place_batch(exmp_input, self.mesh, self.batch_partition_specs)
        key = jax.random.PRNGKey(self.trainer_config.seed)
        self.state, self.state_partition_specs = init_sharded(
            self.init_state, self.mesh, (P(), self.batch_partition_specs), key, example
        )
        LOGGER.info("%s", self.tabulate_params())

    def init_state(self, rng: jax.Array, batch: Batch) -> TrainState:
        """Return the state before the first step, inside the mesh."""
        param_rng, rng = jax.random.split(rng)
        variables = dict(self.run_model_init(gather_rows(batch, self.axis_names), param_rng))
        return TrainState.create(
            apply_fn=self.model.apply,
            params=variables.pop("params"),
            mutable_variables=variables or None,
            rng=rng,
            tx=self.optimizer,
            guard=GuardState.create() if self.trainer_config.check_for_nan else None,
        ).replace(step=jnp.zeros((), jnp.int32))

    def run_model_init(self, exmp_input: Batch, init_rng: jax.Array) -> Mapping[str, Any]:
        """Return the variables of the model, inside the mesh; the rows are those that the loss function sees."""
        return self.model.init(self.get_model_rng(init_rng), self.batch_to_input(exmp_input), train=False)

    def init_callbacks(self, callback_configs: Sequence[CallbackConfig]) -> None:
        """Make the callbacks."""
        self.callbacks: list[Callback] = []
        for config in callback_configs:
            if isinstance(config, type):
                raise ConfigError(f"callbacks has the class {config.__name__}: give a config, {config.__name__}(...).")
            self.callbacks.append(config.create(trainer=self, data_module=None))
        check_folders(self.callbacks)
        config = self.trainer_config
        if config.check_for_nan and config.bad_steps.policy == "rollback" and self._checkpoints() is None:
            raise ConfigError("To roll back, a run needs checkpoints: add a ModelCheckpointConfig to its callbacks.")

    def set_dataset(self, dataset: Any) -> None:
        """Keep something about the data for callbacks."""
        self.dataset = dataset

    @staticmethod
    def batch_to_input(batch: Batch) -> Any:
        """Return what the model is initialised with."""
        return batch.inputs

    @staticmethod
    def get_model_rng(rng: jax.Array) -> dict[str, jax.Array]:
        """Return the keys that the model is initialised with."""
        params, dropout = jax.random.split(rng)
        return {"params": params, "dropout": dropout}

    def get_metric_postprocess_fn(self) -> Callable[[HostMetrics], HostMetrics]:
        """Return what turns the metrics on the host into those to log."""
        return lambda metrics: metrics

    def tabulate_params(self) -> str:
        """Return a table of the parameters."""
        config = self.optimizer_config
        return tabulate_params(
            self.state,
            show_weight_decay=config.weight_decay > 0,
            weight_decay_exclude=config.weight_decay_exclude,
            weight_decay_include=config.weight_decay_include,
        )

    def get_num_params(self) -> int:
        """Count the parameters."""
        return get_num_params(self.state.params)

    def loss_function(
        self, params: Any, apply_fn: Any, batch: Batch, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[StepMetrics, PyTree]]:
        """Return `(loss, (metrics, mutable_variables))` of a device's rows; see `steps.train_step`."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss_function`, which says what to minimise.")

    def count_targets(self, batch: Batch) -> jax.Array | None:  # noqa: ARG002
        """Count the targets of some rows, for a loss that is a mean over all of them; by default nobody does."""
        return None

    def create_jitted_functions(self) -> None:
        """Compile the steps, when they are first called."""
        debug, donates_state = self.trainer_config.debug, self.trainer_config.donate_train_state
        donate = (0, 2) if donates_state else (2,)
        train, evaluate = self.create_training_step_function(), self.create_evaluation_step_function()
        options = deterministic_options() if self.trainer_config.deterministic else None
        self.train_step: TrainStep = compile_step(train, donate=donate, debug=debug, options=options)
        self.eval_step: EvalStep = compile_step(evaluate, donate=(2,), debug=debug, options=options)

    def create_training_step_function(self) -> TrainStep:
        """Return the training step over global arrays."""
        config = self.trainer_config
        clipping, _ = build_gradient_transformations(self.optimizer_config)
        reports = StepLogging(
            default_modes=tuple(config.default_train_log_modes),
            intermediates_modes=tuple(config.intermediates_log_modes) if config.log_intermediates else None,
            grad_norm=config.log_grad_norm,
            grad_norm_per_param=config.log_grad_norm_per_param,
            param_norm=config.log_param_norm,
            param_norm_per_param=config.log_param_norm_per_param,
            clip=optax.chain(*clipping) if clipping else None,
            schedule=self.lr_scheduler,
        )
        step = functools.partial(
            train_step,
            axis_names=self.axis_names,
            loss_function=self.loss_function,
            count_targets=self.count_targets,
            num_minibatches=config.gradient_accumulate_steps,
            use_scan=config.gradient_accumulate_scan,
            logging=reports,
            bad_steps=config.bad_steps if config.check_for_nan else None,
        )
        specs = self.state_partition_specs
        return on_mesh(step, self.mesh, (specs, self.batch_partition_specs, P()), (specs, P()))

    def create_evaluation_step_function(self) -> EvalStep:
        """Return the evaluation step over global arrays."""
        step = functools.partial(
            eval_step,
            axis_names=self.axis_names,
            loss_function=self.loss_function,
            count_targets=self.count_targets,
            seed=self.trainer_config.seed_eval,
        )
        return on_mesh(step, self.mesh, (self.state_partition_specs, self.batch_partition_specs, P()), P())

    def init_train_metrics(self, batch: Batch | None = None) -> FrozenDict:
        """Return the metrics before the first step: zeros, so that all steps are one program."""
        if self._train_metric_shapes is None:
            batch = self.exmp_batch if batch is None else batch
            _, self._train_metric_shapes = jax.eval_shape(self.train_step, self.state, batch, None)
        return zeros_on_mesh(self._train_metric_shapes, self.mesh)

    def compile_train_step(self) -> CompiledMemory | None:
        """Compile the training step for the example batch, ahead of the first step, which then does not compile again.

        Returns:
            What the step needs; `None` in a debugging run, which compiles nothing.

        Raises:
            StepDoesNotFitError: If the compiler found that it does not fit, as those for TPUs do.
        """
        if self.compiled_memory is None and not self.trainer_config.debug:
            metrics = self.init_train_metrics()
            batch = shapes_on_mesh(self.exmp_batch, self.mesh, self.batch_partition_specs)
            step: Any = self.train_step
            STARTUP.end("model")
            with out_of_memory_is_reported(self.mesh.local_devices[0]), self.clock.measure("compile") as span:
                traced = step.trace(self.state, batch, metrics)
                STARTUP.end("trace")
                lowered = traced.lower()
                STARTUP.end("lower")
                compiled = lowered.compile()
            STARTUP.end("compile")
            LOGGER.info("The training step was compiled in %.1f s.", span.seconds)
            self.compiled_memory = CompiledMemory.of(compiled, self.mesh.devices.flat[0].device_kind)
        return self.compiled_memory

    def train_model(
        self,
        train_loader: DataIterator,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
        num_epochs: int | None = None,
        num_train_steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> dict[str, Any]:
        """Train until a number of epochs or steps, from wherever the state is.

        Args:
            train_loader: The batches to train on.
            val_loader: What to validate on, one set or several by name; `None` for no validation. The batches of an
                iterator that does not start anew are kept in host memory, up to 1 GiB; likewise of `test_loader`.
            test_loader: What to test on after training, with the latest checkpoint if there is one.
            num_epochs: For how many epochs to train; give this or `num_train_steps`.
            num_train_steps: For how many steps to train.
            steps_per_epoch: The length of an epoch; that of the loader by default.

        Returns:
            The metrics of each evaluation, under `val_step_<step>`, `val_epoch_<epoch>` and `test`.

        Raises:
            TrainingInterrupted: A signal asked the run to stop. The state is saved if a callback saves states.
        """
        self.check_data(train=train_loader, val=val_loader, test=test_loader)
        plan = plan_run(train_loader, num_epochs, num_train_steps, steps_per_epoch)
        self.global_step = int(self.state.step)
        self.progress.num_drawn = max(self.progress.num_drawn, self.global_step)
        self.should_stop = False
        self.clock.start()
        self._look_again()
        status, results = "error", {}
        try:
            with self._interrupts.watch():
                self.logger.on_training_start(step=self.global_step)
                self.monitor.start(self.global_step)
                self.monitor.data_statistics = getattr(train_loader, "get_statistics", dict)
                self.log_training_info(
                    num_epochs, plan.num_train_steps, plan.steps_per_epoch, train_loader, val_loader, test_loader
                )
                val_loader, test_loader = as_replayable(val_loader), as_replayable(test_loader)
                self.on_training_start()
                STARTUP.end("callbacks")
                self.test_eval_function(val_loader)
                STARTUP.end("validation")
                for callback in self.callbacks:
                    callback.set_dataset(DataloaderModule(train_loader, val_loader, test_loader))
                self._prepare_rollback(train_loader)
                outcome = self._train(plan, train_loader, val_loader, results)
                status = {_Outcome.BAD_STEP: "nan", _Outcome.INTERRUPTED: "interrupted"}.get(outcome, "success")
                if status == "success" and self._has_skipped_too_many():
                    status = "skipped"
                if outcome is _Outcome.INTERRUPTED:
                    self.on_training_interrupted(self._epoch_idx(plan), self.global_step)
                    raise TrainingInterrupted(self._signal_number, self.global_step)
                self.on_training_end()
                if number := self._interrupts.received(self.global_step, may_wait=True):
                    status = "interrupted"
                    raise TrainingInterrupted(number, self.global_step)
            if test_loader is not None and status == "success":
                self._load_latest()
                epoch_idx = plan.epoch_at(
                    max(self.progress.num_drawn - 1, 0), max(self.progress.num_epochs_finished - 1, 0)
                )
                results["test"] = self.test_model(test_loader, apply_callbacks=True, epoch_idx=epoch_idx)
        finally:
            self.clock.stop()
            self.status = status
            with contextlib.ExitStack() as stack:  # What one of them raises keeps no other from its end.
                for part in reversed((self.logger, *self.callbacks)):
                    stack.callback(part.finalize, status)
        return results

    def _train(self, plan: Plan, train_loader: DataIterator, val_loader: Any, results: dict[str, Any]) -> _Outcome:
        self._make_up_validation(plan, val_loader, results)
        stream, was_empty = BatchStream(train_loader, self.token_check), False
        while self.global_step < plan.num_train_steps and not self.should_stop:
            epoch_idx, num_drawn = self._epoch_idx(plan), self.progress.num_drawn
            self.on_training_epoch_start(epoch_idx)
            self.logger.start_epoch(epoch_idx, self.global_step, mode="train")
            outcome = self._train_epoch(plan, stream, val_loader, epoch_idx, results)
            if outcome is _Outcome.INTERRUPTED:
                self.logger.leave_epoch()
                return outcome
            _, epoch_metrics = self.logger.end_epoch(self.progress.train_metrics, self.global_step)
            can_roll_back = self.trainer_config.bad_steps.policy == "rollback" and not self.state_is_good()
            if outcome is _Outcome.BAD_STEP and can_roll_back:
                self._roll_back(train_loader)
                stream.restart()
                continue
            self.on_training_epoch_end(epoch_metrics, epoch_idx)
            if outcome is _Outcome.BAD_STEP:
                self.global_step, self.progress.train_metrics = int(self.state.step), None
                return outcome
            is_empty = self.progress.num_drawn == num_drawn
            if is_empty and was_empty:  # The first may be the end of the epoch that a run was stopped in.
                raise ValueError("The train loader gave no batch in a whole epoch: it is empty or used up.")
            was_empty = is_empty
            self.progress.num_epochs_finished += 1
            if self._is_due(epoch_idx, self.trainer_config.check_val_every_n_epoch) and val_loader is not None:
                results[f"val_epoch_{epoch_idx}"] = self._validate_once(val_loader, epoch_idx)
        return _Outcome.FINISHED

    def _train_epoch(
        self,
        plan: Plan,
        stream: BatchStream,
        val_loader: Any,
        epoch_idx: int,
        results: dict[str, Any],
    ) -> _Outcome:
        config, first = self.trainer_config, self.progress.num_drawn
        while (batch := self._draw(plan, stream, begins_epoch=self.progress.num_drawn == first)) is not None:
            self.global_step += 1
            step = self.global_step
            if config.bad_steps.policy == "rollback":
                self._batch_of_step[step] = self.progress.num_drawn
            self.monitor.count(getattr(batch, "inputs", None))
            self._take_step(batch)
            self.on_training_step(self.progress.train_metrics, epoch_idx, step)
            is_logged = self.logger.is_due(step)
            self.progress.train_metrics = self.logger.log_step(self.progress.train_metrics, step)
            is_due = self._is_due(step, config.check_val_every_n_steps) or self._is_validated_at_end(plan)
            is_validated = is_due and val_loader is not None
            if self._has_gone_bad(is_logged=is_logged, may_wait=is_validated):
                return _Outcome.BAD_STEP
            if is_logged:
                self._batch_of_step.clear()
                self.heartbeat.beat(step, self.clock.elapsed)
            if number := self._interrupts.received(step, may_wait=is_logged):
                self._signal_number = number
                return _Outcome.INTERRUPTED
            if is_validated:
                results[f"val_step_{step}"] = self._eval_model_in_train_loop(val_loader, epoch_idx)
            is_last = step >= plan.num_train_steps or self._epoch_idx(plan) > epoch_idx
            if is_last or self.should_stop:
                break
        is_bad = self._has_gone_bad(is_logged=False, may_wait=True)
        return _Outcome.BAD_STEP if is_bad else _Outcome.END_OF_EPOCH

    def _draw(self, plan: Plan, stream: BatchStream, *, begins_epoch: bool) -> Batch | None:
        """Return the next batch that is not to be left out; `None` at the end of an epoch."""
        at_boundary = plan.begins_epoch(self.progress.num_drawn)
        with self.clock.measure("data") as span:
            while (batch := stream.next(begins_epoch=begins_epoch, at_boundary=at_boundary)) is not None:
                self.progress.num_drawn += 1
                if self.progress.num_drawn not in self.progress.skipped_batches:
                    break
            if not self.state.step.is_ready():
                span.activity = USEFUL  # The device was busy all the while.
        self.monitor.data_wait += span.seconds
        return batch

    def _take_step(self, batch: Batch) -> None:
        metrics = self.progress.train_metrics = self._placed_train_metrics(batch)
        if self.first_step:
            STARTUP.end("first batch")
            with out_of_memory_is_reported(self.mesh.local_devices[0]):
                with self.clock.measure("compile") as span:
                    self.state, self.progress.train_metrics = self.train_step(self.state, batch, metrics)
                jax.block_until_ready(self.progress.train_metrics)
            self.first_step = False
            STARTUP.end("first step")
            self._report_startup()
            if self.compiled_memory is None:
                LOGGER.info("The training step was compiled in %.1f s.", span.seconds)
            self.logger.restart_timer(self.global_step)
            return
        with jax.profiler.StepTraceAnnotation("train_step", step_num=self.global_step):
            self.state, self.progress.train_metrics = self.train_step(self.state, batch, metrics)

    def _report_startup(self) -> None:
        if metrics := STARTUP.finish():
            LOGGER.info("Until the end of the first step: %s.", describe_startup(metrics))
            self.logger.log_host_metrics(metrics, self.global_step, mode="startup")

    def _placed_train_metrics(self, batch: Batch) -> Metrics:
        """Return the running metrics on the mesh: those of a checkpoint unless they were logged with its step."""
        metrics = self.progress.train_metrics
        is_restored = any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(metrics))
        if metrics is not None and not is_restored:
            return metrics
        zeros, restored = self.init_train_metrics(batch), FrozenDict(metrics or {})
        if jax.tree.structure(zeros) != jax.tree.structure(restored) or self.logger.is_due(self.global_step - 1):
            return zeros
        return jax.tree.map(lambda zero, x: jax.device_put(x.astype(zero.dtype), zero.sharding), zeros, restored)

    def _load_latest(self) -> None:
        """Load the latest checkpoint, unless it is the state as it is."""
        checkpoints = self._checkpoints()
        if checkpoints is not None and checkpoints.store.latest() not in (None, self.global_step):
            self.load_model()

    def log_training_info(
        self,
        num_epochs: int | None,
        num_train_steps: int,
        steps_per_epoch: int | None,
        train_loader: DataIterator,
        val_loader: DataLoaders | None,
        test_loader: DataLoaders | None,
    ) -> None:
        """Log what is trained, on what, and where."""
        step = self.global_step
        sizes = {
            "num_params": self.get_num_params(),
            "num_optimizer_params": get_num_params(self.state.opt_state),
            "start_step": step,
        }
        plan = Plan(num_train_steps, steps_per_epoch, num_epochs)
        num_rows = jax.tree.leaves(self.exmp_batch)[0].shape[0]
        loaders = {"train": train_loader, "val": val_loader, "test": test_loader}
        self.logger.log_host_metrics(sizes, step, mode="model")
        self.logger.log_host_metrics(describe_data(plan, loaders, num_rows, self.mesh), step, mode="dataset")
        self.logger.log_host_metrics(describe_mesh(self.mesh, jax.process_count()), step, mode="parallel")
