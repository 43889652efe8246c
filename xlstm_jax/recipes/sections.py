"""The config classes behind the settings of a run, and their keys in the settings."""

import dataclasses
import functools
import importlib
import pkgutil
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

import xlstm_jax.trainer.callbacks
import xlstm_jax.trainer.eval
import xlstm_jax.trainer.logger
from xlstm_jax.configs.reader import TARGET
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.import_utils import dotted_path, resolve_import
from xlstm_jax.models.llama import LlamaConfig
from xlstm_jax.models.xlstm import XLSTMConfig
from xlstm_jax.recipes.compose import choice_files
from xlstm_jax.recipes.data import KINDS, PrepareConfig
from xlstm_jax.trainer.callbacks.callback import CallbackConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig, LoggerToolsConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

PACKAGES = (xlstm_jax.trainer.callbacks, xlstm_jax.trainer.logger, xlstm_jax.trainer.eval)
"""The packages that hold configs of callbacks and of logger tools."""


class Part(NamedTuple):
    """A config class with its place in the settings."""

    group: str
    prefix: str
    """The key of the config in the settings, such as `data.prepare`."""
    config_class: Any
    without: tuple[str, ...] = ()
    """Fields that are set elsewhere."""
    condition: str = ""
    """The choice that the config depends on."""


@functools.cache
def config_parts() -> tuple[Part, ...]:
    """Return the configs of all groups."""
    return (
        Part("model", "model", XLSTMConfig, without=("parallel",), condition="xLSTM models"),
        Part("model", "model", LlamaConfig, without=("parallel",), condition="Llama models"),
        *(Part("data", "data", cls, condition=f"data_config_type: {kind}") for kind, cls in KINDS.items()),
        Part("data", "data.prepare", PrepareConfig),
        Part("optimizer", "optimizer", OptimizerConfig, without=("scheduler",)),
        Part("scheduler", "scheduler", SchedulerConfig),
        Part("trainer", "trainer", LLMTrainerConfig, without=("logger", "callbacks")),
        Part("parallel", "parallel", ParallelConfig),
        Part("logger", "logger", LoggerConfig, without=("log_tools",)),
        *_named_parts("logger", "logger.log_tools", LoggerToolsConfig),
        *_named_parts("callbacks", "callbacks", CallbackConfig),
    )


def suggest_key(name: str) -> str:
    """Return a question that suggests the settings whose last part is `name`; empty if there is none."""
    keys = dict.fromkeys(
        f"{part.prefix}.{field.name}"
        for part in config_parts()
        for field in dataclasses.fields(part.config_class)
        if field.name == name and name not in part.without
    )
    return f" Did you mean {' or '.join(map(repr, list(keys)[:3]))}?" if keys else ""


def flat_keys(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of all nested settings, at every depth."""
    for name, value in values.items():
        key = f"{prefix}.{name}".lstrip(".")
        yield key, value
        if isinstance(value, Mapping):
            yield from flat_keys(value, key)


def _named_parts(group: str, prefix: str, base: type) -> Iterator[Part]:
    """Yield the configs of a list whose entries are named: by the names in the packaged choices, else `NAME`."""
    names = {
        resolve_import(value): key.removesuffix(f".{TARGET}")
        for file in choice_files()[group].values()
        for key, value in flat_keys(yaml.safe_load(file.read_text(encoding="utf-8")) or {}, group)
        if key.endswith(f".{TARGET}")
    }
    for config_class in _heirs(base):
        place = names.get(config_class, f"{prefix}.NAME")
        yield Part(group, place, config_class, condition=f"{TARGET}: {dotted_path(config_class)}")


def _heirs(base: type) -> list[type]:
    """Return all packaged subclasses of a config, sorted by name."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    found, new = set(), {base}
    while new:
        new = {heir for each in new for heir in typing.cast("type", each).__subclasses__()} - found
        found |= new
    return sorted((each for each in found if each.__module__.startswith("xlstm_jax.")), key=lambda each: each.__name__)
