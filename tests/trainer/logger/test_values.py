"""Configs and metrics become what the tools can write."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.trainer.logger.values import import_extra, json_value, only_numbers


def test_only_numbers_become_curves():
    metrics = {"a": 1, "b": 0.5, "c": True, "d": "x", "e": None, "f": np.ones(2), "g": (1, 2)}
    assert only_numbers(metrics) == {"a": 1, "b": 0.5, "c": True}


VALUES = {
    "array": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    "bfloat16": (np.asarray(jnp.ones(2, jnp.bfloat16)), [1.0, 1.0]),
    "scalar": (np.float32(0.5), 0.5),
    "tuple": ((1, (2.5, "x")), [1, [2.5, "x"]]),
    "keys": ({1: float("inf")}, {"1": "inf"}),
    "other": (1j, "1j"),
}


@pytest.mark.parametrize(("value", "expected"), VALUES.values(), ids=VALUES.keys())
def test_every_value_has_a_form_in_json(value, expected):
    assert json.loads(json.dumps(json_value(value, non_finite=str), allow_nan=False)) == expected


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"xlstm_jax\[some\]"):
        import_extra("no_such_package", extra="some")


def test_a_package_that_is_there_but_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package") as caught:
        import_extra("broken_package", extra="some")
    assert caught.value.name == "no_such_package"
