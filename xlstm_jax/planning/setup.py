"""The input of a plan: the configs of a run, its batch and its number of devices."""

import dataclasses
import functools
import json
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.import_utils import dotted_path, resolve_import
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.models.shared.stack import RematPolicy
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig

FSDP_MODULES = ("Embed", "Block", "LMHead")
"""The modules of our models whose parameters FSDP can shard."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The part of a run's config that determines its cost. Loggers and callbacks are ignored."""

    trainer: LLMTrainerConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    batch_size: int
    """Rows per batch, over all devices."""
    context_length: int
    num_devices: int

    def __post_init__(self):
        if not isinstance(self.model.model_config, LanguageModelConfig):
            raise ConfigError(
                f"model_config is a {type(self.model.model_config).__name__}, but a plan needs a "
                "LanguageModelConfig, such as XLSTMConfig or LlamaConfig: the FLOPs of other models are unknown."
            )
        if self.batch_size % self.num_devices:
            raise ConfigError(
                f"A batch of {self.batch_size} rows cannot be split over {self.num_devices} devices: the number of "
                "rows has to be a multiple of it."
            )
        if self.rows % self.accumulation:
            raise ConfigError(
                f"gradient_accumulate_steps is {self.accumulation}, but does not divide the {self.rows} rows that a "
                "device works on."
            )

    @property
    def shape(self) -> LanguageModelConfig:
        """The shape of the model."""
        shape: Any = self.model.model_config
        return shape

    @functools.cached_property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each mesh axis, in mesh order."""
        return self.model.parallel.fit(self.num_devices)

    @property
    def rows(self) -> int:
        """The rows per device and step; devices along the pipeline and model axes share the same rows."""
        names = self.model.parallel
        return self.batch_size // (self.axis_sizes[names.data_axis_name] * self.axis_sizes[names.fsdp_axis_name])

    @property
    def accumulation(self) -> int:
        """The number of minibatches."""
        return self.trainer.gradient_accumulate_steps

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh without its devices."""
        sizes = self.axis_sizes
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    @property
    def batch(self) -> LLMBatch:
        """The shapes of a global batch."""
        return LLMBatch.get_dtype_struct(self.batch_size, self.context_length)

    def with_choices(self, *, remat: RematPolicy, accumulation: int, fsdp: int, model: int) -> "Setup":
        """Return the same run with another remat policy, accumulation and mesh.

        Args:
            remat: The remat policy.
            accumulation: The number of minibatches, over which the step scans.
            fsdp: The size of the FSDP axis.
            model: The size of the model axis. The data axis takes the remaining devices.

        Returns:
            The run. If its config names no modules for FSDP, all modules are sharded.
        """
        old = self.model.parallel
        parallel = dataclasses.replace(
            old,
            data_axis_size=-1,
            fsdp_axis_size=fsdp,
            model_axis_size=model,
            remat=(),
            fsdp_modules=old.fsdp_modules or FSDP_MODULES,
        )
        return dataclasses.replace(
            self,
            trainer=dataclasses.replace(
                self.trainer, gradient_accumulate_steps=accumulation, gradient_accumulate_scan=True
            ),
            model=dataclasses.replace(
                self.model,
                parallel=parallel,
                model_config=dataclasses.replace(self.shape, remat=remat, parallel=parallel),
            ),
        )

    def to_json(self) -> str:
        """Serialise the setup for another process."""
        trainer = dataclasses.replace(self.trainer, logger=None, callbacks=[])
        return json.dumps(
            {
                "trainer_class": dotted_path(type(trainer)),
                "trainer": trainer.to_dict(),
                "model": self.model.to_dict(),
                "optimizer": self.optimizer.to_dict(),
                "batch_size": self.batch_size,
                "context_length": self.context_length,
                "num_devices": self.num_devices,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Setup":
        """Deserialise the output of `to_json`."""
        values = json.loads(text)
        trainer_class = resolve_import(values.pop("trainer_class"))
        return cls(
            trainer=ConfigDict.from_dict(trainer_class, values.pop("trainer")),
            model=ModelConfig.from_metadata(json.dumps({"model": values.pop("model")})),
            optimizer=ConfigDict.from_dict(OptimizerConfig, values.pop("optimizer")),
            **values,
        )


def names_of(parallel: ParallelConfig) -> tuple[str, str]:
    """Return the names of the FSDP axis and the model axis."""
    return parallel.fsdp_axis_name, parallel.model_axis_name
