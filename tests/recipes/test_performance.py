"""`performance: auto` resolves to plain values for pretended devices, keeps them, and never changes what was set."""

import dataclasses
import functools
import json
import types

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.planning import performance as planning
from xlstm_jax.planning.footprint import state_bytes, step_memory
from xlstm_jax.planning.performance import SETTINGS, USABLE_SHARE
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.performance import (
    PERFORMANCE_FILE,
    Devices,
    given_settings,
    reject,
    resolve_performance,
    usable_memory,
)
from xlstm_jax.recipes.run_config import build_run
from xlstm_jax.trainer.base.compiled_step import StepDoesNotFitError

pytestmark = pytest.mark.slow

GIB = 2**30
RUN = (
    "model=xlstm_160m",
    "data=synthetic",
    "model.vocab_size=50304",
    "batch_size=256",
    "context_length=8192",
    "num_train_steps=50000",
)


def h200(gib=130, **axes):
    sizes = {"dp": 1, "fsdp": 1, "pp": 1, "tp": 1} | axes
    return Devices("gpu", "NVIDIA H200", sizes, gib * GIB)


@pytest.fixture(autouse=True, scope="module")
def _state_is_traced_once():
    """The state is the same in all runs of this file, but for the mesh and the batch."""
    traced = {}

    def once(setup):
        key = json.dumps([setup.axis_sizes, setup.batch_size])
        if key not in traced:
            traced[key] = state_bytes(setup)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "state_bytes", once)
        yield


@functools.cache
def settings_of(*overrides):
    return compose([*RUN, *overrides])


def resolve(*overrides, devices=None, folder=None):
    settings = settings_of(*overrides)
    return resolve_performance(build_run(settings), settings, devices or h200(), folder)


def test_what_is_chosen_is_all_that_is_not_set():
    assert set(resolve("batch_size=16").settings) == set(SETTINGS)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("model.remat=dots", "remat", "dots"),
        ("model.keep_logits=false", "keep_logits", False),
        ("model.loss_chunk_size=512", "loss_chunk_size", 512),
        ("model.scan_blocks=true", "scan_blocks", True),
        ("trainer.gradient_accumulate_steps=4", "gradient_accumulate_steps", 4),
    ],
)
def test_what_is_set_stays_as_it_is(override, name, value):
    settings = settings_of("batch_size=16", override)
    config = build_run(settings)
    performance = resolve_performance(config, settings, h200(), None)
    applied = performance.apply(config)
    assert name not in performance.settings
    owner = applied.trainer if name.startswith("gradient") else applied.model.model_config
    assert getattr(owner, name) == value


def test_modules_that_are_recomputed_by_name_count_as_set():
    settings = settings_of("batch_size=16", "parallel.remat=[Block]")
    assert given_settings(settings, build_run(settings))["remat"] == "none"


def test_a_resolved_config_differs_in_nothing_but_the_chosen_settings():
    config = build_run(settings_of("batch_size=16"))
    performance = resolve_performance(config, settings_of("batch_size=16"), h200(), None)
    applied = performance.apply(config)
    shape = dataclasses.replace(
        applied.model.model_config,
        **{name: getattr(config.model.model_config, name) for name in SETTINGS if not name.startswith("gradient")},
    )
    trainer = dataclasses.replace(
        applied.trainer,
        **{name: getattr(config.trainer, name) for name in SETTINGS if name.startswith("gradient")},
    )
    assert shape == config.model.model_config
    assert trainer == config.trainer
    assert applied.batch_size == config.batch_size


@pytest.mark.parametrize("gib", [130, 20])
def test_the_chosen_step_fits_into_the_memory(gib):
    config, devices = build_run(settings_of()), h200(gib)
    performance = resolve_performance(config, settings_of(), devices, None)
    setup = performance.apply(config).setup(1)
    assert step_memory(setup, devices.accelerator) == pytest.approx(performance.estimate, rel=1e-9)
    assert performance.estimate <= USABLE_SHARE * gib * GIB


def test_less_memory_never_means_fewer_minibatches():
    counts = [resolve(devices=h200(gib)).settings["gradient_accumulate_steps"] for gib in (130, 40, 12)]
    assert counts == sorted(counts)
    assert counts[0] > 1  # 256 rows of 8192 tokens do not fit at once


def test_the_rows_of_a_device_are_what_is_divided():
    whole, part = resolve(), resolve(devices=h200(dp=8))
    assert part.settings["gradient_accumulate_steps"] < whole.settings["gradient_accumulate_steps"]


@pytest.mark.parametrize(
    ("experiment", "rows", "gib"),
    [
        ("xlstm_160m", 16, 55.76),
        ("xlstm_160m", 256, 108.91),
        ("xlstm_400m", 16, 125.67),
        ("xlstm_1_4b", 8, 119.69),
        ("llama_160m", 16, 52.12),
        ("llama_1_4b", 8, 121.49),
    ],
)
def test_the_estimate_of_a_recipe_is_near_the_peak_that_was_measured(experiment, rows, gib):
    """The peaks of runs as shipped on one H200, jax 0.11.2: the settings are those that were chosen there."""
    settings = compose([f"experiment={experiment}", "data=synthetic", f"batch_size={rows}"])
    devices = h200()._replace(memory_limit=142606336000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "state_bytes", state_bytes)
        performance = resolve_performance(build_run(settings), settings, devices, None)
    assert performance.estimate / GIB == pytest.approx(gib, rel=0.05)


def test_manual_takes_all_settings_as_they_are():
    performance = resolve("performance=manual")
    assert performance.settings == {}
    assert "manual" in performance.reason


def test_a_cpu_keeps_the_defaults():
    cpu = Devices("cpu", "cpu", h200().axis_sizes, None)
    assert resolve(devices=cpu).settings == {}


@pytest.mark.parametrize(
    ("kind", "statistics", "limit"),
    [
        ("NVIDIA H200", {"bytes_limit": 100}, 100),
        ("NVIDIA H200", None, int(0.9 * 141e9)),
        ("NVIDIA Future", None, None),
        ("cpu", None, None),
    ],
)
def test_the_memory_is_what_the_device_reports_or_most_of_what_it_has(kind, statistics, limit):
    device = types.SimpleNamespace(device_kind=kind, memory_stats=lambda: statistics)
    assert usable_memory(device) == limit


def test_a_device_that_is_in_no_table_gets_a_choice_too():
    assert resolve("batch_size=16", devices=h200()._replace(kind="NVIDIA Future")).settings


def test_a_choice_is_kept_with_the_run_and_taken_again(tmp_path, monkeypatch):
    first = resolve("batch_size=16", folder=tmp_path)
    monkeypatch.setattr("xlstm_jax.recipes.performance._best", None)  # nothing is ranked again
    assert resolve("batch_size=16", folder=tmp_path) == first
    assert json.loads((tmp_path / PERFORMANCE_FILE).read_text())["settings"] == first.settings


def test_a_longer_run_keeps_its_choice(tmp_path):
    first = resolve("batch_size=16", "num_train_steps=1000", folder=tmp_path)
    assert resolve("batch_size=16", "num_train_steps=50000", folder=tmp_path) == first


@pytest.mark.parametrize("devices", [h200(dp=2), h200()._replace(kind="NVIDIA H100 80GB HBM3")])
def test_another_device_or_mesh_is_chosen_for_anew(devices, tmp_path):
    resolve("batch_size=16", folder=tmp_path)
    made_for = json.loads((tmp_path / PERFORMANCE_FILE).read_text())["made_for"]
    resolve("batch_size=16", devices=devices, folder=tmp_path)
    assert json.loads((tmp_path / PERFORMANCE_FILE).read_text())["made_for"] != made_for


@pytest.mark.parametrize("change", ["model.dtype=float32", "model.mlstm_backend=chunkwise"])
def test_a_model_that_is_changed_at_a_resume_is_chosen_for_anew(change, tmp_path):
    first = resolve("batch_size=16", folder=tmp_path)
    changed = resolve("batch_size=16", change, folder=tmp_path)
    assert changed.estimate != first.estimate
    assert changed == resolve("batch_size=16", change)


def test_a_choice_that_was_kept_without_its_model_is_taken_again(tmp_path):
    first = resolve("batch_size=16", folder=tmp_path)
    kept = json.loads((tmp_path / PERFORMANCE_FILE).read_text())
    del kept["made_for"]["model"]
    (tmp_path / PERFORMANCE_FILE).write_text(json.dumps(kept | {"reason": "kept"}))
    assert resolve("batch_size=16", folder=tmp_path) == dataclasses.replace(first, reason="kept")


def test_a_setting_that_is_changed_at_a_resume_is_respected(tmp_path):
    resolve("batch_size=16", folder=tmp_path)
    assert "remat" not in resolve("batch_size=16", "model.remat=full", folder=tmp_path).settings


def test_a_damaged_choice_is_made_again(tmp_path, caplog):
    first = resolve("batch_size=16", folder=tmp_path)
    (tmp_path / PERFORMANCE_FILE).write_text('{"made_for": ')
    assert resolve("batch_size=16", folder=tmp_path) == first
    assert "damaged" in caplog.text


def test_a_choice_that_did_not_fit_is_followed_by_a_smaller_one(tmp_path, caplog):
    first = resolve("batch_size=16", folder=tmp_path)
    reject(tmp_path, first, StepDoesNotFitError(int(1.1 * first.memory_limit), first.memory_limit))
    second = resolve("batch_size=16", folder=tmp_path)
    assert second.settings != first.settings
    assert second.estimate < first.estimate
    assert "did not fit" in caplog.text


def test_after_a_step_ran_out_of_memory_estimates_count_as_a_tenth_too_low(tmp_path):
    first = resolve("batch_size=16", folder=tmp_path)
    reject(tmp_path, first, StepDoesNotFitError(None, first.memory_limit))
    second = resolve("batch_size=16", folder=tmp_path)
    excess = 1.1 * max(first.estimate, first.memory_limit) / first.estimate
    assert excess * second.estimate <= first.memory_limit


def test_choices_that_run_out_of_memory_end_with_an_error(tmp_path):
    def try_all():
        for _ in range(50):
            performance = resolve("batch_size=16", folder=tmp_path)
            reject(tmp_path, performance, StepDoesNotFitError(None, performance.memory_limit))

    first = resolve("batch_size=16", folder=tmp_path)
    with pytest.raises(ConfigError, match="does not fit"):
        try_all()
    assert resolve("batch_size=16", folder=tmp_path) == first, "Another start has to try all choices again."


def test_a_batch_that_cannot_fit_is_refused_with_the_batch_size_that_would():
    with pytest.raises(ConfigError) as caught:
        resolve("batch_size=256", "trainer.gradient_accumulate_steps=1", devices=h200(60))
    (line,) = str(caught.value).splitlines()
    rows = int(line.split("batch_size=")[-1].split()[0])
    assert "does not fit with gradient_accumulate_steps=1 as set" in line
    assert 1 < rows < 256
    assert resolve(f"batch_size={rows}", "trainer.gradient_accumulate_steps=1", devices=h200(60)).settings


def test_a_model_that_is_too_large_for_any_batch_says_what_to_do():
    with pytest.raises(ConfigError, match=r"No batch size fits: .*parallel=fsdp"):
        resolve("batch_size=16", devices=h200(2))


def test_nothing_is_chosen_for_a_model_whose_memory_is_not_known():
    config = build_run(settings_of("batch_size=16"))
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, model_config=None))
    assert resolve_performance(other, settings_of("batch_size=16"), h200(), None).settings == {}
