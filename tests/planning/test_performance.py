"""Settings are chosen by estimates whose order is that of measured steps, within the memory of a device."""

import dataclasses

import pytest
from planning.setups import LLAMA, SHAPE, make_setup
from planning.test_footprint import GIB, H200, measured_setup

from xlstm_jax.planning.footprint import state_bytes
from xlstm_jax.planning.performance import SETTINGS, fitting, largest_batch, rank

pytestmark = pytest.mark.slow

MEASURED = {  # model: (remat, scanned, kept logits) and tokens/s of benchmarks/train_step.py on one H200
    "162m": {
        ("none", False, True): 630_000,
        ("dots", True, True): 567_000,
        ("full", False, True): 545_000,
        ("full", True, False): 522_000,
        ("none", True, True): 506_000,
    },
    "1.4b": {("norms", False, True): 74_700, ("dots", True, True): 70_200, ("full", True, True): 62_200},
}
ROWS = {"162m": 16, "1.4b": 8}
LONG, SHORT = 50_000, 100


@pytest.fixture(scope="module")
def states():
    return {model: state_bytes(measured_setup(model, 8, "full", True, False)) for model in MEASURED}


def ranked(model, states, **options):
    setup = measured_setup(model, ROWS[model], "none", True, False)
    return rank(setup, H200, state=states[model], **options)


def of(choice):
    return choice.remat, choice.scan_blocks, choice.keep_logits


@pytest.mark.parametrize("model", MEASURED)
def test_estimated_times_have_the_order_of_measured_ones(model, states):
    given = {"gradient_accumulate_steps": 1, "loss_chunk_size": 8192, "gradient_accumulate_scan": False}
    setup = measured_setup(model, ROWS[model], "none", True, False)
    slower = {}
    for remat, scans, keeps in MEASURED[model]:
        fixed = given | {"remat": remat, "scan_blocks": scans, "keep_logits": keeps}
        (only,) = rank(setup, H200, state=states[model], given=fixed)
        slower[remat, scans, keeps] = only.seconds
    if model == "162m":  # "full" that recomputes all and "none" that stacks all are close to each other
        del slower["full", True, False]
    assert list(slower.values()) == sorted(slower.values())


@pytest.mark.parametrize(
    ("model", "limit", "expected"),
    [
        ("162m", 128, ("none", False, True)),
        ("1.4b", 128, ("norms", False, True)),
        ("1.4b", 40, ("full", False, True)),
    ],
)
def test_a_long_run_takes_the_fastest_settings_that_fit(model, limit, expected, states):
    best = fitting(ranked(model, states, num_steps=LONG, given={"gradient_accumulate_steps": 1}), limit * GIB)[0]
    assert of(best) == expected


def test_a_short_run_does_not_wait_for_unrolled_blocks_to_compile(states):
    assert ranked("162m", states, num_steps=SHORT)[0].scan_blocks
    assert not ranked("162m", states, num_steps=LONG)[0].scan_blocks


def test_a_batch_that_is_too_large_is_cut_into_minibatches(states):
    setup = dataclasses.replace(measured_setup("162m", 16, "none", True, False), batch_size=256)
    best = fitting(rank(setup, H200, num_steps=LONG, state=states["162m"]), 128 * GIB)[0]
    assert best.gradient_accumulate_steps > 1
    assert best.gradient_accumulate_scan
    assert 256 % best.gradient_accumulate_steps == 0


def test_minibatches_divide_the_rows_of_every_stage_of_a_ramp(states):
    setup = dataclasses.replace(measured_setup("162m", 16, "none", True, False), batch_size=256)
    choices = rank(setup, H200, state=states["162m"], row_counts=[12, 256])
    assert {choice.gradient_accumulate_steps for choice in choices} == {1, 2, 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remat", "offload"),
        ("keep_logits", False),
        ("loss_chunk_size", 77),
        ("scan_blocks", True),
        ("gradient_accumulate_steps", 4),
        ("gradient_accumulate_scan", False),
    ],
)
@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["xlstm", "llama"])
def test_what_is_given_is_never_changed(name, value, shape):
    choices = rank(make_setup(shape=shape), H200, given={name: value})
    assert {getattr(choice, name) for choice in choices} == {value}


def test_no_choice_changes_what_is_computed():
    setup = make_setup()
    fields = {field.name for field in dataclasses.fields(setup.shape)} | {
        field.name for field in dataclasses.fields(setup.trainer)
    }
    assert set(SETTINGS) <= fields
    assert not [name for name in SETTINGS if "dtype" in name or "float8" in name or "batch_size" in name]


def test_a_choice_is_within_the_usable_memory(states):
    for choice in fitting(ranked("1.4b", states), 60 * GIB):
        assert choice.memory < 60 * GIB


def test_the_largest_batch_that_fits_is_found():
    setup = dataclasses.replace(measured_setup("1.4b", 8, "none", True, False), batch_size=512)
    given = {"gradient_accumulate_steps": 1}
    rows = largest_batch(setup, H200, 128 * GIB, given)
    assert rows is not None

    def fits(batch_size):
        return bool(fitting(rank(dataclasses.replace(setup, batch_size=batch_size), H200, given=given), 128 * GIB))

    assert fits(rows)
    assert not fits(rows + 1)


def test_no_batch_fits_where_the_state_does_not():
    setup = measured_setup("1.4b", 8, "none", True, False)
    assert largest_batch(setup, H200, 10 * GIB, {}) is None
