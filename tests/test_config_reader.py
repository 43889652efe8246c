"""The strict builder: what fits becomes configs, and every mistake is a line that says where it is and what to do."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.configs.reader import build


@dataclasses.dataclass(kw_only=True)
class Part(ConfigDict):
    """A field of each kind."""

    size: int
    share: float = 0.5
    names: list[str] = dataclasses.field(default_factory=list)
    kind: Literal["plain", "fancy"] = "plain"
    path: Path | None = None
    either: str | list[int] = "x"
    at_steps: dict[int, float] | None = None
    function: Callable | None = None

    def __post_init__(self):
        if self.size < 0:
            raise ConfigError(f"size is {self.size}, but must not be negative.")


@dataclasses.dataclass(kw_only=True)
class LargePart(Part):
    """A part with one field more."""

    weight: float = 1.0


@dataclasses.dataclass(kw_only=True)
class Whole(ConfigDict):
    """Parts in a config."""

    part: Part
    parts: list[Part] = dataclasses.field(default_factory=list)
    is_on: bool = False


def mistakes(values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(Whole, values)
    return str(caught.value).splitlines()


def test_plain_values_become_configs():
    values = {
        "size": 3,
        "share": 1,
        "names": ["a"],
        "kind": "fancy",
        "path": "a/b",
        "either": [1, 2],
        "at_steps": {0: 1, 10: 0.5},
        "function": "math.sqrt",
    }
    built = build(Part, values)
    assert built.path == Path("a/b")
    assert (built.share, type(built.share)) == (1.0, float)
    assert built.either == [1, 2]
    assert built.at_steps == {0: 1.0, 10: 0.5}
    assert built.function is __import__("math").sqrt


def test_a_text_may_stand_for_a_list_of_one_text():
    assert build(Part, {"size": 1, "names": "a.txt"}).names == ["a.txt"]


def test_a_whole_number_may_be_written_as_a_power_of_ten():
    assert build(Part, {"size": 1e6}).size == 1_000_000


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"part": {"size": "3"}}, "part.size: a whole number is needed, not '3'."),
        ({"part": {"size": 2.5}}, "part.size: a whole number is needed, not 2.5."),
        ({"part": {"size": True}}, "part.size: a whole number is needed, not True."),
        ({"part": {"size": 1, "share": "x"}}, "part.share: a number is needed, not 'x'."),
        ({"part": {"size": 1, "names": [1]}}, "part.names.0: a text is needed, not 1: put it in quotes if it is one."),
        ({"part": {"size": 1}, "is_on": "yes"}, "is_on: true or false is needed, not 'yes'."),
        ({"part": {"size": 1, "kind": "plan"}}, "part.kind: 'plan' is none of 'plain', 'fancy'. Did you mean 'plain'?"),
        ({"part": {"size": 1, "function": "math.sqr"}}, "part.function: Cannot import 'math.sqr'"),
        ({"part": {"size": -1}}, "part: size is -1, but must not be negative."),
        ({"part": 3}, "part: fields of a Part are needed, not 3."),
        ({"part": {}}, "part.size is not set, but Part needs it."),
        ({}, "part is not set, but Whole needs it."),
        ({"part": {"size": 1}, "parts": 3}, "parts: a list of configs, or a mapping from names to configs, is needed"),
    ],
)
def test_a_wrong_value_is_a_line_that_says_where_and_what_is_needed(values, line):
    assert len(mistakes(values)) == 1
    assert mistakes(values)[0].startswith(line)


def test_an_unknown_key_is_a_line_with_the_nearest_valid_name():
    assert mistakes({"part": {"size": 1, "shre": 2}}) == [
        "part.shre: Part has no such field. Did you mean 'share'?",
    ]


def test_an_unknown_key_that_is_like_no_other_is_a_line_with_all_valid_names():
    (line,) = mistakes({"part": {"size": 1}, "zzz": 2})
    assert line == "zzz: Whole has no such field. It has: part, parts, is_on."


def test_every_mistake_has_a_line():
    assert len(mistakes({"part": {"size": "a", "share": "b"}, "is_on": 1})) == 3


def test_a_target_names_a_subclass():
    built = build(Whole, {"part": {"_target_": f"{__name__}.LargePart", "size": 1, "weight": 2.0}})
    assert built.part == LargePart(size=1, weight=2.0)


def test_fields_of_a_target_are_checked_too():
    (line,) = mistakes({"part": {"_target_": f"{__name__}.LargePart", "size": 1, "wait": 2.0}})
    assert line == "part.wait: LargePart has no such field. Did you mean 'weight'?"


def test_a_target_of_another_family_is_refused():
    (line,) = mistakes({"part": {"_target_": f"{__name__}.Whole", "size": 1}})
    assert "which is no Part" in line


def test_a_list_of_configs_may_be_a_mapping_from_which_null_takes_one_out():
    built = build(Whole, {"part": {"size": 1}, "parts": {"a": {"size": 2}, "b": None, "c": {"size": 3}}})
    assert [part.size for part in built.parts] == [2, 3]
    assert mistakes({"part": {"size": 1}, "parts": {"a": {"size": "x"}}}) == [
        "parts.a.size: a whole number is needed, not 'x'."
    ]


@dataclasses.dataclass(kw_only=True)
class Odd(ConfigDict):
    """Fields that plain values cannot fill, or only with a dotted path."""

    kind: type = int
    thing: Whole | object = None
    event: threading.Event | None = None


def test_a_field_that_plain_values_cannot_fill_hinders_no_other():
    assert build(Odd, {"kind": "builtins.float"}).kind is float
    with pytest.raises(ConfigError, match=r"^event: a Event is needed, which plain values cannot make; got 3"):
        build(Odd, {"event": 3})


def test_configs_that_are_built_already_stay_what_they_are():
    part = Part(size=1)
    assert build(Whole, {"part": part}).part is part
