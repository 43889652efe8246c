"""The first of several processes chooses `performance: auto` for all of them."""

import json
import pathlib

import pytest
from processes import run_two

from xlstm_jax.recipes.performance import PERFORMANCE_FILE

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).with_name("one_of_two.py")


@pytest.fixture
def chosen_by(tmp_path):
    """What both processes have chosen, for memories in GiB."""

    def run(*memories):
        codes, output = run_two(SCRIPT, str(tmp_path), *map(str, memories))
        assert codes == [0, 0], output
        return [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]

    return run


def test_all_processes_take_the_choice_of_the_first(chosen_by, tmp_path):
    first, second = chosen_by(130, 12)
    assert first == second
    assert first["remat"] == "none"  # Within 12 GiB it would be another one.
    assert (tmp_path / "run_0" / PERFORMANCE_FILE).exists()
    assert not (tmp_path / "run_1").exists()


def test_all_processes_refuse_what_the_first_refuses(chosen_by):
    first, second = chosen_by(2, 130)
    assert first == second
    assert "does not fit" in first
