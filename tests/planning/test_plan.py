"""A plan is plain values, and reads well."""

import dataclasses
import io
import json

import pytest
from planning.setups import LLAMA, make_setup
from rich.console import Console

from xlstm_jax.configs import ConfigError
from xlstm_jax.models.cost import model_cost
from xlstm_jax.planning.compiled import CompiledMemory
from xlstm_jax.planning.footprint import step_memory
from xlstm_jax.planning.plan import make_plan
from xlstm_jax.planning.tables import render
from xlstm_jax.trainer.base.run_metrics import mfu_flops
from xlstm_jax.utils.accelerators import find_accelerator


@pytest.fixture(scope="module")
def plan():
    return make_plan(make_setup(dp=2, fsdp=4, rows=16, accumulation=2), "h100", compiles=False, num_steps=1000)


def text_of(renderable, width):
    output = io.StringIO()
    Console(file=output, width=width).print(renderable)
    return output.getvalue()


def test_json_holds_a_plan(plan):
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["memory"] == plan.memory
    assert values["parameters"][0]["name"] == "block_stack.block.ffn.down.kernel"
    assert values["num_parameters"] == model_cost(make_setup().shape, sequence_length=2).parameters


def test_the_time_of_a_run_is_that_of_its_steps(plan):
    assert plan.seconds == 1000 * plan.time.total
    assert plan.tokens_per_second == 16 * 24 / plan.time.total


def test_a_plan_estimates_utilisation_as_runs_log_it(plan):
    rate = plan.tokens_per_second / plan.num_devices / plan.accelerator.bfloat16_flops
    flops = mfu_flops(make_setup().shape, 24)
    assert {"mfu": plan.mfu, "mfu_6n": plan.mfu_6n} == pytest.approx({name: rate * flops[name] for name in flops})


def test_memory_of_an_accelerator_is_that_of_the_formula(plan):
    setup = make_setup(dp=2, fsdp=4, rows=16, accumulation=2)
    assert plan.memory == step_memory(setup, find_accelerator("h100"))
    assert "estimated by formula" in text_of(render(plan), 100)


def test_activations_are_those_that_the_accelerator_saves_and_not_those_traced_on_this_machine():
    shape = dataclasses.replace(LLAMA, dtype="bfloat16", head_dim=64, embedding_dim=64)
    setup = make_setup(shape=shape, rows=1, length=1024)
    weights = shape.num_blocks * 1024**2 * 2  # of all pairs of positions, which plain attention saves
    h100 = make_plan(setup, "h100", compiles=False)
    assert h100.activations < weights < make_plan(setup, "cpu", compiles=False).activations


def test_without_a_formula_or_a_compilation_memory_is_a_lower_bound(plan):
    plan = dataclasses.replace(plan, estimated=None)
    parts = plan.persistent.total + 2 * plan.gradients + plan.activations + 2 * plan.logits
    assert plan.memory == parts
    assert "at least" in text_of(render(plan), 100)


def test_the_memory_of_a_step_that_was_compiled_for_the_device_counts(plan):
    compiled = dataclasses.replace(plan, compiled=CompiledMemory("NVIDIA H100", 10, 20, 30, 40))
    assert compiled.memory == 100
    assert "as compiled for NVIDIA H100" in text_of(render(compiled), 100)


def test_what_was_compiled_for_a_cpu_is_not_taken_for_an_accelerator(plan):
    memory = CompiledMemory("cpu", 10, 20, 30, 40)
    assert dataclasses.replace(plan, compiled=memory).memory == plan.estimated
    assert dataclasses.replace(plan, compiled=memory, estimated=None).memory == 100


@pytest.mark.parametrize("width", [80, 100])
def test_a_plan_fits_the_screen_without_cutting_numbers(plan, width):
    text = text_of(render(plan, sharding=True), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "1,000 steps" in text
    assert "token_embedding" in text


def test_parameters_are_listed_only_if_asked_for(plan):
    assert "token_embedding" not in text_of(render(plan), 100)


def test_a_mesh_that_does_not_fit_the_devices_is_refused():
    with pytest.raises(ConfigError, match=r"Impossible mesh dp=3, .* for 4 devices"):
        dataclasses.replace(make_setup(dp=3, rows=12), num_devices=4)


def test_minibatches_that_do_not_divide_the_rows_are_refused():
    with pytest.raises(ConfigError, match="does not divide the 2 rows"):
        make_setup(dp=4, rows=8, accumulation=3)
