"""A run whose state or batch cannot fit into memory is refused before anything is made for it."""

import jax
import numpy as np
import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
from xlstm_jax.planning.footprint import state_bytes
from xlstm_jax.recipes import memory_check
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.memory_check import check_memory, warn_of_step_memory
from xlstm_jax.recipes.run_config import build_run
from xlstm_jax.trainer.base.compiled_step import CompiledMemory
from xlstm_jax.utils.accelerators import host_memory

GIB = 2**30


def check(*overrides: str) -> None:
    mesh = initialize_mesh(ParallelConfig(), np.array(jax.devices()[:1]))
    check_memory(build_run(compose(["experiment=demo", *overrides])), mesh)


@pytest.fixture
def memory(monkeypatch):
    """Sets the memory of the machine, of which each of the processes' CPU devices in the mesh has a share."""
    return lambda num_bytes: monkeypatch.setattr(memory_check, "host_memory", lambda: num_bytes)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("batch_size=1000000000", "batch_size=1000000000 with context_length=256 needs 5,722.0 GiB"),
        ("context_length=1000000000", "batch_size=8 with context_length=1000000000 needs"),
        ("model.embedding_dim=1000000000", "model.embedding_dim=1000000000, .* for parameters alone"),
        ("model.vocab_size=1000000000000000000000", "model.vocab_size=1000000000000000000000"),
    ],
)
def test_what_no_machine_has_room_for_is_refused_by_the_settings_that_need_it(override, named, memory):
    memory(24 * GIB)
    with pytest.raises(ConfigError, match=named):
        check(override)


def test_the_state_is_counted_exactly_where_it_may_not_fit(memory):
    needed = state_bytes(build_run(compose(["experiment=demo"])).setup(1)).persistent
    memory(needed)
    check()
    memory(needed - 1)
    with pytest.raises(ConfigError, match="for parameters, optimizer and batch, more than"):
        check()


def test_the_state_of_a_small_run_is_not_traced(memory, monkeypatch):
    memory(24 * GIB)
    monkeypatch.setattr(memory_check, "state_bytes", lambda _: pytest.fail("traced"))
    check()


def test_the_memory_of_this_machine_is_known():
    assert GIB < host_memory() < 2**50


@pytest.mark.parametrize(("missing", "num_warnings"), [(1, 1), (0, 0)])
def test_a_step_that_needs_more_than_the_machine_has_is_warned_of(memory, caplog, missing, num_warnings):
    compiled = CompiledMemory("cpu", arguments=2 * GIB, outputs=GIB, temporaries=4 * GIB, code=GIB)
    memory(compiled.peak - missing)
    warn_of_step_memory(compiled, initialize_mesh(ParallelConfig(), np.array(jax.devices()[:1])))
    assert caplog.text.count("needs about 8.0 GiB on each device") == num_warnings
