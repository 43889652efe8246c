"""Import of objects by dotted path, dotted paths of objects, and lazy exports of packages."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def resolve_import(import_path: str | Any) -> Any:
    """Import the object with a dotted path.

    Args:
        import_path: A path such as `"package.module.Class"`, or any other object.

    Returns:
        The named object; anything but a string is returned unchanged.
    """
    return resolve_import_from_string(import_path) if isinstance(import_path, str) else import_path


def resolve_import_from_string(import_string: str) -> Any:
    """Import the object with a dotted path.

    Args:
        import_string: A path such as `"package.module.Class"`; nested classes and modules work too.

    Returns:
        The named object.

    Raises:
        ImportError: The module or the name in it does not exist.
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
    """Return the dotted path of a class; anything but a class is returned unchanged."""
    return dotted_path(x) if isinstance(x, type) else x


def dotted_path(x: Any) -> str:
    """Return the dotted path of a class or function; `resolve_import` inverts it if the module defines that name."""
    return f"{x.__module__}.{x.__qualname__}"


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports its public names on first use.

    Args:
        package: The name of the package.
        modules: The defining module within the package, by public name.
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
            if error.name != path:  # The module exists, but one of its imports does not.
                raise
            return module, names[position:]
    return module, []
