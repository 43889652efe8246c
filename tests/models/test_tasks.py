"""Small runs of the paper's tasks: sLSTM tracks a state where mLSTM cannot, mLSTM recalls where sLSTM cannot."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SLSTM, MLSTM = "xLSTM[0:1]", "xLSTM[1:0]"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_of_tasks", ROOT / "benchmarks" / "tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(script, task, pattern):
    setup = script.QUICK[task]
    return script.evaluate(setup, script.train(setup, pattern, seed=0), seed=0)


def test_slstm_learns_parity_and_extrapolates(script):
    trained, longer = accuracies(script, "parity", SLSTM)
    assert trained >= 0.99
    assert longer >= 0.99


def test_mlstm_guesses_the_parity_of_longer_sequences(script):
    trained, longer = accuracies(script, "parity", MLSTM)
    assert trained < 0.9
    assert 0.4 < longer < 0.6


def test_mlstm_recalls_values_by_their_keys(script):
    (recalled,) = accuracies(script, "recall", MLSTM)
    assert recalled >= 0.95


def test_slstm_does_not_recall_values_by_their_keys(script):
    (recalled,) = accuracies(script, "recall", SLSTM)
    assert recalled < 0.6


def test_a_run_is_the_same_again(script):
    setup = dataclasses.replace(script.QUICK["recall"], num_steps=3)
    first, again = (script.train(setup, "xLSTM[1:1]", seed=0).params for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_the_page_shows_the_newest_results_as_they_are():
    newest = max((ROOT / "benchmarks" / "results").glob("*-tasks.md"))
    page = (ROOT / "docs" / "explanation" / "paper-tasks.md").read_text().splitlines()
    rows = [line for line in newest.read_text().splitlines() if line.startswith("|")]
    assert rows
    assert [row for row in rows if row not in page] == []
