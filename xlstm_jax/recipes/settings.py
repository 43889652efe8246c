"""All settings of a run with type, default, description and the packaged choices that set them."""

import ast
import collections.abc
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import yaml

from xlstm_jax.configs import ConfigError, nearest, to_plain
from xlstm_jax.recipes.compose import GROUPS_FOLDER, ROOT, choice_files
from xlstm_jax.recipes.run_config import RunConfig
from xlstm_jax.recipes.sections import Part, config_parts, flat_keys, suggest_key

RUN = "run"
"""The name for settings outside any group."""


class Setting(NamedTuple):
    """A setting that the command line or a recipe can override."""

    key: str
    """The dotted name, such as `scheduler.lr`."""
    config: str
    """The config class of the field, with the choice that it depends on."""
    type: str
    default: str
    description: str
    set_in: tuple[str, ...]
    """The packaged choices that set it, such as `experiment=demo`."""

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return self.description.partition(". ")[0].removesuffix(".") + "."


def list_settings() -> list[Setting]:
    """Return all settings, ordered by group."""
    return [setting for settings in settings_by_group().values() for setting in settings]


@functools.cache
def settings_by_group() -> Mapping[str, list[Setting]]:
    """Return all settings by group; settings outside any group come first, under `run`."""
    found: dict[str, list[Setting]] = {}
    run = Part(RUN, "", RunConfig, without=("model", "data", "optimizer", "trainer"))
    for part in (run, *config_parts()):
        found.setdefault(part.group, []).extend(_settings_of(part))
    return found


def find_settings(name: str) -> list[Setting]:
    """Return the settings of a group, or all settings that a key matches as a whole or as a prefix.

    Raises:
        ConfigError: There is no such group or key.
    """
    groups = settings_by_group()
    if name in groups:
        return list(groups[name])
    found = [setting for setting in list_settings() if _matches(name, setting.key)]
    if not found:
        raise ConfigError(f"{name}: there is no such setting or group.{suggest(name)}")
    return found


def suggest(name: str) -> str:
    """Return a question that suggests settings similar to a name; empty if there is none."""
    keys = dict.fromkeys(setting.key for setting in list_settings())
    return suggest_key(name) or nearest(name, [*keys, *settings_by_group()])


def _matches(name: str, key: str) -> bool:
    """Return whether a name is a key or a prefix of it; NAME in a key matches any name."""
    given, parts = name.split("."), key.split(".")
    return len(given) <= len(parts) and all(
        part in (word, "NAME") for word, part in zip(given, parts[: len(given)], strict=True)
    )


def _settings_of(part: Part) -> Iterator[Setting]:
    hints, descriptions = typing.get_type_hints(part.config_class), describe_fields(part.config_class)
    source = part.config_class.__name__ + (f" ({part.condition})" if part.condition else "")
    for field in dataclasses.fields(part.config_class):
        if field.name in part.without or not field.init:
            continue
        key, hint = f"{part.prefix}.{field.name}".lstrip("."), hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _settings_of(Part(part.group, key, hint, condition=part.condition))
            continue
        yield Setting(
            key, source, describe_type(hint), _default(field), descriptions.get(field.name, ""), _choices_that_set(key)
        )


@functools.cache
def describe_fields(config_class: type) -> Mapping[str, str]:
    """Return the docstrings of all fields of a config, including inherited ones, each joined to one line."""
    found: dict[str, str] = {}
    for owner in reversed(inspect.getmro(config_class)):
        if not dataclasses.is_dataclass(owner):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        body = typing.cast("ast.ClassDef", tree).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            match node, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def describe_type(annotation: Any) -> str:
    """Return a readable name of a type annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (types.NoneType, None):
        return "null"
    if origin in (Union, types.UnionType):
        return " | ".join(map(describe_type, arguments))
    if origin is Literal:
        return " | ".join("null" if each is None else str(each) for each in arguments)
    if origin in (list, collections.abc.Sequence):
        return f"list of {describe_type(arguments[0])}"
    if origin in (dict, collections.abc.Mapping):
        return f"map from {describe_type(arguments[0])} to {describe_type(arguments[1])}"
    if annotation is Path:
        return "path"
    return {Any: "any"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "required"
    plain = to_plain(value)
    return plain if isinstance(plain, str) and plain else json.dumps(plain)


@functools.cache
def _assignments() -> Mapping[str, tuple[str, ...]]:
    """Return the packaged choices by the keys they set."""
    found: dict[str, list[str]] = {}
    files = {ROOT: GROUPS_FOLDER / f"{ROOT}.yaml"} | {
        f"{group}={choice}": file for group, choices in choice_files().items() for choice, file in choices.items()
    }
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        is_global = "=" not in name or "# @package _global_" in text
        for key, _ in flat_keys(yaml.safe_load(text) or {}, "" if is_global else name.partition("=")[0]):
            found.setdefault(key, []).append("every run" if name == ROOT else name)
    return {key: tuple(names) for key, names in found.items()}


def _choices_that_set(key: str) -> tuple[str, ...]:
    group, _, field = key.partition(".")
    keys = [key, *(f"{group}.{split}.{field}" for split in ("train", "validation") if group == "data")]
    return tuple(dict.fromkeys(name for each in keys for name in _assignments().get(each, ())))
