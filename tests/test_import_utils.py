"""Dotted paths lead to the objects they name, and say so when they do not."""

import collections
import sys

import jax.numpy as jnp
import pytest

import xlstm_jax
from xlstm_jax.import_utils import class_to_name, resolve_import, resolve_import_from_string


class Outer:
    """A class that holds a class."""

    class Inner:
        """A class in a class."""


@pytest.mark.parametrize("cls", [collections.OrderedDict, int, jnp.bfloat16, collections.UserDict])
def test_the_name_of_a_class_leads_back_to_it(cls):
    assert resolve_import(class_to_name(cls)) is cls


def test_the_name_of_a_class_inside_a_class_holds_both_names():
    assert class_to_name(Outer.Inner) == f"{__name__}.Outer.Inner"


def test_a_path_may_name_a_nested_attribute_or_a_module():
    assert resolve_import_from_string("collections.OrderedDict.fromkeys") == collections.OrderedDict.fromkeys
    assert resolve_import_from_string("collections.abc") is collections.abc
    assert resolve_import_from_string("sys") is sys


@pytest.mark.parametrize("value", [3, None, int, (1, 2)])
def test_what_is_no_path_comes_back_as_it_is(value):
    assert resolve_import(value) is value


@pytest.mark.parametrize("value", ["int", 3, None, [int]])
def test_only_classes_have_names(value):
    assert class_to_name(value) is value


@pytest.mark.parametrize("path", ["no_such_module.Class", "collections.NoSuchClass", "collections.abc.NoSuchClass"])
def test_a_path_to_nothing_is_an_import_error_that_shows_what_is_missing(path):
    missing = "no_such_module" if path.startswith("no") else "NoSuchClass"
    with pytest.raises(ImportError, match=missing):
        resolve_import(path)


@pytest.mark.parametrize("path", ["", "a..b", "a b.c", ".relative", "<class 'int'>"])
def test_a_string_that_is_no_dotted_path_is_an_import_error(path):
    with pytest.raises(ImportError, match="dotted path"):
        resolve_import(path)


def test_a_module_whose_own_import_fails_reports_that_import(tmp_path, monkeypatch):
    (tmp_path / "package_of_test").mkdir()
    (tmp_path / "package_of_test" / "__init__.py").write_text("")
    (tmp_path / "package_of_test" / "broken.py").write_text("import dependency_that_is_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="dependency_that_is_not_installed"):
        resolve_import("package_of_test.broken.Class")


def test_every_public_name_of_the_package_can_be_imported():
    names = {name: getattr(xlstm_jax, name) for name in xlstm_jax.__all__}
    assert names["XLSTM"] is resolve_import("xlstm_jax.models.xlstm.XLSTM")
    assert set(names) <= set(dir(xlstm_jax))


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'xlstm_jax' has no attribute 'XLSTMConfigs'"):
        xlstm_jax.XLSTMConfigs  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
