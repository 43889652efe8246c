"""The bytes of a plan are those of the arrays of a real run."""

import dataclasses

import jax
import pytest
from meshes import make_mesh
from planning.setups import LLAMA, SHAPE, make_setup

from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.memory import PersistentMemory, list_parameters, logits_memory, persistent_memory
from xlstm_jax.trainer.llm.trainer import LLMTrainer
from xlstm_jax.trainer.optimizer import OptimizerConfig
from xlstm_jax.trainer.placement import place_batch

pytestmark = pytest.mark.slow

EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}
RUNS = {
    "xlstm, adamw": {},
    "llama": {"shape": LLAMA},
    "muon": {"optimizer": OptimizerConfig(name="muon")},
    "bfloat16 parameters": {"shape": dataclasses.replace(SHAPE, param_dtype="bfloat16")},
    "no guard": {"check_for_nan": False},
}


def bytes_on_first_device(tree):
    shards = [array.addressable_shards for array in jax.tree.leaves(tree)]
    return sum(shard.data.nbytes for one in shards for shard in one if shard.device == jax.devices()[0])


@pytest.mark.parametrize("name", RUNS)
def test_the_bytes_of_each_part_are_those_on_a_device_of_a_real_run(name):
    setup = make_setup(**EIGHT, **RUNS[name])
    real = LLMTrainer(setup.trainer, setup.model, setup.optimizer, setup.batch, make_mesh(**EIGHT))
    batch = place_batch(setup.batch, real.mesh, real.batch_partition_specs)
    state = real.state
    assert persistent_memory(AbstractTrainer.from_setup(setup)) == PersistentMemory(
        parameters=bytes_on_first_device(state.params),
        optimizer=bytes_on_first_device(state.opt_state),
        other=bytes_on_first_device((state.step, state.rng, state.guard, real.init_train_metrics(batch))),
        batch=bytes_on_first_device(batch),
    )


def test_the_table_of_parameters_says_where_each_one_lies():
    trainer = AbstractTrainer.from_setup(make_setup(**EIGHT))
    parameters = {parameter.name: parameter for parameter in list_parameters(trainer)}
    kernel = parameters["block_stack.block.ffn.up.kernel"]
    assert kernel.shape == (4, 32, 64)
    assert sorted(kernel.axes) == ["fsdp", "tp"]
    assert kernel.num_bytes == 4 * 32 * 64 * 4 // 4
    total = sum(parameter.num_bytes for parameter in parameters.values())
    assert total == persistent_memory(trainer).parameters


def test_logits_are_those_of_a_chunk_and_of_the_vocabulary_on_a_device():
    trainer = AbstractTrainer.from_setup(make_setup(tp=2))
    assert logits_memory(trainer, num_tokens=100) == 16 * 32 * 4
    assert logits_memory(trainer, num_tokens=10) == 10 * 32 * 4


def test_all_logits_are_held_where_their_statistics_are_reported():
    trainer = AbstractTrainer.from_setup(make_setup(tp=2, log_logit_stats=True))
    assert logits_memory(trainer, num_tokens=100) == 100 * 64 * 4
