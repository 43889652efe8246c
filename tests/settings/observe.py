"""Observe all settings, and print those that have no effect; a program, as checks of annotations would slow it down."""

import functools
import json
import logging
import re
import sys
import tempfile
from pathlib import Path

import pytest
from settings import of_callbacks, of_data, of_loggers, of_models
from settings.cases import Case, World

CASES = [*of_models.CASES, *of_data.CASES, *of_callbacks.CASES, *of_loggers.CASES]


@functools.cache
def observe_base(config_class, observe, base: str) -> str:
    """Observe a config before a field is changed; several fields share it."""
    fields = next(case.base for case in CASES if case.config_class is config_class and repr(case.base) == base)
    return observe_once(config_class, observe, fields)


def observe_once(config_class, observe, fields) -> str:
    """Observe a config in a folder of its own, whose path does not count; an error is an observation too."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        try:
            seen = repr(observe(config_class(**fields), World(patch, Path(folder))))
        except (ValueError, NotImplementedError) as error:
            seen = f"error: {error}"
        return re.sub(r"0x[0-9a-f]+", "", seen.replace(folder, "FOLDER"))


def problem_of(case: Case) -> str | None:
    """Say what is wrong with a field, if it has no effect."""
    before = observe_base(case.config_class, case.observe, repr(case.base))
    after = observe_once(case.config_class, case.observe, case.base | {case.field: case.value})
    if after == before:
        return f"{case.value!r} changes nothing"
    names = (case.field, case.field.replace("_", " "))
    if after.startswith("error: ") and not any(name in after for name in names):
        return f"{case.value!r} gives an error that does not name it: {after}"
    return None


def unsteady_bases() -> list[str]:
    """Return the observations that are errors, or not the same twice: they would call any change an effect."""
    kinds = {(case.config_class, case.observe): case for case in CASES}
    return [
        f"{case.config_class.__name__}, {case.observe.__name__}"
        for case in kinds.values()
        if (seen := observe_base(case.config_class, case.observe, repr(case.base))).startswith("error: ")
        or observe_once(case.config_class, case.observe, case.base) != seen
    ]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    found = {each.name: problem for each in CASES if (problem := problem_of(each))}
    sys.stdout.write(json.dumps({"problems": found, "unsteady": unsteady_bases()}) + "\n")
