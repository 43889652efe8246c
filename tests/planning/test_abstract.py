"""The trainer of shapes has the programs of the real one, and nothing else."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from meshes import make_mesh
from planning.setups import LLAMA, make_setup
from trainer.runs import ADAMW

from xlstm_jax.models.cost import model_cost
from xlstm_jax.models.xlstm.config import published
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.trainer.base.param_utils import get_num_params
from xlstm_jax.trainer.llm.trainer import LLMTrainer
from xlstm_jax.trainer.optimizer import OptimizerConfig
from xlstm_jax.trainer.placement import place_batch

pytestmark = pytest.mark.slow

EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}
RUNS = {
    "plain": {},
    "accumulated, remat": {"accumulation": 2, "remat": "full"},
    "llama": {"shape": LLAMA},
    "muon": {"optimizer": OptimizerConfig(name="muon")},
    "no guard": {"check_for_nan": False, "log_param_norm": False},
}


def real_trainer(setup):
    return LLMTrainer(setup.trainer, setup.model, setup.optimizer, setup.batch, make_mesh(**EIGHT))


@pytest.mark.parametrize("name", RUNS)
def test_the_step_is_the_program_that_a_real_trainer_runs(name):
    setup = make_setup(**EIGHT, **RUNS[name])
    real = real_trainer(setup)
    batch = place_batch(setup.batch, real.mesh, real.batch_partition_specs)
    program = real.train_step.lower(real.state, batch, real.init_train_metrics(batch)).as_text()
    assert AbstractTrainer.from_setup(setup, make_mesh(**EIGHT)).lower().as_text() == program


def test_the_evaluation_step_is_the_program_that_a_real_trainer_runs():
    setup = make_setup(**EIGHT)
    real = real_trainer(setup)
    batch = place_batch(setup.batch, real.mesh, real.batch_partition_specs)
    program = real.eval_step.lower(real.state, batch, real.init_eval_metrics(batch)).as_text()
    assert AbstractTrainer.from_setup(setup, make_mesh(**EIGHT)).lower_eval().as_text() == program


def test_a_mesh_without_devices_gives_the_same_program():
    setup = make_setup(**EIGHT)
    program = AbstractTrainer.from_setup(setup, make_mesh(**EIGHT)).lower().as_text()
    assert AbstractTrainer.from_setup(setup).lower().as_text() == program


def test_nothing_is_allocated():
    before = {id(array) for array in jax.live_arrays()}
    trainer = AbstractTrainer.from_setup(make_setup(**EIGHT))
    trainer.lower()
    trainer.lower_eval()
    assert {id(array) for array in jax.live_arrays()} <= before


def test_a_run_of_7b_lowers_for_256_devices_that_are_not_there():
    shape = published("xLSTM-7B", dtype="bfloat16")
    setup = make_setup(dp=32, fsdp=8, shape=shape, remat="full", rows=512, length=8192)
    trainer = AbstractTrainer.from_setup(setup)
    assert "mhlo.num_partitions = 256" in trainer.lower().as_text()
    assert get_num_params(trainer.state.params) == model_cost(setup.shape, sequence_length=8192).parameters


def test_a_debugged_run_has_the_program_of_the_run_without():
    debugged, plain = (AbstractTrainer.from_setup(make_setup(debug=debug)) for debug in (True, False))
    assert debugged.lower().as_text() == plain.lower().as_text()


def test_a_batch_that_cannot_be_split_is_refused():
    setup = make_setup(rows=6, optimizer=ADAMW)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1, 1, 1), ("dp", "fsdp", "pp", "tp"))
    with pytest.raises(ValueError, match="6 rows cannot be split over 4 devices"):
        AbstractTrainer.from_setup(setup, mesh)
