"""Checks of annotations by beartype, each of which is generated once.

Functions inside of functions are defined anew with every call, and each time their checks would be generated anew too.
That takes longer than all checks together.
"""

from collections.abc import Callable, Hashable

from beartype import beartype

_checks: dict[Hashable, Callable] = {}


def checked(function: Callable) -> Callable:
    """Return a function that checks its arguments and result, or an equal one that was made before.

    Args:
        function: What jaxtyping makes of a signature: it has no closure, and its body does nothing with the arguments.
    """
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
