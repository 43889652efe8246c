"""The data of a run, from one section of settings to the configs of its training and validation sets."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.dataset.configs import (
    DataConfig,
    FormalTaskDataConfig,
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    StandardLibraryDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.import_utils import resolve_import
from xlstm_jax.recipes.build import build, nearest

KINDS: dict[str, type[DataConfig]] = {
    "formal_task": FormalTaskDataConfig,
    "grain_arrayrecord": GrainArrayRecordsDataConfig,
    "huggingface_hub": HFHubDataConfig,
    "standard_library": StandardLibraryDataConfig,
    "synthetic": SyntheticDataConfig,
    "text_files": TextFilesDataConfig,
}
"""What `data_config_type` may be, beside the dotted path of a class."""

PREPARED_FOLDER = "data"
"""Where a run keeps what it prepares, unless it is told another place."""


@dataclasses.dataclass(kw_only=True)
class PrepareConfig(ConfigDict):
    """Texts that a run tokenises into shards before it trains on them; see `xlstm_jax.dataset.prepare`."""

    sources: list[str]
    output: Path | None = None
    """The folder of the shards, which several runs may share; `data` in the folder of the run if `None`."""
    validation_share: float | None = None
    """The share of documents that are for validation, where the sources do not say it themselves."""
    tokenizer_path: str = "byte"
    train_vocab_size: int | None = None
    """Train a tokenizer with this many tokens, instead of `tokenizer_path`."""
    column: str = "text"
    on_bad_data: Literal["error", "skip"] = "error"
    max_document_bytes: int | None = 65536
    num_workers: int | None = None

    @property
    def has_validation(self) -> bool:
        """Whether there will be documents for validation."""
        return self.validation_share is not None or self.sources == ["stdlib"]


@dataclasses.dataclass(kw_only=True)
class DataRecipe(ConfigDict):
    """The data of a run."""

    train: list[DataConfig]
    """What is trained on: one set, or several that are mixed."""
    weights: list[float] | None = None
    """The share of tokens of each set, in any unit."""
    weights_at_steps: dict[int, list[float]] | None = None
    """From these steps on, other weights."""
    validation: dict[str, DataConfig] = dataclasses.field(default_factory=dict)
    """What is validated on, by name."""
    prepare: PrepareConfig | None = None

    @property
    def first(self) -> DataConfig:
        """The set that stands for all where they have to be the same."""
        return self.train[0]

    @property
    def tokenizer_path(self) -> str | None:
        """The tokenizer of texts; `None` if the data is no text."""
        return self.first.tokenizer_path if isinstance(self.first, TextDataConfig) else None

    def in_folder(self, folder: Path) -> "DataRecipe":
        """Return the recipe with what it prepares in the folder of a run, unless it says another place."""
        if self.prepare is None or self.prepare.output is not None:
            return self
        prepare = dataclasses.replace(self.prepare, output=folder / PREPARED_FOLDER)
        changed = _prepared_fields(prepare)
        return dataclasses.replace(
            self,
            prepare=prepare,
            train=[dataclasses.replace(config, **changed) for config in self.train],
            validation={name: dataclasses.replace(config, **changed) for name, config in self.validation.items()},
        )


def read_data(values: Any) -> DataRecipe:
    """Build the data of a run from its section.

    The section has the fields of a data config, of the class that `data_config_type` names, which hold for all sets;
    `train` and `validation` with fields of theirs alone; and where wanted:

    - `validation: null` for no validation, or a mapping from names to fields for several sets;
    - `mix`, a mapping from names to fields, for several sets to train on, each with its `weight`;
    - `mix_at_steps`, a mapping from steps to weights by name;
    - `prepare`, the fields of a `PrepareConfig`; the sets are then read from what it writes.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"data: fields of the data are needed, not {values!r}.")
    fields = dict(values)
    prepare = build(PrepareConfig | None, fields.pop("prepare", None), "data.prepare")
    if prepare is not None:
        fields = {"data_config_type": "grain_arrayrecord", **fields, **_prepared_fields(prepare)}
    train, validation, mix, mix_at_steps = (
        _mapping(fields.pop(name, {}), name) for name in ("train", "validation", "mix", "mix_at_steps")
    )
    if validation is None or (prepare is not None and not prepare.has_validation):
        validation_sets = {}
    elif validation and all(isinstance(value, Mapping) for value in validation.values()):
        validation_sets = {name: _mapping(value, f"validation.{name}") for name, value in validation.items()}
    else:
        validation_sets = {"validation": validation}
    mixed = {name: dict(_mapping(value, f"mix.{name}") or {}) for name, value in (mix or {}).items()}
    weights = {name: build(float, each.pop("weight", 1.0), f"data.mix.{name}.weight") for name, each in mixed.items()}
    return DataRecipe(
        train=[
            _read_set({**fields, **(train or {}), "name": name, **each}, f"data.mix.{name}", is_train=True)
            for name, each in mixed.items()
        ]
        or [_read_set({**fields, **(train or {})}, "data", is_train=True)],
        weights=list(weights.values()) or None,
        weights_at_steps={
            build(int, step, "data.mix_at_steps"): _read_weights(step, given, weights)
            for step, given in (mix_at_steps or {}).items()
        }
        or None,
        validation={
            name: _read_set({**fields, **(own or {})}, "data", is_train=False) for name, own in validation_sets.items()
        },
        prepare=prepare,
    )


def _prepared_fields(prepare: PrepareConfig) -> dict[str, Any]:
    output = prepare.output or Path(PREPARED_FOLDER)
    has_own_tokenizer = prepare.train_vocab_size is not None
    return {
        "data_path": str(output),
        "tokenize_data": False,
        "tokenizer_path": str(output / "tokenizer") if has_own_tokenizer else prepare.tokenizer_path,
    }


def _mapping(value: Any, name: str) -> Mapping[Any, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"data.{name}: fields are needed, not {value!r}.")
    return value


def _read_weights(step: Any, given: Any, weights: Mapping[str, float]) -> list[float]:
    where = f"data.mix_at_steps.{step}"
    read = build(dict[str, float], given, where)
    unknown = [name for name in read if name not in weights]
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: there is no such set in data.mix.{nearest(unknown[0], weights)}")
    return [read.get(name, 0.0) for name in weights]


def _read_set(fields: Mapping[str, Any], where: str, *, is_train: bool) -> DataConfig:
    config_class = _find_class(fields.get("data_config_type"))
    known = {field.name for field in dataclasses.fields(config_class)}
    defaults = {"shuffle_data": is_train, "drop_remainder": is_train, "split": "train" if is_train else "validation"}
    return build(config_class, {**{name: defaults[name] for name in defaults if name in known}, **fields}, where)


def _find_class(kind: Any) -> type[DataConfig]:
    if kind in KINDS:
        return KINDS[kind]
    if isinstance(kind, str) and "." in kind:
        try:
            found = resolve_import(kind)
        except ImportError as error:
            raise ConfigError(f"data.data_config_type: {error}") from error
        if isinstance(found, type) and issubclass(found, DataConfig):
            return found
    raise ConfigError(
        f"data.data_config_type: {kind!r} is none of {', '.join(KINDS)}, nor the dotted path of a DataConfig."
        f"{nearest(kind, KINDS)}"
    )
