"""The documented names, parameters, fields and defaults are there, so that users' code runs unchanged.

`golden/documented_api.json` holds them by module: a signature for a function, fields with defaults and signatures of
methods for a class, and `null` for any other name. Defaults are source text; only literals are compared.
"""

import ast
import dataclasses
import importlib
import inspect
import json
from typing import Any

import pytest
from processes import TESTS

DOCUMENTED = json.loads((TESTS / "golden" / "documented_api.json").read_text())
UNKNOWN = object()


def literal(source: str | None) -> Any:
    try:
        return UNKNOWN if source is None else ast.literal_eval(source)
    except ValueError:
        return UNKNOWN


def differs(documented: Any, ours: Any) -> bool:
    if isinstance(documented, list | tuple) and isinstance(ours, list | tuple):
        return list(documented) != list(ours)
    return documented is not UNKNOWN and documented != ours


def signature_faults(where: str, source: str, function: Any) -> list[str]:
    """What of a documented signature a function does not accept."""
    arguments = ast.parse(f"def f{source}: ...").body[0].args  # pyright: ignore[reportAttributeAccessIssue]
    positional = [argument.arg for argument in arguments.args if argument.arg not in {"self", "cls"}]
    num_required = len(arguments.args) - len(arguments.defaults)
    defaults = dict(zip(arguments.args[num_required:], arguments.defaults, strict=True))
    defaults |= dict(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    defaults = {argument.arg: ast.unparse(default) for argument, default in defaults.items() if default is not None}

    ours = {name: p for name, p in inspect.signature(function).parameters.items() if name not in {"self", "cls"}}
    takes_any = {p.kind for p in ours.values()} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    our_positional = [name for name, p in ours.items() if p.kind in kinds]
    faults = []
    if our_positional[: len(positional)] != positional and not takes_any:
        faults.append(f"{where}: positional arguments are {our_positional}, documented are {positional}")
    names = {*positional, *(a.arg for a in arguments.kwonlyargs)}
    for name in sorted(names):
        if name not in ours:
            faults += [] if takes_any else [f"{where}: no parameter {name}"]
        elif name in defaults and differs(literal(defaults[name]), ours[name].default):
            faults.append(f"{where}: {name} is {ours[name].default!r} by default, documented is {defaults[name]}")
    required = {name for name, p in ours.items() if p.default is p.empty and p.kind in {*kinds, p.KEYWORD_ONLY}}
    return faults + [f"{where}: a new parameter {name} has no default" for name in sorted(required - names)]


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def class_faults(where: str, documented: dict[str, dict], cls: Any) -> list[str]:
    """What of documented fields and methods a class does not have."""
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    faults = [
        f"{where}.{name} is missing"
        for name in {**documented["fields"], **documented["methods"]}
        if name not in fields and not hasattr(cls, name)
    ]
    for name, source in documented["fields"].items():
        if name in fields and differs(literal(source), default_of(fields[name])):
            faults.append(f"{where}.{name} is {default_of(fields[name])!r} by default, documented is {source}")
    for name, source in documented["methods"].items():
        method = getattr(cls, name, None)
        if callable(method):  # Properties have no signature.
            faults += signature_faults(f"{where}.{name}", source, method)
    return faults


def faults_of(where: str, documented: Any, found: Any) -> list[str]:
    if documented is None:
        return []
    return (signature_faults if isinstance(documented, str) else class_faults)(where, documented, found)


@pytest.mark.parametrize("module", DOCUMENTED)
def test_a_module_has_what_is_documented(module):
    found = importlib.import_module(module)
    names = DOCUMENTED[module]
    assert [name for name in names if not hasattr(found, name)] == []
    assert [fault for name in names for fault in faults_of(name, names[name], getattr(found, name))] == []


def test_a_changed_signature_is_noticed():
    @dataclasses.dataclass
    class Config:
        size: int = 2

        def scale(self, other: int, *, factor: int = 1) -> None: ...

    methods = {"scale": "(self, by, *, factor=2)", "shrink": "(self)"}
    faults = class_faults("Config", {"fields": {"size": "1", "width": None}, "methods": methods}, Config)
    assert faults == [
        "Config.width is missing",
        "Config.shrink is missing",
        "Config.size is 2 by default, documented is 1",
        "Config.scale: positional arguments are ['other'], documented are ['by']",
        "Config.scale: no parameter by",
        "Config.scale: factor is 1 by default, documented is 2",
        "Config.scale: a new parameter other has no default",
    ]
