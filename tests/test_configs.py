"""Configs survive the way through dictionaries, JSON and reprs, and refuse what does not fit."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

from xlstm_jax.configs import ConfigDict, ConfigError, check_least, check_numbers, flat_config
from xlstm_jax.dataset import SyntheticDataConfig
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.logger import FileLoggerConfig, LoggerConfig


@dataclasses.dataclass
class Mesh:
    """A plain dataclass, not a `ConfigDict`."""

    sizes: list[int] = dataclasses.field(default_factory=lambda: [2, 4])
    gather_dtype: str | None = None


@dataclasses.dataclass(kw_only=True)
class Schedule(ConfigDict):
    """A config to nest."""

    rate: float = 0.1
    shape: Literal["cosine", "linear"] = "cosine"


@dataclasses.dataclass(kw_only=True)
class Warmup(Schedule):
    """A config that inherits fields."""

    steps: int = 3


@dataclasses.dataclass(kw_only=True)
class Everything(ConfigDict):
    """A config with every kind of field."""

    name: str
    schedule: Schedule | None = None
    warmup: Warmup = dataclasses.field(default_factory=Warmup)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    dtype: jnp.dtype | str = "float32"
    kernel: tuple[int, int] | int | None = None
    weights: dict[str, int] = dataclasses.field(default_factory=dict)
    by_step: dict[int, float] = dataclasses.field(default_factory=dict)
    folder: Path = Path("runs")
    flag: bool = False
    anything: Any = None
    model_class: type = Mesh
    activation: Callable = jax.nn.silu
    many: list[Schedule] = dataclasses.field(default_factory=list)


EXAMPLES = [
    Everything(name="defaults"),
    Everything(name="None", schedule=Schedule(rate=2.0, shape="linear"), flag=True),
    Everything(name="nested", warmup=Warmup(steps=0, rate=-1.0), mesh=Mesh([8], "bfloat16")),
    Everything(name="unions", kernel=(3, 4), dtype="bfloat16"),
    Everything(name="unions", kernel=5, anything=True),
    Everything(name="dictionaries", weights={"a": 1, "b": -2}, by_step={10: 0.5, 20: 1.0}),
    Everything(name="paths", folder=Path("some/folder"), model_class=Schedule, activation=jax.nn.relu),
    Everything(name="lists", many=[Schedule(rate=1.0), Schedule(rate=2.0)]),
    Everything(name="it's \"quoted\" <class 'int'>, (1, 2), x=None"),
]


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: config.name[:12])
def test_a_config_comes_back_from_its_dictionary_and_from_json(config):
    plain = config.to_dict()
    assert ConfigDict.from_dict(Everything, plain) == config
    assert ConfigDict.from_dict(Everything, json.loads(json.dumps(plain)), ignore_extensive_attributes=False) == config


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: config.name[:12])
def test_a_config_comes_back_from_its_repr(config):
    # The repr of a function holds an address, from which nothing can be rebuilt.
    text = str(dataclasses.replace(config, activation=dict))
    assert ConfigDict.from_dict(Everything, text) == dataclasses.replace(config, activation=dict)


def test_a_dictionary_of_a_config_holds_only_plain_values():
    config = Everything(
        name="x",
        schedule=Schedule(),
        dtype=jnp.bfloat16,
        weights=FrozenDict(a=1),
        anything=[Path("a"), {"k": Schedule}, Mesh(), (None, 1.5)],
        model_class=Schedule,
        activation=math.tanh,
    )
    assert config.to_dict() == {
        "name": "x",
        "schedule": {"rate": 0.1, "shape": "cosine"},
        "warmup": {"rate": 0.1, "shape": "cosine", "steps": 3},
        "mesh": {"sizes": (2, 4), "gather_dtype": None},
        "dtype": "jax.numpy.bfloat16",
        "kernel": None,
        "weights": {"a": 1},
        "by_step": {},
        "folder": "runs",
        "flag": False,
        "anything": ("a", {"k": f"{__name__}.Schedule"}, {"sizes": (2, 4), "gather_dtype": None}, (None, 1.5)),
        "model_class": f"{__name__}.Schedule",
        "activation": "math.tanh",
        "many": (),
    }


def test_what_has_no_plain_form_becomes_its_string():
    assert Everything(name="x", anything=jnp.dtype("int8")).to_dict()["anything"] == "int8"
    assert "lambda" in Everything(name="x", activation=lambda x: x).to_dict()["activation"]


def test_attributes_that_are_no_fields_are_written_and_skipped_when_read():
    config = Schedule()
    config.derived = 7
    assert config.to_dict() == {"rate": 0.1, "shape": "cosine", "derived": 7}
    assert ConfigDict.from_dict(Schedule, config.to_dict()) == Schedule()


def test_get_returns_an_attribute_or_the_default():
    assert Schedule(rate=3.0).get("rate") == 3.0
    assert Schedule().get("missing") is None
    assert Schedule().get("missing", 4) == 4


@pytest.mark.parametrize("data", ["jax.numpy.bfloat16", "<class 'jax.numpy.bfloat16'>", "bfloat16", "numpy.bfloat16"])
@pytest.mark.parametrize("annotation", [jnp.dtype | str, jnp.dtype, str, str | None, type | str])
def test_a_dtype_is_read_as_its_name(annotation, data):
    assert ConfigDict.from_dict(annotation, data) == "bfloat16"


@pytest.mark.parametrize(
    ("annotation", "data", "expected"),
    [
        (int, "12", 12),
        (int, 3.0, 3),
        (int, str(2**60 + 1), 2**60 + 1),
        (float, 3, 3.0),
        (float, "1e-3", 1e-3),
        (bool, "False", False),
        (bool, 1, True),
        (str, 7, "7"),
        (str, Path("a/b"), "a/b"),
        (str, "None", "None"),
        (str | None, "None", None),
        (Literal["a", None], "None", None),
        (tuple[int, int] | int | None, "(1, 2)", (1, 2)),
        (tuple[int, int] | int | None, [1, 2], (1, 2)),
        (tuple[int, int] | int | None, 5, 5),
        (tuple[int, ...], ["1", 2], (1, 2)),
        (tuple, [1, "a"], (1, "a")),
        (list[float], "(1, -2)", [1.0, -2.0]),
        (list[int | None], [None, 1], [None, 1]),
        (Sequence[str], ("a",), ("a",)),
        (set[int], "{1, 2}", {1, 2}),
        (dict[str, int], "{'a': 1}", {"a": 1}),
        (dict[int, float], {"10": 1}, {10: 1.0}),
        (Mapping[str, tuple[int, int]], {"a": [1, 2]}, {"a": (1, 2)}),
        (dict, "{'a': -inf}", {"a": float("-inf")}),
        (str | int, 5, 5),
        (int | str, "5", "5"),
        (str | float, 5, 5.0),
        (float | int, 5, 5),
        (bool | int, 1, 1),
        (Path | None, "PosixPath('a')", Path("PosixPath('a')")),
        (list[Path], "[PosixPath('a')]", [Path("a")]),
        (list[jnp.dtype], "[dtype(bfloat16), dtype('int8')]", ["bfloat16", "int8"]),
        (type, "<class 'pathlib.Path'>", Path),
        (Any, "<class 'pathlib.Path'>", Path),
        (callable, "pathlib.Path", Path),
        (Schedule | dict, {"rate": 2}, Schedule(rate=2.0)),
        (Schedule | dict, {"other": 2}, {"other": 2}),
        (Schedule | Warmup, {"steps": 2}, Warmup(steps=2)),
        (Schedule | Warmup | str, "Warmup(rate=2)", Warmup(rate=2.0)),
        (Schedule | str, "Some text", "Some text"),
        (Mesh, Mesh([1]), Mesh([1])),
    ],
)
def test_a_value_is_turned_into_what_the_annotation_asks_for(annotation, data, expected):
    value = ConfigDict.from_dict(annotation, data)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "data", "message"),
    [
        (int, "many", "a whole number is needed, not 'many'"),
        (int, 2.5, "a whole number is needed, not 2.5"),
        (int, None, "a whole number is needed, not None"),
        (float, [1.0], "a number is needed, not"),
        (bool, "maybe", "true or false is needed, not 'maybe'"),
        (bool, 2, "true or false is needed, not 2"),
        (str, None, "a text is needed, not None"),
        (Literal["cosine", "linear"], "cosin", "Did you mean 'cosine'"),
        (Literal[1, 2], True, "none of 1, 2"),
        (tuple[int, int], [1, 2, 3], "tuple of 2 values"),
        (list[int], "5", "a list is needed, not '5'"),
        (dict[str, int], "[1]", "dictionary is needed"),
        (dict[str, int], "{1: ", "not the repr"),
        (jnp.dtype, "float33", "name of a dtype"),
        (callable, "pathlib.NoSuchClass", "NoSuchClass"),
        (callable, 3, "class or function"),
        (complex, "1j", "complex"),
        (tuple[int, int] | int, "x", "a tuple is needed, not 'x'. Or: a whole number is needed, not 'x'"),
        (Schedule, None, "fields of a Schedule are needed, not None"),
        (Schedule, "None", "fields of a Schedule are needed, not 'None'"),
        (Schedule, 3, "fields of a Schedule are needed, not 3"),
        (Schedule, "[1, 2]", r"fields of a Schedule are needed, not \[1, 2\]"),
        (Schedule, "Schedule(rate='fast')", "Schedule.rate: a number is needed, not 'fast'"),
        (Everything, {"name": "x", "warmup": {"shape": "linea"}}, "Everything.warmup.shape: .*mean 'linear'"),
        (Everything, {"flag": True}, "Everything.name is not set"),
        (Everything, {"name": "x", "mesh": None}, "Everything.mesh: fields of a Mesh are needed, not None"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_says_where_and_why(annotation, data, message):
    with pytest.raises(ConfigError, match=message):
        ConfigDict.from_dict(annotation, data)


def test_an_unknown_key_is_skipped_unless_refused():
    data = {"rate": 1.0, "shap": "linear"}
    assert ConfigDict.from_dict(Schedule, data) == Schedule(rate=1.0)
    with pytest.raises(ConfigError, match=r"shap: Schedule has no such field\. Did you mean 'shape'"):
        ConfigDict.from_dict(Schedule, data, ignore_extensive_attributes=False)


def test_a_repr_of_another_class_is_read_unless_refused():
    assert ConfigDict.from_dict(Schedule, "OldName(rate=2.0)") == Schedule(rate=2.0)
    with pytest.raises(ConfigError, match=r"Schedule is needed.*OldName"):
        ConfigDict.from_dict(Schedule, "OldName(rate=2.0)", strict_classname_parsing=True)


def test_none_is_zero_for_an_int_only_if_asked():
    assert ConfigDict.from_dict(Warmup, {"steps": None}, none_to_zero_for_ints=True) == Warmup(steps=0)
    assert ConfigDict.from_dict(int | None, None, none_to_zero_for_ints=True) is None
    with pytest.raises(ConfigError, match=r"Warmup\.steps"):
        ConfigDict.from_dict(Warmup, {"steps": None})


def test_none_is_allowed_where_it_is_the_default():
    @dataclasses.dataclass
    class Loose:
        size: int = None

    assert ConfigDict.from_dict(Loose, {"size": None}) == Loose()
    assert ConfigDict.from_dict(Loose, {"size": "4"}) == Loose(4)


def test_reading_a_repr_runs_nothing(tmp_path):
    target = tmp_path / "written"
    text = f"Schedule(rate=__import__('pathlib').Path({str(target)!r}).touch())"
    with pytest.raises(ConfigError):
        ConfigDict.from_dict(Schedule, text)
    assert not target.exists()


@pytest.mark.filterwarnings("always")
def test_text_that_only_looks_like_a_repr_is_read_without_warnings(recwarn):
    assert ConfigDict.from_dict(Schedule | str, r"'\d+'") == r"'\d+'"
    assert not recwarn.list


def test_a_config_error_is_a_value_error_and_an_assertion_error():
    with pytest.raises(ValueError, match="x"):
        raise ConfigError("x")
    with pytest.raises(AssertionError, match="x"):
        raise ConfigError("x")


def test_fields_that_are_not_settable_are_not_passed_on():
    @dataclasses.dataclass(kw_only=True)
    class Derived(ConfigDict):
        size: int
        double: int = dataclasses.field(init=False)

        def __post_init__(self):
            self.double = 2 * self.size

    config = Derived(size=3)
    assert config.to_dict() == {"size": 3, "double": 6}
    assert ConfigDict.from_dict(Derived, config.to_dict(), ignore_extensive_attributes=False) == config


@dataclasses.dataclass(kw_only=True)
class Numbers(ConfigDict):
    """A config with every kind of number."""

    whole: int = 1
    real: float = 1.0
    optional: int | None = None


@pytest.mark.parametrize("value", ["3", None, True, 2.5, math.nan, [3]])
@pytest.mark.parametrize("name", ["whole", "real", "optional"])
def test_what_is_no_finite_number_is_refused_by_its_name(name, value, unchecked_shapes):
    if (name, value) in (("real", 2.5), ("optional", None)):
        return
    config = Numbers()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}, but must be a .*number\.$"):
        check_numbers(config)


def test_numbers_of_numpy_are_numbers(unchecked_shapes):
    check_numbers(Numbers(whole=np.int64(3), real=np.float32(2.5), optional=None))


def test_only_fields_of_the_given_class_are_checked(unchecked_shapes):
    @dataclasses.dataclass(kw_only=True)
    class Loose(Numbers):
        limit: float = None  # pyright: ignore[reportAssignmentType]

    check_numbers(Loose(), Numbers)


def test_a_number_below_the_least_is_refused_by_its_name():
    check_least(Numbers(whole=2, optional=None), 2, "whole", "optional")
    with pytest.raises(ConfigError, match=r"^real is 0\.5, but must be at least 1\.$"):
        check_least(Numbers(real=0.5), 1, "whole", "real")


@pytest.mark.parametrize(
    ("config_class", "fields"),
    [
        (SyntheticDataConfig, {"global_batch_size": "8"}),
        (SyntheticDataConfig, {"global_batch_size": 8.5}),
        (TrainerConfig, {"gradient_accumulate_steps": "2"}),
        (LoggerConfig, {"log_every_n_steps": "5"}),
        (ModelCheckpointConfig, {"max_to_keep": math.nan}),
        (ModelCheckpointConfig, {"every_n_minutes": math.nan}),
        (ParallelConfig, {"data_axis_size": "all"}),
    ],
)
def test_configs_of_all_layers_check_their_numbers(config_class, fields, unchecked_shapes):
    ((name, value),) = fields.items()
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, but must be a"):
        config_class(**fields)


def test_flat_settings_have_dotted_names_and_one_level():
    config = LoggerConfig(log_tools=[FileLoggerConfig(log_dir="x")])
    flat = flat_config({"logger": config.to_dict(), "sizes": (1, 2)})
    assert flat["logger.log_every_n_steps"] == 1
    assert flat["logger.log_path"] == "None"
    assert flat["logger.log_tools.0.log_dir"] == "x"
    assert flat["sizes"] == "(1, 2)"
