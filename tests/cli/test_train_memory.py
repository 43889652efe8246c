"""A run whose step does not fit takes the next choice of `performance: auto`, or is refused in one line."""

import gc
import json
from pathlib import Path

import jax
import pytest

from xlstm_jax.cli.main import main
from xlstm_jax.recipes import run as run_module
from xlstm_jax.recipes.performance import PERFORMANCE_FILE, Devices
from xlstm_jax.trainer.base.compiled_step import CompiledMemory
from xlstm_jax.trainer.llm.trainer import LLMTrainer

pytestmark = pytest.mark.slow

LIMIT = 2**30
TINY = (
    "model.embedding_dim=32",
    "model.num_heads=2",
    "model.num_blocks=2",
    "data=synthetic",
    "data.vocab_size=64",
    "batch_size=16",
    "context_length=32",
    "num_train_steps=2",
    "scheduler=constant",
    "scheduler.warmup_steps=1",
    "logger.log_every_n_steps=1",
    "hydra.run.dir=run",
)


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch) -> Path:
    """Pretend that the devices are GPUs with little memory; return the folder of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def pretended(mesh):
        return Devices("gpu", "NVIDIA H200", dict(mesh.shape), LIMIT)

    monkeypatch.setattr(run_module, "describe_devices", pretended)
    return tmp_path / "run"


def chosen(folder: Path) -> dict:
    return json.loads((folder / PERFORMANCE_FILE).read_text())


def test_a_compiled_step_that_does_not_fit_is_followed_by_the_next_choice(on_a_gpu, monkeypatch, capsys):
    compile_step, peaks = LLMTrainer.compile_train_step, [LIMIT + 1, LIMIT - 1]
    monkeypatch.setattr(
        LLMTrainer,
        "compile_train_step",
        lambda self: compile_step(self) and CompiledMemory("NVIDIA H200", peaks.pop(0), 0, 0, 0),
    )
    assert main(["train", *TINY]) == 0
    (rejected,) = chosen(on_a_gpu)["rejected"]
    assert rejected["needed"] == LIMIT + 1
    assert rejected["settings"] != chosen(on_a_gpu)["settings"]
    assert "is done at step 2" in capsys.readouterr().out


def test_a_first_step_that_runs_out_of_memory_is_followed_by_the_next_choice(on_a_gpu, monkeypatch, capsys):
    take_step, failures = LLMTrainer.train_model, [True]

    def fail_once(self, *args, **kwargs):
        if failures and failures.pop():

            def fail(*_):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

            self.train_step = fail
        return take_step(self, *args, **kwargs)

    init_model, held = LLMTrainer.init_model, []

    def init_and_count(self, batch):
        held.append(sum(array.nbytes for array in jax.live_arrays()))
        init_model(self, batch)

    monkeypatch.setattr(LLMTrainer, "train_model", fail_once)
    monkeypatch.setattr(LLMTrainer, "init_model", init_and_count)
    gc.collect()
    assert main(["train", *TINY]) == 0
    before, again = held
    assert again - before < 2**10, "The state of the first try must be gone before there is another."
    assert len(chosen(on_a_gpu)["rejected"]) == 1
    assert "is done at step 2" in capsys.readouterr().out
    steps = [json.loads(line) for line in (on_a_gpu / "file_logs/metrics_train.jsonl").read_text().splitlines()]
    assert [row["log_step"] for row in steps if "loss_mean" in row] == [1, 2]


def test_settings_that_were_set_and_do_not_fit_are_refused_in_one_line(on_a_gpu, monkeypatch, capsys):
    monkeypatch.setattr(LLMTrainer, "compile_train_step", lambda _: CompiledMemory("NVIDIA H200", LIMIT + 1, 0, 0, 0))
    assert main(["train", *TINY, "performance=manual"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs 1.00 GiB on a device with 1.00 GiB" in line
    assert "performance=auto" in line
