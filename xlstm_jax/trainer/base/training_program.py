"""The program of a training: a model, its sharded state and the compiled steps."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import ImmutableMetrics, Metrics, PyTree, StepMetrics, TrainState
from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.mesh_utils import initialize_mesh
from xlstm_jax.distributed.xla_utils import deterministic_options
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer.base.compiled_step import CompiledMemory, out_of_memory_is_reported
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.evaluator import EvalStep
from xlstm_jax.trainer.base.guard import GuardState
from xlstm_jax.trainer.base.param_utils import get_num_params, tabulate_params
from xlstm_jax.trainer.base.steps import StepLogging, eval_step, train_step
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig, build_gradient_transformations, build_optimizer
from xlstm_jax.trainer.placement import compile_step, init_sharded, on_mesh, place_batch, shapes_on_mesh, zeros_on_mesh
from xlstm_jax.trainer.run.clock import Clock
from xlstm_jax.trainer.user_functions import documented_loss, gather_rows
from xlstm_jax.utils.startup import STARTUP

LOGGER = logging.getLogger(__name__)

TrainStep = Callable[[TrainState, Batch, Metrics | None], tuple[TrainState, ImmutableMetrics]]


class TrainingProgram:
    """Builds a model, its train state and the compiled steps on a mesh; `TrainerModule` runs them.

    Args:
        trainer_config: How to train.
        model_config: The model to train.
        optimizer_config: How to update parameters.
        batch: An example of a global batch; its shapes suffice.
        mesh: The devices; by default, arranged as `model_config.parallel` says.
    """

    def __init__(
        self,
        trainer_config: TrainerConfig,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        batch: Batch,
        mesh: Mesh | AbstractMesh | None = None,
    ):
        self.trainer_config = trainer_config
        self.model_config = model_config
        self.optimizer_config = optimizer_config
        self.exmp_batch = batch
        self.clock = Clock()
        self.compiled_memory: CompiledMemory | None = None
        self._train_metric_shapes: PyTree = None
        self._eval_metric_shapes: PyTree = None
        self.init_mesh(model_config, mesh)

    def build(self) -> None:
        """Create the model, the optimizer, the train state and the steps."""
        self.build_model(self.model_config)
        self.init_optimizer(self.optimizer_config)
        self.init_model(self.exmp_batch)
        self.create_jitted_functions()

    def init_mesh(self, model_config: ModelConfig, mesh: Mesh | AbstractMesh | None = None) -> None:
        """Arrange the devices and name the axes."""
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

    def build_model(self, model_config: ModelConfig) -> None:
        """Create the model from its class and config."""
        self.model = model_config.model_class(
            model_config if model_config.model_config is None else model_config.model_config
        )

    def init_optimizer(self, optimizer_config: OptimizerConfig) -> None:
        """Create the optimizer and its learning rate schedule."""
        self.optimizer, self.lr_scheduler = build_optimizer(optimizer_config)

    def init_model(self, exmp_input: Batch) -> None:
        """Initialise the train state directly in its final sharding."""
        self.exmp_batch = exmp_input
        example = place_batch(exmp_input, self.mesh, self.batch_partition_specs)
        key = jax.random.PRNGKey(self.trainer_config.seed)
        self.state, self.state_partition_specs = init_sharded(
            self.init_state, self.mesh, (P(), self.batch_partition_specs), key, example
        )
        LOGGER.info("%s", self.tabulate_params())

    def init_state(self, rng: jax.Array, batch: Batch) -> TrainState:
        """Return the state before the first step, inside `jax.shard_map`."""
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
        """Return the variables of the model, inside `jax.shard_map`; the loss function sees the same rows."""
        return self.model.init(self.get_model_rng(init_rng), self.batch_to_input(exmp_input), train=False)

    @staticmethod
    def batch_to_input(batch: Batch) -> Any:
        """Return the input that the model is initialised with."""
        return batch.inputs

    @staticmethod
    def get_model_rng(rng: jax.Array) -> dict[str, jax.Array]:
        """Return the keys that the model is initialised with."""
        params, dropout = jax.random.split(rng)
        return {"params": params, "dropout": dropout}

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

    def count_targets(self, batch: Batch) -> jax.Array | None:
        """Count the targets of rows, for a loss that is a mean over all targets of a batch; `None` for other losses."""
        del batch  # The loss of this class has no targets.
        return None

    def create_jitted_functions(self) -> None:
        """Create the steps, which are compiled at their first call."""
        debug, donates_state = self.trainer_config.debug, self.trainer_config.donate_train_state
        donate = (0, 2) if donates_state else (2,)
        train, evaluate = self.create_training_step_function(), self.create_evaluation_step_function()
        options = deterministic_options() if self.trainer_config.deterministic else None
        self.train_step: TrainStep = compile_step(train, donate=donate, debug=debug, options=options)
        self.eval_step: EvalStep = compile_step(evaluate, donate=(2,), debug=debug, options=options)

    def create_training_step_function(self) -> TrainStep:
        """Return the training step over global arrays."""
        config = self.trainer_config
        step = functools.partial(
            train_step,
            axis_names=self.axis_names,
            loss_function=documented_loss(self.loss_function),
            count_targets=self.count_targets,
            num_minibatches=config.gradient_accumulate_steps,
            use_scan=config.gradient_accumulate_scan,
            logging=self._step_logging(),
            bad_steps=config.bad_steps if config.check_for_nan else None,
        )
        specs = self.state_partition_specs
        return on_mesh(step, self.mesh, (specs, self.batch_partition_specs, P()), (specs, P()))

    def create_evaluation_step_function(self) -> EvalStep:
        """Return the evaluation step over global arrays."""
        step = functools.partial(
            eval_step,
            axis_names=self.axis_names,
            loss_function=documented_loss(self.loss_function),
            count_targets=self.count_targets,
            seed=self.trainer_config.seed_eval,
        )
        return on_mesh(step, self.mesh, (self.state_partition_specs, self.batch_partition_specs, P()), P())

    def _step_logging(self) -> StepLogging:
        config = self.trainer_config
        clipping, _ = build_gradient_transformations(self.optimizer_config)
        return StepLogging(
            default_modes=tuple(config.default_train_log_modes),
            intermediates_modes=tuple(config.intermediates_log_modes) if config.log_intermediates else None,
            grad_norm=config.log_grad_norm,
            grad_norm_per_param=config.log_grad_norm_per_param,
            param_norm=config.log_param_norm,
            param_norm_per_param=config.log_param_norm_per_param,
            clip=optax.chain(*clipping) if clipping else None,
            schedule=self.lr_scheduler,
        )

    def init_train_metrics(self, batch: Batch | None = None) -> FrozenDict:
        """Return the metrics before the first step: zeros, so that all steps are one program."""
        if self._train_metric_shapes is None:
            batch = self.exmp_batch if batch is None else batch
            _, self._train_metric_shapes = jax.eval_shape(self.train_step, self.state, batch, None)
        return zeros_on_mesh(self._train_metric_shapes, self.mesh)

    def init_eval_metrics(self, batch: Batch | None = None) -> FrozenDict:
        """Return the metrics before the first batch of an evaluation."""
        if self._eval_metric_shapes is None:
            batch = self.exmp_batch if batch is None else batch
            self._eval_metric_shapes = jax.eval_shape(self.eval_step, self.state, batch, None)
        return zeros_on_mesh(self._eval_metric_shapes, self.mesh)

    def compile_train_step(self) -> CompiledMemory | None:
        """Compile the training step for the example batch before the first step, which then does not compile again.

        Returns:
            The memory that the step needs; `None` in a debugging run, which compiles nothing.

        Raises:
            StepDoesNotFitError: The compiler reports that the step does not fit, as those for TPUs do.
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
