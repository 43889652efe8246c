"""Checks of annotations by beartype, each of which is generated once.

Functions inside of functions are defined anew with every call, and each time their checks would be generated anew too.
That takes longer than all checks together.
"""

from collections.abc import Callable, Hashable
from typing import Any, get_args

from beartype import beartype

_checks: dict[Hashable, Callable] = {}


def checked(function: Callable) -> Callable:
    """Return a function that checks its arguments and result, or an equal one that was made before.

    Args:
        function: What jaxtyping makes of a signature: it has no closure, and its body does nothing with the arguments.
    """
    function.__annotations__ = {
        name: Any if is_static(hint) else hint for name, hint in function.__annotations__.items()
    }
    key = (
        function.__module__,
        function.__qualname__,
        function.__code__,
        len(function.__defaults__ or ()),
        tuple(function.__kwdefaults__ or ()),
        tuple(function.__annotations__.items()),
    )
    try:
        return _checks[key]
    except KeyError:
        return _checks.setdefault(key, beartype(function))
    except TypeError:  # an annotation that cannot be hashed
        return beartype(function)


def is_static(hint: Any) -> bool:
    """Check whether an annotation has a protocol for type checkers alone, which objects cannot be compared with."""
    is_protocol = getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False)
    return is_protocol or any(map(is_static, get_args(hint)))
