"""Build configs from plain values.

The dataclasses are the schema, which cattrs traverses. Each mistake gives one line with its location and the expected
type. Settings are read strictly: a quoted number is not a number. The output of `to_dict`, also of older versions, is
read leniently: `relax` first converts each value to one that the strict reading accepts.

A mapping can name a subclass of the expected config by its dotted path under `_target_`, as in Hydra. A list of configs
can be given as a mapping from names to configs, so that a single entry can be overridden or set to `null` by name.
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
import numpy as np
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from xlstm_jax.configs.errors import ConfigError, nearest
from xlstm_jax.configs.relax import relax
from xlstm_jax.configs.reprs import Call
from xlstm_jax.import_utils import resolve_import

TARGET = "_target_"
"""The key under which a mapping names the class that it describes."""
EXAMPLE = "target_example"
"""The class attribute of an abstract config that holds the dotted path of a concrete subclass, for error messages."""

COLLECTIONS = (list, tuple, set, frozenset)
ABSTRACT = (collections.abc.Sequence, collections.abc.Iterable)
MAPPINGS = (dict, collections.abc.Mapping)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Options of reading. The defaults are those for settings."""

    is_lenient: bool = False
    """Whether values are relaxed first."""
    checks_names: bool = True
    """Whether the repr of a config has to name the expected class."""
    refuses_unknown: bool = True
    """Whether unknown keys are an error; otherwise they are skipped."""
    none_is_zero: bool = False
    """Whether `None` is read as 0 for integers."""


def build(annotation: Any, values: Any, where: str = "") -> Any:
    """Build a config from settings: dictionaries, lists, numbers and strings.

    Args:
        annotation: The dataclass, or any other annotation that a field may have.
        values: The values.
        where: The key of the values in error messages, such as `model`.

    Returns:
        The config.

    Raises:
        ConfigError: A value is unknown, missing, of the wrong type or rejected by its config; one line per mistake.
    """
    return read(annotation, values, where, Reading())


def read(annotation: Any, values: Any, where: str, reading: Reading) -> Any:
    """Read plain values as an annotated type; arguments and errors are those of `build`."""
    try:
        return converter(reading).structure(values, annotation)
    except Exception as error:
        raise ConfigError("\n".join(dict.fromkeys(_describe(error, where)))) from error


@functools.cache
def converter(reading: Reading) -> cattrs.Converter:
    """Return the cattrs converter for some reading options."""
    made = cattrs.Converter(forbid_extra_keys=reading.refuses_unknown)

    def add(applies: Callable[[Any], bool], hook: Callable[[Any, Any], Any]) -> None:
        made.register_structure_hook_func(applies, _relaxed(hook, reading) if reading.is_lenient else hook)

    add(_is_other_class, _read_instance)
    add(_is_any, lambda value, _: value)
    for kind, hook in _LEAVES.items():
        made.register_structure_hook(kind, _relaxed(hook, reading) if reading.is_lenient else hook)
    add(_is_union, functools.partial(_read_union, made, reading))
    add(_is_literal, _read_literal)
    add(_is_callable, _read_callable)
    add(_is_mapping, functools.partial(_read_mapping, made))
    add(_is_collection, functools.partial(_read_collection, made))
    make = functools.partial(_make_config_reader, made, reading)
    made.register_structure_hook_factory(_is_config, make)
    return made


def _relaxed(hook: Callable[[Any, Any], Any], reading: Reading) -> Callable[[Any, Any], Any]:
    return lambda value, annotation: hook(relax(value, annotation, none_is_zero=reading.none_is_zero), annotation)


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


def _read_dtype(value: Any, _: Any) -> str:
    import jax.numpy as jnp  # knows bfloat16; imported late to keep the command line fast

    try:
        return jnp.dtype(value).name
    except TypeError as error:
        raise ConfigError(f"{value!r} is not the name of a dtype.") from error


_LEAVES: dict[Any, Callable[[Any, Any], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    np.dtype: _read_dtype,
    Path: lambda value, _: Path(value if isinstance(value, Path) else _read_str(value, str)),
}


def _is_any(annotation: Any) -> bool:
    return annotation in (Any, object)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Literal


def _is_callable(annotation: Any) -> bool:
    callables = (Callable, callable, type)
    return annotation in callables or typing.get_origin(annotation) in (collections.abc.Callable, type)


def _is_other_class(annotation: Any) -> bool:
    """Return whether an annotation is a class that cannot be built from plain values."""
    known = (str, bytes, int, float, bool, dict, list, tuple, set, frozenset, types.NoneType, enum.Enum, Path)
    if _is_any(annotation) or not isinstance(annotation, type):  # Any is a class too.
        return False
    return not issubclass(annotation, known) and not _is_config(annotation)


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _is_collection(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in (*COLLECTIONS, *ABSTRACT)


def _is_mapping(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in MAPPINGS


def _read_union(made: cattrs.Converter, reading: Reading, value: Any, annotation: Any) -> Any:
    """Read a union as the config that has all given fields, the exact type of the value, or the first that fits."""
    members = typing.get_args(annotation)
    if value is None and types.NoneType in members:
        return None
    candidates = [member for member in members if member is not types.NoneType]
    if len(candidates) == 1:
        return made.structure(value, candidates[0])
    strict = converter(dataclasses.replace(reading, checks_names=True, refuses_unknown=True))
    errors = []
    for converts, member in (
        *((strict, member) for member in candidates if _is_config(member)),
        *((made, member) for member in candidates if type(value) is member),
        *((made, member) for member in candidates if type(value) is int and member is float),
        *((made, member) for member in candidates),
    ):
        try:
            return converts.structure(value, member)
        except Exception as error:
            errors.append(error)
    lines = dict.fromkeys(line for error in errors for line in _describe(error, ""))
    raise ConfigError(" Or: ".join(lines))


def _read_literal(value: Any, annotation: Any) -> Any:
    options = typing.get_args(annotation)
    if not any(type(value) is type(option) and value == option for option in options):
        raise ConfigError(f"{value!r} is none of {', '.join(map(repr, options))}.{nearest(value, options)}")
    return value


def _read_callable(value: Any, _: Any) -> Any:
    try:
        found = resolve_import(value)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    if not callable(found):
        raise ConfigError(f"{value!r} is no class or function.")
    return found


def _read_instance(value: Any, annotation: Any) -> Any:
    if not isinstance(value, annotation):
        raise ConfigError(f"a {annotation.__name__} is needed, which plain values cannot make; got {value!r}.")
    return value


def _make_config_reader(made: cattrs.Converter, reading: Reading, config_class: Any) -> Callable[[Any, Any], Any]:
    read_fields = cattrs.gen.make_dict_structure_fn(
        config_class, made, _cattrs_forbid_extra_keys=reading.refuses_unknown
    )

    def read_config(value: Any, _: Any) -> Any:
        if isinstance(value, config_class):
            return value
        if reading.is_lenient:
            value = relax(value, config_class, none_is_zero=reading.none_is_zero)
            if isinstance(value, Call) and reading.checks_names and value.name != config_class.__name__:
                raise ConfigError(f"a {config_class.__name__} is needed, not a {value.name}: {value.arguments}.")
            value = _settable(config_class, value.arguments if isinstance(value, Call) else value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"fields of a {config_class.__name__} are needed, not {value!r}.")
        example = vars(config_class).get(EXAMPLE)
        if TARGET not in value and example:
            raise ConfigError(f"{TARGET} is not set: name the class, such as {example}.")
        if TARGET not in value:
            return read_fields(value, config_class)
        target = _read_callable(value[TARGET], type)
        if not (_is_config(target) and issubclass(target, config_class)):
            raise ConfigError(f"{TARGET} is {value[TARGET]!r}, which is no {config_class.__name__}.")
        return made.structure({name: each for name, each in value.items() if name != TARGET}, target)

    return read_config


def _settable(config_class: Any, value: Any) -> Any:
    """Drop fields that a config computes itself, and `None` for fields with that default."""
    if not isinstance(value, Mapping):
        return value
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    return {
        name: each
        for name, each in value.items()
        if name not in fields or (fields[name].init and not (fields[name].default is None and each in (None, "None")))
    }


def _read_collection(made: cattrs.Converter, value: Any, annotation: Any) -> Any:
    """Read a list, a tuple or a set; a single string is read as a list of one string.

    A list of configs can be given as a mapping; its `null` entries are skipped.
    """
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    is_fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis
    member = arguments[0] if arguments else Any
    if isinstance(value, Mapping) and _is_config(member):
        configs = made.structure(value, dict[str, member | None])
        return [config for config in configs.values() if config is not None]
    if isinstance(value, str) and member is str and not is_fixed:
        value = [value]
    if not isinstance(value, COLLECTIONS):
        noun = "list" if origin in ABSTRACT else origin.__name__
        needed = f"a {noun} of configs, or a mapping from names to configs," if _is_config(member) else f"a {noun}"
        raise ConfigError(f"{needed} is needed, not {value!r}.")
    if is_fixed and len(arguments) != len(value):
        raise ConfigError(f"a tuple of {len(arguments)} values is needed, not {value!r}.")
    kind = origin if origin in COLLECTIONS else type(value)
    members = arguments if is_fixed else (member,) * len(value)
    return kind(_read_elements(made, dict(enumerate(zip(members, value, strict=True)))).values())


def _read_mapping(made: cattrs.Converter, value: Any, annotation: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"a dictionary is needed, not {value!r}.")
    key, member = typing.get_args(annotation) or (Any, Any)
    return _read_elements(made, {made.structure(name, key): (member, each) for name, each in value.items()})


def _read_elements(made: cattrs.Converter, elements: Mapping[Any, tuple[Any, Any]]) -> dict[Any, Any]:
    """Read all elements; raise all mistakes together, each with its key or index."""
    found, mistakes = {}, []
    for place, (member, value) in elements.items():
        try:
            found[place] = made.structure(value, member)
        except Exception as error:
            mistakes += _describe(error, str(place))
    if mistakes:
        raise _ElementsError(mistakes)
    return found


class _ElementsError(Exception):
    """The mistakes in a collection, one line each, with the key or index of the element."""

    def __init__(self, lines: list[str]):
        super().__init__(lines)
        self.lines = lines


def _describe(error: BaseException, where: str) -> Iterator[str]:
    """Yield one line per mistake in an error, with its dotted path."""
    match error:
        case _ElementsError():
            yield from (_join(where, line) for line in error.lines)
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
