"""Cases of settings: a field, another value for it, and what is observed of a config with either value."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest


class World(NamedTuple):
    """What an observation may use."""

    monkeypatch: pytest.MonkeyPatch
    folder: Path


class Beside(NamedTuple):
    """A value that has an effect beside other fields only."""

    value: Any
    fields: dict[str, Any]


class Case(NamedTuple):
    """A field of a config class."""

    config_class: Any
    base: dict[str, Any]
    field: str
    value: Any
    observe: Callable[[Any, World], Any]

    @property
    def name(self) -> str:
        """The class and the field."""
        return f"{self.config_class.__name__}.{self.field}"


def cases(config_class: Any, observe: Callable[[Any, World], Any], base: dict[str, Any], **values: Any) -> list[Case]:
    """Return a case for each field, with its other value."""
    return [
        Case(config_class, {**base, **value.fields}, field, value.value, observe)
        if isinstance(value, Beside)
        else Case(config_class, base, field, value, observe)
        for field, value in values.items()
    ]


def program_text(closed: Any) -> str:
    """Return a traced program as text, with its constants."""
    constants = [(x.shape, np.asarray(x).tobytes()) for x in closed.consts if not isinstance(x, jax.core.Tracer)]
    return f"{closed} {constants}"


class Recorder:
    """Records what is called on it, at any depth, and returns itself unless another answer is given."""

    def __init__(self, calls: list | None = None, path: str = "", answers: dict[str, Any] | None = None):
        self.calls = [] if calls is None else calls
        self._path, self._answers = path, answers or {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}".lstrip(".")
        return self._answers[path] if path in self._answers else Recorder(self.calls, path, self._answers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"{self._path}{tuple(map(plain, args))}{ {k: plain(v) for k, v in kwargs.items()} }")
        return self

    def __iter__(self) -> Iterator["Recorder"]:
        return iter((self, self, self))

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def plain(value: Any) -> Any:
    """Return a value whose repr is the same in every process."""
    if isinstance(value, Recorder):
        return "recorder"
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
