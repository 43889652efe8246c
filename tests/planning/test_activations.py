"""What the forward pass keeps is what remat says."""

import dataclasses

import pytest
from planning.setups import LLAMA, SHAPE, make_setup

from xlstm_jax.models.blocks.activations import Placement
from xlstm_jax.models.memory import activation_memory
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.activations import kept_activations
from xlstm_jax.planning.compiled import compile_here
from xlstm_jax.planning.plan import make_plan

pytestmark = pytest.mark.slow


def kept(**options):
    return kept_activations(AbstractTrainer.from_setup(make_setup(**options)))


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_block_that_is_computed_again_keeps_its_input_in_the_precision_of_the_model(dtype, itemsize):
    shape = dataclasses.replace(LLAMA, dtype=dtype)
    few, many = (kept(shape=dataclasses.replace(shape, num_blocks=n), remat="full") for n in (4, 12))
    assert many - few == 8 * 16 * 24 * 32 * itemsize


@pytest.mark.parametrize("shape", [SHAPE, LLAMA])
def test_the_more_is_computed_again_the_less_is_kept(shape):
    full, dots, norms, none = (kept(shape=shape, remat=remat) for remat in ("full", "dots", "norms", "none"))
    assert full < dots < norms < none


def test_a_post_norm_keeps_the_results_of_its_layer_as_the_formula_says():
    shapes = [dataclasses.replace(SHAPE, post_norm=post_norm) for post_norm in (False, True)]
    without, with_norms = (kept(shape=shape, remat="dots") for shape in shapes)
    placement = Placement(num_tokens=16 * 24, sequence_length=24)
    saved = [activation_memory(dataclasses.replace(shape, remat="dots"), placement).saved for shape in shapes]
    assert with_norms - without == saved[1] - saved[0]


def test_parameters_that_stay_as_they_are_do_not_count():
    shape = dataclasses.replace(LLAMA, ffn_dim=4096)
    assert kept(shape=shape, remat="full", rows=1, length=2) < 32 * 4096 * 4


def test_minibatches_keep_their_part():
    whole, half = (kept(remat="full", accumulation=n) for n in (1, 2))
    assert half < 0.7 * whole


def test_logits_are_kept_in_two_bytes_where_their_products_have_two():
    shape = dataclasses.replace(SHAPE, head_dtype="bfloat16")
    without, with_logits = (kept(shape=dataclasses.replace(shape, keep_logits=keep), tp=2) for keep in (False, True))
    assert with_logits - without == 16 * 24 * (32 * 2 + 4)  # and one reference for all logits of a token


def test_every_device_keeps_the_activations_of_its_rows():
    assert kept(remat="dots", dp=4, rows=16) == kept(remat="dots", rows=4)


@pytest.mark.parametrize(("shape", "remat", "factor"), [(SHAPE, "none", 1.1), (LLAMA, "dots", 1.4), (LLAMA, "full", 3)])
def test_in_float32_the_compiled_step_needs_what_was_traced_and_what_a_block_works_with(shape, remat, factor):
    deep = dataclasses.replace(shape, embedding_dim=64, num_blocks=16, ffn_dim=128)
    setup = make_setup(shape=deep, remat=remat, rows=16, length=64)
    traced = make_plan(setup, "cpu", compiles=False).traced_temporaries
    assert 1 < compile_here(setup).temporaries / traced < factor
