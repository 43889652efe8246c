"""A run can be compiled for more devices than there are."""

import dataclasses

import pytest
from planning.setups import LLAMA, SHAPE, make_setup

from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.compiled import compile_here
from xlstm_jax.planning.memory import persistent_memory
from xlstm_jax.planning.setup import Setup
from xlstm_jax.planning.simulate import compile_elsewhere, compiled_memory
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["xlstm", "llama"])
def test_a_setup_survives_json(shape):
    setup = make_setup(dp=2, tp=2, shape=shape, accumulation=2, remat="dots")
    again = Setup.from_json(setup.to_json())
    assert again.to_json() == setup.to_json()
    assert AbstractTrainer.from_setup(again).lower().as_text() == AbstractTrainer.from_setup(setup).lower().as_text()


def test_another_process_finds_the_same_numbers():
    setup = make_setup(dp=2, fsdp=2, tp=2)
    assert compile_elsewhere(setup) == compile_here(setup)


def test_sixteen_devices_are_simulated():
    setup = make_setup(dp=4, fsdp=4, remat="full")
    memory = compiled_memory(setup)
    assert memory.device_kind == "cpu"
    persistent = persistent_memory(AbstractTrainer.from_setup(setup))
    # Positions are not read, nor are a few counters.
    assert persistent.total - persistent.batch < memory.arguments < persistent.total


def test_the_error_of_the_other_process_is_told():
    class OutOfReachConfig(LLMTrainerConfig):
        """A config that no other process can import."""

    setup = dataclasses.replace(make_setup(), trainer=OutOfReachConfig(logger=None))
    with pytest.raises(RuntimeError, match=r"ended with code 1:[\s\S]*OutOfReachConfig' is not a dotted path"):
        compile_elsewhere(setup)
