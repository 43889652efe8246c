"""States of data loaders go through JSON unchanged, and to the right process."""

import json

import jax
import numpy as np
import pytest

from xlstm_jax.checkpoint.loaders import gather_states, own_states


class Loader:
    """Stands where it is told to."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state


@pytest.mark.parametrize(
    "state",
    [
        7,
        b'{"next_index": 3}',
        b"\x80\x03\xff",
        {"next": 3, "parents": [{"exhausted": 1}, None], "name": "a"},
        {"source": b"\xff", "step": {"rate": 0.5}},
    ],
    ids=str,
)
def test_a_state_comes_back_as_it_was(state):
    stored = json.loads(json.dumps(gather_states({"train": Loader(state)})))
    assert own_states(stored) == {"train": state}


def test_arrays_come_back_as_they_were():
    state = {"order": np.arange(3, dtype=np.int16), "count": np.int64(4)}
    restored = own_states(json.loads(json.dumps(gather_states({"train": Loader(state)}))))["train"]
    np.testing.assert_array_equal(restored["order"], state["order"])
    assert restored["order"].dtype == np.int16
    assert restored["count"] == 4


def test_loaders_without_state_are_left_out():
    assert gather_states({"train": Loader(1), "val": iter([])}) == {"train": [1]}


def test_a_state_that_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"data loader 'val' holds a set"):
        gather_states({"val": Loader({"seen": {1}})})
    with pytest.raises(ValueError, match=r"strings as keys"):
        gather_states({"val": Loader({1: 2})})


def test_each_process_gets_its_own_state(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert own_states({"train": [10, 20]}) == {"train": 20}


def test_other_numbers_of_processes_go_on_where_all_stood_in_the_same_place(caplog):
    assert own_states({"train": [10, 10], "val": [10, 20]}) == {"train": 10}
    assert "'val' starts anew" in caplog.text
    assert "Resume with 2 processes" in caplog.text
