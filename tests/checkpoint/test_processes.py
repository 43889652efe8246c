"""Several processes write one checkpoint together."""

from pathlib import Path

import pytest
from checkpoint.states import assert_same, make_state, parts
from processes import run_two

from xlstm_jax.checkpoint.loaders import own_states
from xlstm_jax.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slow


def test_two_processes_save_and_one_goes_on(tmp_path, caplog):
    script = Path(__file__).with_name("one_of_two.py")
    codes, output = run_two(script, str(tmp_path), python_options=("-W", "error"))
    assert codes == [0, 0], output
    store = CheckpointStore(tmp_path, read_only=True)
    assert_same(store.restore(3, parts(make_state(seed=1, dp=8))), parts(make_state(fsdp=8)))
    assert own_states(store.read_document(3, "data")["loaders"]) == {}
    assert "Resume with 2 processes" in caplog.text
    store.close()
