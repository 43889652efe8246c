"""What a model is and how it is spread over devices."""

import dataclasses
import json
import typing
from collections.abc import Callable
from typing import Any

from xlstm_jax.configs import MAY_CHANGE, ConfigDict, ConfigError
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.import_utils import resolve_import

__all__ = ["ModelConfig", "ParallelConfig", "SubModelConfig"]


@dataclasses.dataclass(kw_only=True, frozen=False)
class ModelConfig(ConfigDict):
    """A model class with its config."""

    model_class: Callable
    """The Flax module of the model."""
    parallel: ParallelConfig = dataclasses.field(metadata=MAY_CHANGE)
    """The mesh and the sharding of the model."""
    model_config: ConfigDict | None = None
    """What `model_class` is called with; the whole `ModelConfig` if `None`."""

    @property
    def num_token_ids(self) -> int | None:
        """The number of token ids that the model has: its `vocab_size`, if it has one."""
        size = getattr(self if self.model_config is None else self.model_config, "vocab_size", None)
        return size if isinstance(size, int) else None

    @staticmethod
    def from_metadata(metadata_content: str) -> "ModelConfig":
        """Rebuild the config of a model from the metadata of a checkpoint.

        Args:
            metadata_content: The JSON text, with `model_class`, `model_config` and `parallel` under `model`.

        Returns:
            The config. The type of its `model_config` is that of the field `config` of the model class.
        """
        model = json.loads(metadata_content)["model"]
        model_class = resolve_import(model["model_class"])
        config_class = typing.get_type_hints(model_class).get("config")
        if config_class is None:
            raise ConfigError(f"{model['model_class']} has no annotated field `config` that says what its config is.")
        return ModelConfig(
            model_class=model_class,
            parallel=ConfigDict.from_dict(ParallelConfig, model["parallel"]),
            model_config=ConfigDict.from_dict(config_class | None, model.get("model_config")),
        )


@dataclasses.dataclass
class SubModelConfig:
    """Base of the configs of a model and its parts that are no `ConfigDict`."""

    def to_dict(self) -> dict[str, Any]:
        """Write the config with nothing but dictionaries, tuples, numbers and strings; `None` becomes "None"."""
        plain = ConfigDict.to_dict(typing.cast("ConfigDict", self))
        return {key: "None" if value is None else value for key, value in plain.items()}
