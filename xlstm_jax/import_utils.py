"""Names of classes and functions, and the classes and functions of names."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def resolve_import(import_path: str | Any) -> Any:
    """Import what a dotted path names.

    Args:
        import_path: A path such as `"package.module.Class"`, or anything else.

    Returns:
        The named object; anything but a string comes back as it is.
    """
    return resolve_import_from_string(import_path) if isinstance(import_path, str) else import_path


def resolve_import_from_string(import_string: str) -> Any:
    """Import what a dotted path names.

    Args:
        import_string: A path such as `"package.module.Class"`; classes inside classes and whole modules work too.

    Returns:
        The named object.

    Raises:
        ImportError: If there is no such module, or nothing of that name in it.
    """
    names = import_string.split(".")
    if not all(name.isidentifier() for name in names):
        raise ImportError(f"{import_string!r} is not a dotted path such as 'package.module.Class'.")
    found, rest = _longest_module(names)
    for name in rest:
        if not hasattr(found, name):
            raise ImportError(f"Cannot import {import_string!r}: {found!r} has no attribute {name!r}.")
        found = getattr(found, name)
    return found


def class_to_name(x: Any) -> str | Any:
    """Return the dotted path of a class, and anything but a class as it is."""
    return dotted_path(x) if isinstance(x, type) else x


def dotted_path(x: Any) -> str:
    """Return the path of a class or function that `resolve_import` takes back, if its module defines it by name."""
    return f"{x.__module__}.{x.__qualname__}"


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports its public names on first use.

    Args:
        package: The name of the package.
        modules: For each public name the module of the package that defines it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names


def _longest_module(names: list[str]) -> tuple[ModuleType, list[str]]:
    module = importlib.import_module(names[0])
    for position in range(1, len(names)):
        path = ".".join(names[: position + 1])
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:  # The module is there; something that it imports is not.
                raise
            return module, names[position:]
    return module, []
