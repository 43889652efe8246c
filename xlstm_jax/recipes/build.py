"""The one way from plain values to configs: strict, and a mistake is a line that says where it is and what to do.

The dataclasses are the schema; cattrs walks through them. Nothing is guessed: a number in quotes is no number. On top
of that, a mapping may name a subclass of the config that is asked for by its dotted path, under `_target_`, as Hydra's
users know it; and a list of configs may be a mapping from names to configs, so that a single one can be changed or set
to `null` from the command line.
"""

import collections.abc
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from xlstm_jax.configs import ConfigError, nearest
from xlstm_jax.import_utils import resolve_import
from xlstm_jax.trainer.callbacks.callback import CallbackConfig
from xlstm_jax.trainer.logger.base_logger import LoggerToolsConfig

TARGET = "_target_"
"""The key under which a mapping names the class that it describes."""
NAMED_CLASSES: dict[type, str] = {
    CallbackConfig: "xlstm_jax.trainer.callbacks.ModelCheckpointConfig",
    LoggerToolsConfig: "xlstm_jax.trainer.logger.FileLoggerConfig",
}
"""Classes that make nothing themselves, so that a mapping has to name one that does; with an example of each."""


def build(annotation: Any, values: Any, where: str = "") -> Any:
    """Build a config from dictionaries, lists, numbers and strings.

    Args:
        annotation: The dataclass, or any other annotation that a field may have.
        values: The values.
        where: What the values are called in errors, such as `model`.

    Returns:
        The config.

    Raises:
        ConfigError: Something is unknown, missing, of the wrong type or refused by its config; a line for each mistake.
    """
    try:
        return converter().structure(values, annotation)
    except Exception as error:
        raise ConfigError("\n".join(dict.fromkeys(_describe(error, where)))) from error


@functools.cache
def converter() -> cattrs.Converter:
    """Return what turns values into configs. Users' types can be added to it with its own methods."""
    made = cattrs.Converter(forbid_extra_keys=True)
    made.register_structure_hook_func(_is_other_class, _read_instance)
    for kind, read in _PRIMITIVES.items():
        made.register_structure_hook(kind, read)
    made.register_structure_hook_func(_is_union, functools.partial(_read_union, made))
    made.register_structure_hook_func(_is_literal, _read_literal)
    made.register_structure_hook_func(_is_callable, _read_callable)
    made.register_structure_hook_factory(_is_config, functools.partial(_make_config_reader, made))
    made.register_structure_hook_func(_is_sequence, functools.partial(_read_sequence, made))
    return made


def _read_bool(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"true or false is needed, not {value!r}.")
    return value


def _read_int(value: Any, _: Any) -> int:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())  # 1e6 is a float in YAML
    if isinstance(value, bool) or not is_whole:
        raise ConfigError(f"a whole number is needed, not {value!r}.")
    return int(value)


def _read_float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"a number is needed, not {value!r}.")
    return float(value)


def _read_str(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"a text is needed, not {value!r}: put it in quotes if it is one.")
    return value


_PRIMITIVES: dict[Any, Callable[[Any, Any], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    Path: lambda value, _: Path(value if isinstance(value, Path) else _read_str(value, str)),
}


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Literal


def _is_callable(annotation: Any) -> bool:
    return annotation in (Callable, callable, type) or typing.get_origin(annotation) in (collections.abc.Callable, type)


def _is_other_class(annotation: Any) -> bool:
    """Tell classes that nobody else here knows, of which plain values cannot make an instance."""
    known = (str, bytes, int, float, bool, dict, list, tuple, set, frozenset, types.NoneType, enum.Enum, Path)
    if annotation is Any or not isinstance(annotation, type):  # Any is a class too.
        return False
    return not issubclass(annotation, known) and not _is_config(annotation)


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _is_sequence(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (list, collections.abc.Sequence)


def _read_union(made: cattrs.Converter, value: Any, annotation: Any) -> Any:
    """Take the member whose type the value has, else the first one that it can be turned into."""
    members = typing.get_args(annotation)
    if value is None and types.NoneType in members:
        return None
    if type(value) in members:
        return value
    candidates = [member for member in members if member is not types.NoneType]
    errors = []
    for member in candidates:
        try:
            return made.structure(value, member)
        except Exception as error:
            errors.append(error)
    if len(candidates) == 1:
        raise errors[0]
    raise ConfigError(" Or: ".join(line for error in errors for line in _describe(error, "")))


def _read_literal(value: Any, annotation: Any) -> Any:
    options = typing.get_args(annotation)
    if not any(type(value) is type(option) and value == option for option in options):
        raise ConfigError(f"{value!r} is none of {', '.join(map(repr, options))}.{nearest(value, options)}")
    return value


def _read_callable(value: Any, _: Any) -> Any:
    if callable(value):
        return value
    try:
        found = resolve_import(_read_str(value, str))
    except ImportError as error:
        raise ConfigError(str(error)) from error
    if not callable(found):
        raise ConfigError(f"{value!r} is no class or function.")
    return found


def _read_instance(value: Any, annotation: Any) -> Any:
    if not isinstance(value, annotation):
        raise ConfigError(f"a {annotation.__name__} is needed, which plain values cannot make; got {value!r}.")
    return value


def _make_config_reader(made: cattrs.Converter, config_class: Any) -> Callable[[Any, Any], Any]:
    read_fields = cattrs.gen.make_dict_structure_fn(config_class, made, _cattrs_forbid_extra_keys=True)

    def read(value: Any, _: Any) -> Any:
        if isinstance(value, config_class):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"fields of a {config_class.__name__} are needed, not {value!r}.")
        if TARGET not in value and config_class in NAMED_CLASSES:
            raise ConfigError(f"{TARGET} is not set: name the class, such as {NAMED_CLASSES[config_class]}.")
        if TARGET not in value:
            return read_fields(value, config_class)
        target = _read_callable(value[TARGET], type)
        if not (_is_config(target) and issubclass(target, config_class)):
            raise ConfigError(f"{TARGET} is {value[TARGET]!r}, which is no {config_class.__name__}.")
        fields = {name: each for name, each in value.items() if name != TARGET}
        return made.structure(fields, target)

    return read


def _read_sequence(made: cattrs.Converter, value: Any, annotation: Any) -> list[Any]:
    """Read a list; a text may stand for a list with it alone.

    A list of configs may be a mapping, of which the entries that are `null` are left out.
    """
    (member,) = typing.get_args(annotation)
    if isinstance(value, str) and member is str:
        return [value]
    if isinstance(value, Mapping) and _is_config(member):
        configs = made.structure(value, dict[str, member | None])
        return [config for config in configs.values() if config is not None]
    if not isinstance(value, list | tuple):
        needed = "a list of configs, or a mapping from names to configs," if _is_config(member) else "a list"
        raise ConfigError(f"{needed} is needed, not {value!r}.")
    return list(made.structure(value, tuple[member, ...]))


def _describe(error: BaseException, where: str) -> Iterator[str]:
    """Yield a line for each mistake in an error, with the path to it."""
    match error:
        case ClassValidationError() | IterableValidationError():
            with_notes, without = error.group_exceptions()
            for inner in without:
                yield from _describe(inner, where)
            for inner, note in with_notes:
                place = getattr(note, "name", getattr(note, "index", ""))
                if isinstance(inner, KeyError):
                    yield f"{_join(where, place)} is not set, but {_name_of(error)} needs it."
                else:
                    yield from _describe(inner, _join(where, place))
        case ForbiddenExtraKeysError():
            fields = [field.name for field in dataclasses.fields(error.cl) if field.init]
            for name in sorted(map(str, error.extra_fields)):
                known = nearest(name, fields) or f" It has: {', '.join(fields)}."
                yield f"{_join(where, name)}: {error.cl.__name__} has no such field.{known}"
        case _:
            message = str(error) or type(error).__name__
            yield f"{where}: {message}" if where else message


def _join(where: str, place: Any) -> str:
    return f"{where}.{place}" if where else str(place)


def _name_of(error: ClassValidationError | IterableValidationError) -> str:
    return getattr(getattr(error, "cl", None), "__name__", "the list")
