"""Configs: dataclasses that turn into plain dictionaries for logs and checkpoints, and back."""

import ast
import collections.abc
import dataclasses
import difflib
import math
import numbers
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, Union

import numpy as np

from xlstm_jax.import_utils import class_to_name, dotted_path, resolve_import


class ConfigError(ValueError, AssertionError):
    """A setting that cannot be used; code that catches `ValueError` or `AssertionError` catches it."""


MAY_CHANGE = types.MappingProxyType({"may_change_on_resume": True})
"""Metadata of a field that a resumed run may change: its checkpoints mean the same under another value."""
FIXED = types.MappingProxyType({"may_change_on_resume": False})
"""Metadata of a field that a resumed run may not change."""


def fixed_settings(config: Any, name: str, *, may_change: bool) -> Iterator[str]:
    """Yield the settings that a resumed run may not change, by their dotted names.

    Args:
        config: A dataclass.
        name: The name of the config among the settings.
        may_change: Whether fields without a declaration (`MAY_CHANGE` or `FIXED`) may change. A declaration also holds
            for all fields of a nested config.
    """
    for field in dataclasses.fields(config):
        allowed = field.metadata.get("may_change_on_resume", may_change)
        value, place = getattr(config, field.name), f"{name}.{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from fixed_settings(value, place, may_change=allowed)
        elif not allowed:
            yield place


def nearest(name: Any, options: collections.abc.Iterable[Any]) -> str:
    """Return a question that suggests the option nearest to a name; empty if none is near."""
    matches = difflib.get_close_matches(str(name), map(str, options), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_seed(name: str, seed: int) -> None:
    """Raise unless a seed is one of those that JAX tells from all others: of larger ones it takes the lower half."""
    if not -(2**31) <= seed < 2**32:
        raise ConfigError(f"{name} is {seed}, but must be from -2147483648 to 4294967295.")


def describe_ignored(config: Any, reasons: collections.abc.Mapping[str, str]) -> dict[str, str]:
    """Describe the fields that are changed from their defaults although they have no effect.

    Args:
        config: A dataclass.
        reasons: Why fields have no effect, by name: what follows "has no effect" in a sentence.

    Returns:
        A sentence for each such field, by its name.
    """
    defaults = {field.name: _default_of(field) for field in dataclasses.fields(config)}
    changed = {name: getattr(config, name) for name in reasons if getattr(config, name) != defaults[name]}
    return {
        name: f"{name} is {value!r}, but has no effect {reasons[name]}: leave it out, or at {defaults[name]!r}."
        for name, value in changed.items()
    }


def refuse_ignored(config: Any, reasons: collections.abc.Mapping[str, str]) -> None:
    """Raise a `ConfigError` for the first field that `describe_ignored` describes."""
    for sentence in describe_ignored(config, reasons).values():
        raise ConfigError(sentence)


def _default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_numbers(config: Any, config_class: type | None = None) -> None:
    """Raise a `ConfigError` unless every field that is annotated as a number holds a finite one.

    Args:
        config: The config, a dataclass.
        config_class: The class whose fields are checked; those of users' subclasses may be as they like. By default,
            all fields are checked.
    """
    for field in dataclasses.fields(config_class or config):
        kinds = set(typing.get_args(field.type) or (field.type,))
        value = getattr(config, field.name)
        if not kinds & {int, float} or not kinds <= {int, float, types.NoneType}:
            continue
        if value is None and types.NoneType in kinds:
            continue
        wanted, noun = (numbers.Real, "number") if float in kinds else (numbers.Integral, "whole number")
        if not isinstance(value, wanted) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{field.name} is {value!r}, but must be a {'finite ' * (float in kinds)}{noun}.")


@dataclasses.dataclass(kw_only=True, frozen=False)
class ConfigDict:
    """Base of all configs: a dataclass with keyword arguments that can be written as a plain dictionary."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the attribute `key`, or `default` if there is none."""
        return getattr(self, key, default)

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect beside the others, by name, for `describe_ignored`.

        The settings of a run may change none of them. Configs that are made in Python may, unless they refuse it.
        """
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Write the config with nothing but dictionaries, tuples, numbers, strings and `None`.

        Nested configs and dataclasses become dictionaries, lists become tuples, paths become posix strings, classes and
        functions become dotted paths. What is none of these becomes its `str`.

        Returns:
            A dictionary that JSON can hold and that `from_dict` reads back.
        """
        return {key: to_plain(value) for key, value in vars(self).items()}

    @staticmethod
    def from_dict(
        config_class: Any,
        data: Any,
        strict_classname_parsing: bool = False,
        ignore_extensive_attributes: bool = True,
        none_to_zero_for_ints: bool = False,
    ) -> Any:
        """Build a config from what `to_dict` wrote, also after a way through JSON.

        `None` and the string "None" are `None` wherever the annotation or the default of a field allows it. A union
        takes the member that the value already fits, else the first one that it can be turned into. A dtype comes back
        as its name, `"jax.numpy.bfloat16"` as `"bfloat16"`.

        Args:
            config_class: A dataclass, or any annotation that a field may have.
            data: The value: a dictionary for a dataclass, or its repr such as `"SomeConfig(a=1, b=None)"`.
            strict_classname_parsing: Refuse a repr that names another class than the annotation.
            ignore_extensive_attributes: Skip keys that the dataclass does not have, instead of refusing them.
            none_to_zero_for_ints: Read `None` as 0 where an `int` is needed.

        Returns:
            The value, of the type that the annotation asks for.

        Raises:
            ConfigError: If the value does not fit.
        """
        reader = _Reader(strict_classname_parsing, ignore_extensive_attributes, none_to_zero_for_ints)
        return reader.read(config_class, data)


def to_plain(value: Any) -> Any:
    """Write a value as `ConfigDict.to_dict` does."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type):
        return class_to_name(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return tuple(to_plain(element) for element in value)
    if isinstance(value, collections.abc.Mapping):
        return {key: to_plain(element) for key, element in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, PurePath):
        return value.as_posix()
    return dotted_path(value) if _has_path(value) else str(value)


def _has_path(value: Any) -> bool:
    try:
        return callable(value) and resolve_import(dotted_path(value)) is value
    except (AttributeError, ImportError):
        return False


_SEQUENCES = (list, tuple, set, frozenset)
_DTYPE_PATH = re.compile(r"(?:jax\.numpy|numpy|jnp|np|ml_dtypes)\.(bfloat16|float16|float32)")
_CLASS_REPR = re.compile(r"<class '([\w.]+)'>")


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Turns plain values into what an annotation asks for, under the options of `ConfigDict.from_dict`."""

    strict_classname_parsing: bool
    ignore_extensive_attributes: bool
    none_to_zero_for_ints: bool

    def read(self, annotation: Any, data: Any) -> Any:
        if isinstance(data, str) and (class_repr := _CLASS_REPR.fullmatch(data)):
            return _read_class_repr(class_repr.group(1))
        if isinstance(data, str) and (dtype := _DTYPE_PATH.fullmatch(data)):
            data = dtype.group(1)
        origin = typing.get_origin(annotation) or annotation
        if origin in (Union, types.UnionType):
            return self._read_union(typing.get_args(annotation), data)
        if origin is Literal:
            return _read_literal(typing.get_args(annotation), data)
        if dataclasses.is_dataclass(origin):
            return self._read_dataclass(origin, data)
        if origin in _SEQUENCES or origin in (collections.abc.Sequence, collections.abc.Iterable):
            return self._read_sequence(origin, typing.get_args(annotation), data)
        if origin in (dict, collections.abc.Mapping):
            return self._read_mapping(typing.get_args(annotation) or (Any, Any), data)
        if origin is int and self.none_to_zero_for_ints and _is_none(data):
            return 0
        return _read_leaf(origin, data.arguments if isinstance(data, _Call) else data)

    def _read_union(self, members: tuple[Any, ...], data: Any) -> Any:
        if types.NoneType in members and _is_none(data):
            return None
        candidates = [member for member in members if member is not types.NoneType]
        if len(candidates) == 1:
            return self.read(candidates[0], data)
        strict = dataclasses.replace(self, strict_classname_parsing=True, ignore_extensive_attributes=False)
        errors = []
        for reader, member in [
            *((strict, member) for member in candidates if dataclasses.is_dataclass(member)),
            *((self, member) for member in candidates if type(data) is member),
            *((self, member) for member in candidates if type(data) is int and member is float),
            *((self, member) for member in candidates),
        ]:
            try:
                return reader.read(member, data)
            except (ValueError, TypeError) as error:
                errors.append(str(error))
        raise ConfigError(f"{data!r} fits no member of the union. " + " ".join(dict.fromkeys(errors)))

    def _read_dataclass(self, cls: Any, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        call = _parse_repr(data) if isinstance(data, str) and not _is_none(data) else data
        if isinstance(call, _Call) and self.strict_classname_parsing and call.name != cls.__name__:
            raise ConfigError(f"A {cls.__name__} is needed, but {data!r} is a {call.name}.")
        arguments = call.arguments if isinstance(call, _Call) else call
        if not isinstance(arguments, collections.abc.Mapping):
            raise ConfigError(f"A {cls.__name__} is needed, as a dictionary or as its repr; got {data!r}.")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        self._check_keys(cls, fields, arguments)
        hints = typing.get_type_hints(cls)
        settable = {name: hints[name] for name in arguments if name in fields and fields[name].init}
        return cls(
            **{name: self._read_field(cls, fields[name], hint, arguments[name]) for name, hint in settable.items()}
        )

    def _check_keys(self, cls: type, fields: dict[str, dataclasses.Field], arguments: collections.abc.Mapping) -> None:
        unknown = [key for key in arguments if key not in fields]
        if unknown and not self.ignore_extensive_attributes:
            hint = nearest(unknown[0], fields)
            raise ConfigError(f"{cls.__name__} has no field {unknown[0]!r}, only {', '.join(fields)}.{hint}")
        nothing = dataclasses.MISSING
        needed = [f.name for f in fields.values() if f.init and f.default is nothing and f.default_factory is nothing]
        missing = [name for name in needed if name not in arguments]
        if missing:
            raise ConfigError(f"{cls.__name__} needs a value for {', '.join(missing)}; got only {list(arguments)}.")

    def _read_field(self, cls: type, field: dataclasses.Field, hint: Any, data: Any) -> Any:
        try:
            return self.read(Union[hint, None] if field.default is None else hint, data)  # noqa: UP007
        except ConfigError as error:
            raise ConfigError(f"{cls.__name__}.{field.name}: {error}") from error

    def _read_sequence(self, origin: Any, arguments: tuple[Any, ...], data: Any) -> Any:
        elements = _parse_repr(data) if isinstance(data, str) else data
        if not isinstance(elements, _SEQUENCES):
            raise ConfigError(f"A {origin.__name__} is needed, got {data!r}.")
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(arguments) != len(elements):
                raise ConfigError(f"A tuple of {len(arguments)} values is needed, got {data!r}.")
            hints = arguments
        else:
            hints = (arguments[0] if arguments else Any,) * len(elements)
        kind = origin if origin in _SEQUENCES else type(elements)
        return kind(self.read(hint, element) for hint, element in zip(hints, elements, strict=True))

    def _read_mapping(self, arguments: tuple[Any, ...], data: Any) -> dict:
        items = _parse_repr(data) if isinstance(data, str) else data
        if not isinstance(items, collections.abc.Mapping):
            raise ConfigError(f"A dictionary is needed, got {data!r}.")
        key_hint, value_hint = arguments
        return {self.read(key_hint, key): self.read(value_hint, value) for key, value in items.items()}


def _read_class_repr(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if name.endswith(("bfloat16", "float32", "float16")):
        return name
    return _import(path if module else f"builtins.{name}")


def _read_literal(options: tuple[Any, ...], data: Any) -> Any:
    if None in options and _is_none(data):
        return None
    if not any(type(data) is type(option) and data == option for option in options):
        raise ConfigError(f"{data!r} is none of {', '.join(map(repr, options))}.{nearest(data, options)}")
    return data


def _read_leaf(kind: Any, data: Any) -> Any:
    if kind in (Any, object):
        return None if _is_none(data) else data
    if kind in _LEAF_READERS:
        return _LEAF_READERS[kind](data)
    if not isinstance(kind, type) or isinstance(data, kind):
        return data
    raise ConfigError(f"{data!r} cannot be turned into a {kind.__name__}.")


def _read_bool(data: Any) -> bool:
    known = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
    if str(data) not in known:
        raise ConfigError(f"True or False is needed, got {data!r}.")
    return known[str(data)]


def _read_int(data: Any) -> int:
    if isinstance(data, int) or (isinstance(data, str) and data.lstrip("+-").isdecimal()):
        return int(data)
    number = _read_float(data)
    if not number.is_integer():
        raise ConfigError(f"A whole number is needed, got {data!r}.")
    return int(number)


def _read_float(data: Any) -> float:
    if isinstance(data, bool | int | float | str):
        try:
            return float(data)
        except (ValueError, OverflowError):
            pass
    raise ConfigError(f"A number is needed, got {data!r}.")


def _read_str(data: Any) -> str:
    if isinstance(data, PurePath):
        return data.as_posix()
    if not isinstance(data, bool | int | float | str):
        raise ConfigError(f"A string is needed, got {data!r}.")
    return data if isinstance(data, str) else str(data)


def _read_dtype(data: Any) -> str:
    import jax.numpy as jnp  # which knows bfloat16, and which the command line does not wait for

    name = data.rpartition(".")[2] if isinstance(data, str) else data
    try:
        return jnp.dtype(name).name
    except TypeError as error:
        raise ConfigError(f"{data!r} is not the name of a dtype.") from error


def _read_callable(data: Any) -> Any:
    found = _import(data) if isinstance(data, str) else data
    if not callable(found):
        raise ConfigError(f"A class or function, or its dotted path, is needed; got {data!r}.")
    return found


_LEAF_READERS = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
    Path: lambda data: Path(_read_str(data)),
    np.dtype: _read_dtype,
    type: _read_callable,
    callable: _read_callable,
    collections.abc.Callable: _read_callable,
}


def _import(path: str) -> Any:
    try:
        return resolve_import(path)
    except ImportError as error:
        raise ConfigError(f"Cannot find the class or function {path!r}: {error}") from error


def _is_none(data: Any) -> bool:
    return data is None or (isinstance(data, str) and data == "None")


@dataclasses.dataclass(frozen=True)
class _Call:
    """The repr of a dataclass, taken apart."""

    name: str
    arguments: dict[str, Any]


_STRING_OR_ANGLE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?P<angle><(?:[^<>]|<[^<>]*>)*>)""")


def _parse_repr(text: str) -> Any:
    """Read the repr of a value without running it; reprs such as `<class 'int'>` inside it stay strings."""
    quoted = _STRING_OR_ANGLE.sub(lambda match: repr(match[0]) if match["angle"] else match[0], text.strip())
    try:
        with warnings.catch_warnings(action="ignore"):  # Text that is no repr may hold backslashes.
            return _from_node(ast.parse(quoted, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{text!r} is not the repr of a dataclass, a list, a tuple or a dictionary.") from error


def _from_node(node: Any) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=elements) | ast.Set(elts=elements):
            return [_from_node(element) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(_from_node(element) for element in elements)
        case ast.Dict(keys=keys, values=values):
            return {_from_node(key): _from_node(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_from_node(operand)
        case ast.Name(id="inf" | "nan" as name):
            return float(name)
        case ast.Call(args=[only], keywords=[]):
            # PosixPath('a'), dtype('int8') and FrozenDict({}) stand for their argument.
            return _from_node(only)
        case ast.Call(func=function, args=[], keywords=keywords):
            arguments = {str(keyword.arg): _from_node(keyword.value) for keyword in keywords}
            return _Call(ast.unparse(function).rpartition(".")[2], arguments)
        case _:
            return ast.unparse(node)


def flat_config(plain: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten nested settings to one level of dotted names.

    Args:
        plain: Nested settings, as `ConfigDict.to_dict` returns them.

    Returns:
        The values under dotted names, such as `trainer.callbacks.0.every_n_steps`. Sequences of values and `None`
        become text.
    """
    flat = {}
    for name, value in plain.items():
        if isinstance(value, list | tuple) and any(isinstance(element, Mapping) for element in value):
            value = {str(index): element for index, element in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": leaf for inner, leaf in flat_config(value).items()}
        else:
            flat[str(name)] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
