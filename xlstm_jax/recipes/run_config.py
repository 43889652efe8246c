"""The config of a whole run, built from one tree of plain settings."""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from xlstm_jax.configs import ConfigDict, ConfigError, describe_ignored, nearest, refuse_ignored
from xlstm_jax.configs.reader import build
from xlstm_jax.dataset.sources.vocabulary_lookup import find_vocabulary, is_available_offline, is_local
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary, check_vocabularies
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.shared.feedforward import round_up
from xlstm_jax.planning.setup import Setup
from xlstm_jax.recipes.data import DataRecipe, PrepareConfig, read_data
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig

VOCABULARY_MULTIPLE = 64
"""The multiple to which a vocabulary size derived from the tokenizer is rounded up, for fast matmuls."""

SECTIONS = {
    "parallel": ("model", "parallel"),
    "scheduler": ("optimizer", "scheduler"),
    "logger": ("trainer", "logger"),
    "callbacks": ("trainer", "callbacks"),
}
"""Groups of settings that are nested in another group's config: (group, field)."""


@dataclasses.dataclass(kw_only=True)
class RunConfig(ConfigDict):
    """A training run."""

    name: str
    """The name of the run; its folder is `outputs/<name>/<time>` unless `hydra.run.dir` is set."""
    batch_size: int
    """Rows per batch, over all devices."""
    context_length: int
    """Tokens per row."""
    num_train_steps: int | None = None
    """The length of training in optimizer steps; set this or `num_epochs`."""
    num_epochs: int | None = None
    """The length of training in epochs; set this or `num_train_steps`."""
    init_from: Path | None = None
    """The folder of a run from whose parameters this run starts."""
    init_optimizer: bool = False
    """Whether to also load the optimizer state and the step of the run in `init_from`."""
    performance: Literal["auto", "manual"] = "auto"
    """`auto` chooses remat, kept logits, loss chunks, scanned or unrolled blocks and gradient accumulation for the
    memory of the devices, unless they are set; `manual` uses all settings unchanged."""
    model: ModelConfig
    """The model."""
    data: DataRecipe
    """The training and validation data."""
    optimizer: OptimizerConfig
    """The optimizer and its learning rate schedule."""
    trainer: LLMTrainerConfig
    """Training, validation, logging and callbacks."""

    def setup(self, num_devices: int) -> Setup:
        """Return the planning setup of this run on `num_devices` devices."""
        return Setup(
            trainer=self.trainer,
            model=self.model,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            context_length=self.context_length,
            num_devices=num_devices,
        )

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the configs that report fields without effect, with their keys in the settings."""
        yield "parallel", self.model.parallel
        yield "optimizer", self.optimizer
        yield "scheduler", self.optimizer.scheduler
        yield "trainer", self.trainer
        for index, callback in enumerate(self.trainer.callbacks):
            yield f"callbacks.{index}, {type(callback).__name__}", callback

    def __post_init__(self):
        check_lengths(vars(self))
        if not self.name or ".." in Path(self.name).parts or Path(self.name).is_absolute():
            raise ConfigError(f"name is {self.name!r}, but must be the name of a folder in outputs.")
        if self.init_from is None:
            refuse_ignored(self, {"init_optimizer": "without init_from"})
        for where, config in self._parts():
            for sentence in describe_ignored(config, config.ignored_fields()).values():
                raise ConfigError(f"{where}: {sentence}")
        first = self.data.first
        for name, field in (("batch_size", "global_batch_size"), ("context_length", "max_target_length")):
            if getattr(first, field) not in (None, getattr(self, name)):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, but data.{field} is {getattr(first, field)}: set {name} alone."
                )
        num_tokens, limit = (getattr(each, "vocab_size", None) for each in (first, self.model.model_config))
        if num_tokens is not None and limit is not None and num_tokens > limit:
            raise ConfigError(
                f"data.vocab_size is {num_tokens}, but model.vocab_size is {limit}: set model.vocab_size alone."
            )


def check_lengths(settings: Mapping[str, Any]) -> None:
    """Reject invalid lengths of the run, batches or rows.

    Other settings refer to these: without this check, errors would name the referring settings instead.

    Args:
        settings: The fields of a `RunConfig`.
    """
    for name in ("batch_size", "context_length", "num_train_steps", "num_epochs"):
        value = build(int | None, settings.get(name), name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1.")
    num_train_steps, num_epochs = settings.get("num_train_steps"), settings.get("num_epochs")
    if (num_train_steps is None) == (num_epochs is None):
        raise ConfigError(
            f"num_train_steps is {num_train_steps} and num_epochs is {num_epochs}: set exactly one of them, and the "
            "other to null."
        )


def build_run(values: Mapping[str, Any]) -> RunConfig:
    """Build a run from plain settings.

    Args:
        values: The fields of `RunConfig` and, at the same level, the groups of `SECTIONS`. `model` has a `model_class`
            and the fields of its config; without a `vocab_size`, the size is derived from the tokenizer. For `data`,
            see `read_data`.

    Returns:
        The config.

    Raises:
        ConfigError: A setting is invalid; the message has a line for each mistake.
    """
    known = [*(field.name for field in dataclasses.fields(RunConfig)), *SECTIONS]
    for name in values:
        if name not in known:
            raise ConfigError(f"{name}: there is no such setting or group.{_suggest(name, known)}")
    check_lengths(values)
    merged: dict[str, Any] = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()
    }
    for section, (owner, field) in SECTIONS.items():
        if section in merged:
            _move_into(merged, section, owner, field)
    try:
        data = read_data(merged.get("data"))
        merged["data"] = data
        if isinstance(model := merged.get("model"), dict):
            if model.get("vocab_size") is None:
                model["vocab_size"] = _find_vocab_size(data)
            merged["model"] = _read_model(model)
        run = build(RunConfig, merged)
        _check_vocabularies(run.data, run.model.num_token_ids)
        return run
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(_as_written(line) for line in lines)) from error


def _suggest(name: str, known: Sequence[str]) -> str:
    """Return a suggestion for an unknown top-level name, or a list of all known names."""
    from xlstm_jax.recipes.sections import suggest_key  # which imports every callback and logger

    return suggest_key(name) or nearest(name, [*known, "experiment", "launcher"]) or f" There are: {', '.join(known)}."


def _move_into(merged: dict[str, Any], section: str, owner: str, field: str) -> None:
    target = merged.setdefault(owner, {})
    if not isinstance(target, dict):
        raise ConfigError(f"{owner}: fields are needed, not {target!r}.")
    if field in target:
        raise ConfigError(f"{owner}.{field}: this has a group of its own. Set it under {section!r} instead.")
    target[field] = merged.pop(section)


def _as_written(line: str) -> str:
    """Replace the config path of a group at the start of an error line with its key in the settings."""
    for section, path in SECTIONS.items():
        prefix = ".".join(path)
        if line.startswith((f"{prefix}.", f"{prefix}:", f"{prefix} ")):
            return section + line.removeprefix(prefix)
    return line


def _read_model(values: Mapping[str, Any]) -> ModelConfig:
    """Build the config of the class that `model_class` is annotated to take."""
    fields = dict(values)
    if "model_class" not in fields:
        raise ConfigError("model.model_class is not set: name a model, such as xlstm_jax.models.xlstm.XLSTM.")
    model_class = build(Callable, fields.pop("model_class"), "model.model_class")
    config_class = typing.get_type_hints(model_class).get("config")
    if config_class is None:
        name = values["model_class"]
        raise ConfigError(f"model.model_class: {name!r} has no annotated field `config` that names its config.")
    model_config = build(config_class, fields, "model")
    return ModelConfig(model_class=model_class, parallel=model_config.parallel, model_config=model_config)


def _find_vocab_size(data: DataRecipe) -> int:
    """Return the vocabulary size of the data, rounded up."""
    if data.prepare is not None:
        vocabulary = _vocabulary_to_prepare(data.prepare)
    else:
        with _named("data"):
            vocabulary = next(filter(None, map(find_vocabulary, data.train)), None)
    if vocabulary is None:
        raise ConfigError(
            "model.vocab_size is not set, and the data has neither a manifest nor a tokenizer that tells it: set it."
        )
    return round_up(vocabulary.size, VOCABULARY_MULTIPLE)


def _check_vocabularies(data: DataRecipe, num_ids: int | None) -> None:
    """Raise if the vocabulary of the data does not fit the model, as far as this is known offline.

    Tokenizers on the hub and shards that are not prepared yet are checked when the run is opened.
    """
    prepare, vocabularies = data.prepare, {}
    if prepare is None:
        for name, config in data.named_sets().items():
            if is_available_offline(config):
                with _named(name):
                    vocabularies[name] = find_vocabulary(config)
    elif prepare.train_vocab_size is not None or is_local(prepare.tokenizer_path):
        vocabularies["data.prepare"] = _vocabulary_to_prepare(prepare)
    check_vocabularies(num_ids, vocabularies)


def _vocabulary_to_prepare(prepare: PrepareConfig) -> Vocabulary:
    """Return the vocabulary with which text will be prepared."""
    if prepare.train_vocab_size is not None:
        return Vocabulary(prepare.train_vocab_size, "data.prepare.train_vocab_size")
    with _named("data.prepare"):
        return Vocabulary.of_tokenizer(TextEncoder(prepare.tokenizer_path))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the name of a data set."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error
    except ValueError as error:  # a manifest that cannot be read
        raise ConfigError(f"{name}: {error}") from error
