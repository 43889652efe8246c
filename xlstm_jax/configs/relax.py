"""The lenient pre-pass of reading: convert values written by `to_dict`, `repr` and older versions to plain ones."""

import collections.abc
import dataclasses
import re
import types
import typing
from pathlib import Path, PurePath
from typing import Any, Literal, Union

import numpy as np

from xlstm_jax.configs.errors import ConfigError
from xlstm_jax.configs.reprs import Call, parse_repr
from xlstm_jax.import_utils import resolve_import

DTYPE_PATH = re.compile(r"(?:jax\.numpy|numpy|jnp|np|ml_dtypes)\.(bfloat16|float16|float32)")
CLASS_REPR = re.compile(r"<class '([\w.]+)'>")
WORDS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
CONTAINERS = (list, tuple, set, frozenset, dict, collections.abc.Sequence, collections.abc.Iterable)
CONTAINERS += (collections.abc.Mapping,)


def relax(value: Any, annotation: Any, *, none_is_zero: bool) -> Any:
    """Convert a value to one that the strict reading of an annotation accepts, if possible.

    Args:
        value: The value.
        annotation: The expected type. Elements of the value are relaxed when they are read themselves.
        none_is_zero: Whether `None` is read as 0 for integers.

    Returns:
        The value for the strict reading, which rejects values that could not be converted.

    Raises:
        ConfigError: A string is not the repr of the expected config or collection.
    """
    if isinstance(value, str):
        value = _relax_path(value)
    origin = typing.get_origin(annotation) or annotation
    is_none = value is None or (isinstance(value, str) and value == "None")
    if origin in (Union, types.UnionType, Literal):
        members = typing.get_args(annotation)
        return None if is_none and (types.NoneType in members or None in members) else value
    if dataclasses.is_dataclass(origin):
        return parse_repr(value) if isinstance(value, str) and not is_none else value
    if origin in CONTAINERS:
        return _relax_container(value)
    if origin in (Any, object):
        return None if is_none else value.arguments if isinstance(value, Call) else value
    if origin is int and none_is_zero and is_none:
        return 0
    return _RELAXED_LEAVES[origin](value) if origin in _RELAXED_LEAVES else value


def _relax_path(value: str) -> Any:
    """Resolve the repr of a class, and convert the dotted path of a dtype to its name."""
    if (match := CLASS_REPR.fullmatch(value)) is None:
        dtype = DTYPE_PATH.fullmatch(value)
        return dtype.group(1) if dtype else value
    module, _, name = match.group(1).rpartition(".")
    if name.endswith(("bfloat16", "float32", "float16")):
        return name
    path = match.group(1) if module else f"builtins.{name}"
    try:
        return resolve_import(path)
    except ImportError as error:
        raise ConfigError(f"Cannot find the class or function {path!r}: {error}") from error


def _relax_container(value: Any) -> Any:
    parsed = parse_repr(value) if isinstance(value, str) else value
    return value if isinstance(parsed, str | int | float) else parsed


def _relax_bool(value: Any) -> Any:
    return WORDS.get(str(value), value)


def _relax_int(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip("+-").isdecimal():
        return int(value)
    return int(value) if isinstance(value, bool) else _relax_float(value) if isinstance(value, str) else value


def _relax_float(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, bool | int | str) else value
    except (ValueError, OverflowError):
        return value


def _relax_str(value: Any) -> Any:
    if isinstance(value, PurePath):
        return value.as_posix()
    return str(value) if isinstance(value, bool | int | float) else value


_RELAXED_LEAVES = {
    bool: _relax_bool,
    int: _relax_int,
    float: _relax_float,
    str: _relax_str,
    Path: _relax_str,
    np.dtype: lambda value: value.rpartition(".")[2] if isinstance(value, str) else value,
}
