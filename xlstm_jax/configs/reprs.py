"""A parser for the repr of values that does not evaluate them."""

import ast
import dataclasses
import re
import warnings
from typing import Any

from xlstm_jax.configs.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Call:
    """The parsed repr of a dataclass."""

    name: str
    arguments: dict[str, Any]


_STRING_OR_ANGLE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?P<angle><(?:[^<>]|<[^<>]*>)*>)""")


def parse_repr(text: str) -> Any:
    """Parse the repr of a value without evaluating it; reprs such as `<class 'int'>` inside it stay strings."""
    quoted = _STRING_OR_ANGLE.sub(lambda match: repr(match[0]) if match["angle"] else match[0], text.strip())
    try:
        with warnings.catch_warnings(action="ignore"):  # Other strings may contain invalid escape sequences.
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
            # PosixPath('a'), dtype('int8') and FrozenDict({}) are read as their argument.
            return _from_node(only)
        case ast.Call(func=function, args=[], keywords=keywords):
            arguments = {str(keyword.arg): _from_node(keyword.value) for keyword in keywords}
            return Call(ast.unparse(function).rpartition(".")[2], arguments)
        case _:
            return ast.unparse(node)
