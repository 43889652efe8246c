"""The formula for memory agrees with steps that were measured on an H200."""

import dataclasses

import jax
import pytest
from planning.setups import make_setup

from xlstm_jax.models.llama import LlamaConfig
from xlstm_jax.models.xlstm import XLSTMConfig
from xlstm_jax.planning.footprint import state_bytes, step_memory
from xlstm_jax.utils.accelerators import find_accelerator

GIB = 2**30
H200 = find_accelerator("h200")
SHAPES = {
    "162m": {"embedding_dim": 768, "num_heads": 6, "num_blocks": 12, "ffn_dim": 2048},
    "1.4b": {"embedding_dim": 2048, "num_heads": 4, "num_blocks": 24},
}
MEASURED = [  # model, rows of 8192 tokens, remat, scanned, kept logits, GiB
    ("162m", 16, "none", False, True, 55),
    ("162m", 16, "none", False, False, 44),
    ("162m", 8, "none", False, False, 23),
    ("162m", 16, "full", True, False, 9.0),
    ("162m", 16, "dots", True, True, 42),
    ("162m", 16, "none", True, True, 75),
    ("162m", 16, "full", False, True, 18),
    ("1.4b", 8, "dots", False, True, 100),
    ("1.4b", 8, "norms", False, True, 123),
    ("1.4b", 8, "dots", False, False, 95),
    ("1.4b", 6, "none", False, True, 107),
    ("1.4b", 4, "none", False, False, 75),
    ("1.4b", 8, "full", True, False, 33),
    ("1.4b", 8, "full", True, True, 33),
    ("1.4b", 8, "dots", True, True, 99),
]
"""The peaks of `benchmarks/train_step.py` on one H200, jax 0.11.2."""


def measured_setup(model, rows, remat, scanned, kept):
    shape = XLSTMConfig(
        vocab_size=50304,
        dtype="bfloat16",
        head_dtype="bfloat16",
        loss_chunk_size=8192,
        keep_logits=kept,
        scan_blocks=scanned,
        **SHAPES[model],
    )
    return make_setup(shape=shape, remat=remat, rows=rows, length=8192)


@pytest.fixture(scope="module")
def states():
    return {model: state_bytes(measured_setup(model, 8, "full", True, False)) for model in SHAPES}


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, row)))
def test_the_formula_is_within_five_percent_of_what_was_measured(row, states):
    *run, gib = row
    assert step_memory(measured_setup(*run), H200, states[run[0]]) / GIB == pytest.approx(gib, rel=0.05)


def test_the_state_does_not_depend_on_remat_and_scan(states):
    assert state_bytes(measured_setup("162m", 8, "none", False, True)) == states["162m"]


@pytest.mark.parametrize("change", [{"fsdp": 4, "dp": 1}, {"dp": 1, "tp": 4}])
def test_sharded_parameters_take_less_memory_on_a_device(change):
    shape = XLSTMConfig(vocab_size=512, embedding_dim=256, num_heads=4, num_blocks=2, dtype="bfloat16")
    whole = make_setup(dp=4, shape=shape, rows=4, length=64, remat="full")
    assert step_memory(make_setup(shape=shape, rows=4, length=64, remat="full", **change), H200) < step_memory(
        whole, H200
    )


def test_minibatches_save_the_memory_of_activations_and_hold_a_sum_of_gradients(states):
    whole = measured_setup("162m", 16, "dots", True, True)
    half = dataclasses.replace(whole, trainer=dataclasses.replace(whole.trainer, gradient_accumulate_steps=2))
    of_eight = step_memory(measured_setup("162m", 8, "dots", True, True), H200, states["162m"])
    assert step_memory(half, H200, states["162m"]) == of_eight + states["162m"].parameters


def test_the_cell_in_plain_jax_needs_more_than_the_kernels(states):
    setup = measured_setup("162m", 16, "full", True, False)
    a100 = find_accelerator("a100-80")
    assert step_memory(setup, a100, states["162m"]) > step_memory(setup, H200, states["162m"])


@pytest.mark.parametrize(("version", "backend", "is_more"), [((0, 10), "gpu", True), ((0, 10), "cpu", False)])
def test_a_run_with_a_jax_without_the_kernels_needs_what_plain_jax_needs(
    states, monkeypatch, version, backend, is_more
):
    setup = measured_setup("162m", 16, "full", True, False)
    with_kernels = step_memory(setup, H200, states["162m"])
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert (step_memory(setup, H200, states["162m"]) > with_kernels) == is_more


MASK, SLOTS, KERNELS = 2 * 4 * 8192**2, 4 * 8192 * 4 * 16 * (64 + 2), 0


@pytest.mark.parametrize(
    ("accelerator", "backend", "expected"),
    [("h200", "auto", KERNELS), ("h200", "cudnn", SLOTS), ("b200", "auto", SLOTS), ("a100-80", "auto", MASK)],
)
def test_documents_cost_a_mask_or_slots_where_there_are_no_kernels(accelerator, backend, expected):
    shape = LlamaConfig(vocab_size=128, embedding_dim=64, num_blocks=2, head_dim=64, dtype="bfloat16")
    state = state_bytes(make_setup(shape=shape))

    def memory(documents):
        options = {"attention_backend": backend, "mask_across_document_boundaries": documents}
        setup = make_setup(shape=dataclasses.replace(shape, **options), remat="full", rows=4, length=8192)
        return step_memory(setup, find_accelerator(accelerator), state)

    assert memory(True) - memory(False) == pytest.approx(expected, abs=0.1 * SLOTS)
