"""An abstract trainer: trace and lower the programs of a run for any mesh, without arrays, files or devices."""

import dataclasses
import functools
from typing import Any

import jax
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.dataset.batch import Batch
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.planning.setup import Setup
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.placement import check_rows, find_specs, on_mesh, shapes_on_mesh
from xlstm_jax.utils.partitioned import is_partitioned, reboxed, unboxed

PLATFORM = "cpu"
"""The platform that programs are lowered for on a mesh without devices."""


class AbstractTrainer(LLMTrainer):
    """An `LLMTrainer` whose state consists of shapes with shardings. It has no logger and no callbacks.

    Args:
        trainer_config: The config of the trainer; `debug` is ignored, as a debugged run compiles no program.
        model_config: The config of the model.
        optimizer_config: The config of the optimizer.
        batch: The shapes of a global batch.
        mesh: The mesh; programs can be compiled only if it has devices.
    """

    def __init__(
        self,
        trainer_config: LLMTrainerConfig,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        batch: Batch,
        mesh: Mesh | AbstractMesh,
    ):
        trainer_config = dataclasses.replace(trainer_config, debug=False)
        super().__init__(trainer_config, model_config, optimizer_config, batch, mesh)

    @classmethod
    def from_setup(cls, setup: Setup, mesh: Mesh | None = None) -> "AbstractTrainer":
        """Build the trainer of a run, by default on a mesh without devices."""
        return cls(setup.trainer, setup.model, setup.optimizer, setup.batch, setup.mesh if mesh is None else mesh)

    def init_logger(self, logger_config: LoggerConfig | None) -> None:
        """Create no logger."""

    def init_callbacks(self, callback_configs: Any) -> None:
        """Create no callbacks."""

    def init_model(self, exmp_input: Batch) -> None:
        """Compute the shapes and shardings of batch and state."""
        check_rows(exmp_input, self.mesh)
        self.exmp_batch = shapes_on_mesh(exmp_input, self.mesh, self.batch_partition_specs)
        key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
        in_specs = (P(), self.batch_partition_specs)
        specs = find_specs(self.init_state, self.mesh, in_specs, key, self.exmp_batch)
        shapes = jax.eval_shape(on_mesh(self.init_state, self.mesh, in_specs, specs), key, self.exmp_batch)
        self.state_partition_specs = specs
        self.state = jax.tree.map(
            lambda leaf, spec: reboxed(leaf, _shape_on(unboxed(leaf), self.mesh, spec)),
            shapes,
            specs,
            is_leaf=is_partitioned,
        )

    @functools.cached_property
    def train_metrics_shapes(self) -> FrozenDict:
        """The shapes of the metrics that a training step accumulates."""
        _, shapes = jax.eval_shape(self.train_step, self.state, self.exmp_batch, None)
        return FrozenDict(shapes_on_mesh(shapes, self.mesh, P()))

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The traced training step."""
        step: Any = self.train_step
        return step.trace(self.state, self.exmp_batch, self.train_metrics_shapes)

    def lower(self) -> jax.stages.Lowered:
        """Return the lowered training step, which can be compiled if the mesh has devices."""
        return self._lower(self.traced)

    def lower_eval(self) -> jax.stages.Lowered:
        """Return the lowered evaluation step, which can be compiled if the mesh has devices."""
        step: Any = self.eval_step
        shapes = jax.eval_shape(step, self.state, self.exmp_batch, None)
        return self._lower(step.trace(self.state, self.exmp_batch, FrozenDict(shapes_on_mesh(shapes, self.mesh, P()))))

    def _lower(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
        return traced.lower() if isinstance(self.mesh, Mesh) else traced.lower(lowering_platforms=(PLATFORM,))


def _shape_on(shape: Any, mesh: Mesh | AbstractMesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))
