"""Build the configs of the training and validation sets from the section `data` of the settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from xlstm_jax.configs import ConfigDict, ConfigError, nearest, refuse_ignored
from xlstm_jax.configs.reader import build
from xlstm_jax.dataset.configs import DataConfig, FormalTaskDataConfig, SyntheticDataConfig, TextDataConfig
from xlstm_jax.dataset.shards.manifest import TOKENIZER_FOLDER
from xlstm_jax.dataset.sources import registry
from xlstm_jax.dataset.sources.vocabulary_lookup import given_tokenizer
from xlstm_jax.import_utils import resolve_import
from xlstm_jax.recipes.ignored_data import DataSet, Layer, check_layers, check_prepared

KINDS: dict[str, type[DataConfig]] = {
    "formal_task": FormalTaskDataConfig,
    "synthetic": SyntheticDataConfig,
    **{kind.name: kind.config_class for kind in registry.KINDS},
}
"""The config classes by the names that `data_config_type` accepts, besides the dotted path of a class."""

PREPARED_FOLDER = "data"
"""The folder of prepared shards within the folder of a run, by default."""


@dataclasses.dataclass(kw_only=True)
class PrepareConfig(ConfigDict):
    """Text that a run tokenises into shards before training; see `xlstm_jax.dataset.prepare`."""

    sources: list[str]
    """Files, folders and glob patterns of text, JSON lines or Parquet; `[stdlib]` for Python's standard library."""
    output: Path | None = None
    """The folder of the shards, which several runs can share; `None` for `data` in the folder of the run."""
    validation_share: float | None = None
    """The share of documents used for validation, if the sources have no splits."""
    tokenizer_path: str = "byte"
    """The tokenizer: a folder, a tokenizer.json or a name on the hub; `byte` for bytes."""
    train_vocab_size: int | None = None
    """The vocabulary size of a tokenizer to train, instead of `tokenizer_path`."""
    column: str = "text"
    """The column or JSON field that holds the text."""
    on_bad_data: Literal["error", "skip"] = "error"
    """Whether empty or damaged documents raise an error, or are skipped and counted."""
    max_document_bytes: int | None = 65536
    """Longer plain-text files are split at line ends into several documents."""
    num_workers: int | None = None
    """The number of worker processes that tokenise; `None` for one per CPU core, 0 for none."""

    def __post_init__(self):
        reasons = {}
        if self.train_vocab_size is not None:
            trained = f"beside train_vocab_size {self.train_vocab_size}, which trains one (null does not)"
            reasons["tokenizer_path"] = trained
        if self.is_standard_library:
            reasons["validation_share"] = "on stdlib, which has documents for validation"
            reasons["column"] = "on stdlib, which has no columns"
        refuse_ignored(self, reasons)

    @property
    def is_standard_library(self) -> bool:
        """Whether the source is Python's standard library."""
        return self.sources == ["stdlib"]

    @property
    def has_validation(self) -> bool:
        """Whether the run prepares documents for validation."""
        return self.validation_share is not None or self.is_standard_library


@dataclasses.dataclass(kw_only=True)
class DataRecipe(ConfigDict):
    """The data of a run."""

    train: list[DataConfig]
    """The training set, or several sets that are mixed."""
    weights: list[float] | None = None
    """The relative share of tokens of each set; the weights need not sum to 1."""
    weights_at_steps: dict[int, list[float]] | None = None
    """Changed weights, by the step from which they apply."""
    validation: dict[str, DataConfig] = dataclasses.field(default_factory=dict)
    """The validation sets, by name."""
    prepare: PrepareConfig | None = None
    """Texts to tokenise before training, if any."""

    def __post_init__(self):
        if len(self.train) == 1:
            refuse_ignored(self, dict.fromkeys(("weights", "weights_at_steps"), "on one set, only on several"))

    @property
    def first(self) -> DataConfig:
        """The first training set, which stands for all of them in shared fields."""
        return self.train[0]

    @property
    def tokenizer_path(self) -> str | None:
        """The tokenizer named in the settings; `None` if the data is not text or the manifest names the tokenizer."""
        return given_tokenizer(self.first) if isinstance(self.first, TextDataConfig) else None

    def named_sets(self) -> dict[str, DataConfig]:
        """Return all sets by their keys in the settings."""
        is_mix = len(self.train) > 1
        sets = {f"data.mix.{config.name}" if is_mix else "data": config for config in self.train}
        several = len(self.validation) > 1
        return sets | {f"data.validation.{n}" if several else "data.validation": c for n, c in self.validation.items()}

    def in_folder(self, folder: Path) -> "DataRecipe":
        """Return the recipe with its shards placed in the folder of a run, unless it sets another folder."""
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
    """Build the data recipe of a run from the section `data`.

    The section holds fields of the data config that `data_config_type` names, which apply to all sets, and these keys:

    - `train`: fields for training only;
    - `validation`: fields for validation only; `null` for no validation. Each nested mapping that is not a field itself
      defines a named validation set, and the other fields apply to all of these sets;
    - `mix`: a mapping from names to fields, for several training sets, each with its `weight`;
    - `mix_at_steps`: a mapping from steps to weights by name;
    - `prepare`: the fields of a `PrepareConfig`; the sets are then read from its shards.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"data: fields of the data are needed, not {values!r}.")
    fields = dict(values)
    prepare = build(PrepareConfig | None, fields.pop("prepare", None), "data.prepare")
    train, validation, mix, mix_at_steps = (
        _mapping(fields.pop(name, {}), name) for name in ("train", "validation", "mix", "mix_at_steps")
    )
    mixed = {name: dict(_mapping(value, f"mix.{name}") or {}) for name, value in (mix or {}).items()}
    weights = _read_weights(mixed)
    outer = [Layer("data", fields), Layer("data.train", train or {})]
    train_layers = [[*outer, Layer(f"data.mix.{name}", {"name": name, **own})] for name, own in mixed.items()] or [
        outer
    ]
    validation_layers = {
        name: [outer[0], *layers] for name, layers in _validation_sets(validation, prepare, fields).items()
    }
    if prepare is not None:
        if mixed:
            raise ConfigError("data.mix has no effect with data.prepare, which makes one set: mix with data=prepared.")
        check_prepared(layer for layers in [*train_layers, *validation_layers.values()] for layer in layers)
    prepared = {} if prepare is None else _prepared_fields(prepare)
    recipe = DataRecipe(
        train=[_read_set(layers, prepared, is_train=True) for layers in train_layers],
        weights=list(weights.values()) if len(weights) > 1 else None,
        weights_at_steps={
            build(int, step, "data.mix_at_steps"): _read_weights_at(step, given, weights)
            for step, given in (mix_at_steps or {}).items()
        }
        or None,
        validation={name: _read_set(layers, prepared, is_train=False) for name, layers in validation_layers.items()},
        prepare=prepare,
    )
    train_sets = [DataSet(config, layers) for config, layers in zip(recipe.train, train_layers, strict=True)]
    check_layers([*train_sets, *(DataSet(recipe.validation[name], own) for name, own in validation_layers.items())])
    return recipe


def _read_weights(mixed: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Pop the weight of each set from its fields and return the weights by name."""
    if len(mixed) == 1 and any("weight" in own for own in mixed.values()):
        raise ConfigError(
            f"data.mix.{next(iter(mixed))}.weight has no effect on one set, only on several: leave it out."
        )
    return {name: build(float, own.pop("weight", 1.0), f"data.mix.{name}.weight") for name, own in mixed.items()}


def _validation_sets(
    validation: Mapping[str, Any] | None, prepare: PrepareConfig | None, common: Mapping[str, Any]
) -> dict[str, list[Layer]]:
    """Return the layers of fields of each validation set, by name.

    Args:
        validation: The section `data.validation`.
        prepare: The preparation of shards, if any.
        common: The fields that apply to training as well.
    """
    if validation is None:
        return {}
    if prepare is not None and not prepare.has_validation:
        if any(value is not None for value in validation.values()):
            raise ConfigError(
                "data.validation has no effect, as data.prepare makes no documents for validation: set "
                "data.prepare.validation_share, or data.validation=null."
            )
        return {}
    fields = _field_names({**common, **validation})
    named = {name: own for name, own in validation.items() if isinstance(own, Mapping) and name not in fields}
    shared = Layer("data.validation", {name: value for name, value in validation.items() if name not in named})
    if not named:
        return {"validation": [shared]}
    return {name: [shared, Layer(f"data.validation.{name}", own)] for name, own in named.items()}


def _field_names(values: Mapping[str, Any]) -> set[str]:
    """Return the field names of the class that the settings select, or of all classes if they select none."""
    kind = values.get("data_config_type")
    classes = KINDS.values() if kind is None else [_find_class(kind)]
    return {field.name for config_class in classes for field in dataclasses.fields(config_class)}


def _prepared_fields(prepare: PrepareConfig) -> dict[str, Any]:
    output = prepare.output or Path(PREPARED_FOLDER)
    has_own_tokenizer = prepare.train_vocab_size is not None
    return {
        "data_path": str(output),
        "tokenize_data": False,
        "tokenizer_path": str(output / TOKENIZER_FOLDER) if has_own_tokenizer else prepare.tokenizer_path,
    }


def _mapping(value: Any, name: str) -> Mapping[Any, Any] | None:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"data.{name}: fields are needed, not {value!r}.")
    return value


def _read_weights_at(step: Any, given: Any, weights: Mapping[str, float]) -> list[float]:
    where = f"data.mix_at_steps.{step}"
    read = build(dict[str, float], given, where)
    unknown = [name for name in read if name not in weights]
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: there is no such set in data.mix.{nearest(unknown[0], weights)}")
    return [read.get(name, 0.0) for name in weights]


def _read_set(layers: Sequence[Layer], prepared: Mapping[str, Any], *, is_train: bool) -> DataConfig:
    given = {name: value for layer in layers for name, value in layer.fields.items()}
    kind = {"data_config_type": "grain_arrayrecord"} if prepared else {}
    fields = {**kind, **given, **prepared}
    config_class = _find_class(fields.get("data_config_type"))
    known = {field.name for field in dataclasses.fields(config_class)}
    defaults = {"shuffle_data": is_train, "drop_remainder": is_train, "split": "train" if is_train else "validation"}
    is_named = layers[-1].name.startswith(("data.mix.", "data.validation."))
    where = layers[-1].name if is_named else "data"
    return build(config_class, {name: defaults[name] for name in defaults if name in known} | fields, where)


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
        f"data.data_config_type: {kind!r} is none of {', '.join(sorted(KINDS))}, nor the dotted path of a DataConfig."
        f"{nearest(kind, KINDS)}"
    )
