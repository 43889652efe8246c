"""Metrics report what their log modes say, on any sequence of steps and on any number of devices."""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tolerances import assert_close

from xlstm_jax.trainer.metrics import aggregate_metrics, get_metrics, reduce_step_metrics, update_metrics

pytestmark = pytest.mark.slow

ACCUMULATED = ["mean", "mean_nopostfix", "single", "max", "std"]
VALUES = st.integers(-6400, 6400).map(lambda x: x / 64)
STEPS = st.lists(st.tuples(VALUES, st.integers(0, 4)), min_size=1, max_size=6)


@functools.partial(jax.jit, static_argnames="modes")
def update(metrics, value, count, modes=tuple(ACCUMULATED)):
    return update_metrics(metrics, {"x": {"value": value, "count": count, "log_modes": modes}})


def report(steps, modes=tuple(ACCUMULATED), metrics=None):
    for value, count in steps:
        metrics = update(metrics, jnp.float32(value), jnp.int32(count), modes=modes)
    return get_metrics(metrics)[1]


def expected(steps):
    counted = [(value, count) for value, count in steps if count]
    ratios = [value / count for value, count in counted] or [0.0]
    mean = sum(value for value, _ in counted) / max(1, sum(count for _, count in counted))
    last_value, last_count = steps[-1]
    return {
        "x": mean,
        "x_mean": mean,
        "x_single": last_value / last_count if last_count else 0.0,
        "x_max": max(ratios),
        "x_std": float(np.std(ratios)),
    }


@given(STEPS)
@settings(deadline=None, max_examples=60)
def test_every_mode_reports_its_number_after_any_steps(steps):
    reported, wanted = report(steps), expected(steps)
    assert reported.keys() == wanted.keys()
    scale = max(1.0, *(abs(value) for value, _ in steps))
    for key, number in wanted.items():
        # Squares are summed in float32, so that a small deviation is lost beside a large mean.
        assert reported[key] == pytest.approx(number, rel=1e-5, abs=(2e-3 if key == "x_std" else 1e-5) * scale)


@given(STEPS, st.sampled_from([math.nan, math.inf, 3.0]), st.integers(0, 6))
@settings(deadline=None, max_examples=40)
def test_a_step_that_counts_nothing_changes_no_mean_max_or_deviation(steps, value, position):
    modes = ("mean", "max", "std")
    with_empty_step = [*steps[:position], (value, 0), *steps[position:]]
    assert report(with_empty_step, modes) == report(steps, modes)


@given(STEPS.filter(lambda steps: any(count for _, count in steps)), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_a_counted_nan_is_reported(steps, position):
    reported = report([*steps[:position], (math.nan, 1), *steps[position:]], ("mean", "max", "std"))
    assert all(map(math.isnan, reported.values()))


@given(st.lists(VALUES, min_size=1, max_size=6))
@settings(deadline=None, max_examples=40)
def test_a_reset_forgets_all_steps(values):
    metrics = update(None, 1000.0, 1)
    metrics, _ = get_metrics(metrics)
    assert all(not leaf.any() for leaf in jax.tree.leaves(metrics))
    steps = [(value, 2) for value in values]
    assert report(steps, metrics=metrics) == report(steps)


@given(VALUES, st.integers(1, 10))
@example(0.1, 7)  # E[x²] - E[x]² is below 0 in float32.
@settings(deadline=None, max_examples=40)
def test_a_constant_has_no_deviation(value, num_steps):
    deviation = report([(value, 1)] * num_steps, ("std",))["x_std"]
    assert 0 <= deviation <= 1e-3 * abs(value)
    assert num_steps > 1 or deviation == 0


def test_the_largest_of_negative_values_is_negative():
    assert report([(-6.0, 2), (-10.0, 2)], ("max",)) == {"x_max": -3.0}


def test_infinite_values_are_reported_without_numpy_warnings():
    reported = report([(math.inf, 1), (1.0, 1)], ("mean", "max", "std"))
    assert reported["x_mean"] == reported["x_max"] == math.inf
    assert math.isnan(reported["x_std"])


STEP_METRICS = {
    "python float": 1.5,
    "python int": 2,
    "float count": {"value": 1.0, "count": 2.5},
    "half": {"value": jnp.ones((), jnp.bfloat16), "count": jnp.ones((), jnp.float16)},
    "bool": {"value": jnp.ones((), bool), "count": jnp.ones((), bool)},
    "small": {"value": jnp.ones((), jnp.int8), "count": jnp.ones((), jnp.uint8)},
    "array": {"value": jnp.arange(3.0), "count": 1},
    "array of counts": {"value": jnp.arange(3), "count": jnp.arange(3)},
}
ALL_MODES = [*ACCUMULATED, "single_noreduce", "single_noreduce_wcount"]


def test_the_first_update_has_the_structure_and_dtypes_of_all_later_ones():
    first = jax.eval_shape(lambda: update_metrics(None, STEP_METRICS, ALL_MODES))
    later = jax.eval_shape(lambda metrics: update_metrics(metrics, STEP_METRICS, ALL_MODES), first)
    assert isinstance(first, FrozenDict)
    assert first == later
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(first))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(first)} == {"float32", "int32"}
    assert first["float count"]["single"]["count"].dtype == jnp.float32
    assert first["python float"]["single"]["count"].dtype == jnp.int32
    assert set(first["half"]["std"]) == {"value", "value2", "count"}


def test_means_over_more_tokens_than_integers_count_are_right():
    count = 4_194_304
    step = {"loss": {"value": 3 * count, "count": count}, "tokens": count}
    add = jax.jit(lambda metrics: update_metrics(metrics, step, ["mean"]))
    metrics = functools.reduce(lambda metrics, _: add(metrics), range(600), None)
    _, numbers = get_metrics(metrics)
    assert numbers == pytest.approx({"loss_mean": 3.0, "tokens_mean": count}, rel=1e-5)


MODES = ["mean", "mean_nopostfix", "single", "max", "std"]


def test_metrics_of_the_host_are_accumulated_in_float64():
    values, metrics = np.float64(1) + np.arange(1, 5) * 1e-12, None
    for value in values:
        metrics = update_metrics(metrics, {"x": {"value": value * 3, "count": 3, "log_modes": MODES}})
    _, numbers = get_metrics(metrics)
    expected = {"x_mean": values.mean(), "x": values.mean(), "x_single": values[-1], "x_max": values[-1]}
    for name, number in expected.items():
        assert numbers[name] == pytest.approx(number, rel=1e-15)
    assert metrics["x"]["std"]["value2"].dtype == np.float64
    zeros, _ = get_metrics(metrics, reset_metrics=True)
    assert zeros["x"]["mean"]["value"].dtype == np.float64


@pytest.mark.parametrize("host_first", [False, True])
def test_metrics_of_host_and_device_together_are_those_of_the_device(host_first):
    steps = [{"x": {"value": number, "log_modes": MODES}} for number in (jnp.float32(1), np.float64(3))]
    metrics = functools.reduce(update_metrics, steps[::-1] if host_first else steps, None)
    assert metrics["x"]["mean"]["value"].dtype == jnp.float32
    assert get_metrics(metrics)[1]["x_mean"] == 2
    assert get_metrics(metrics)[1]["x_std"] == 1


def test_a_traced_update_with_a_number_of_the_host_has_the_dtypes_of_the_device():
    update = jax.jit(lambda metrics: update_metrics(metrics, {"x": {"value": np.float64(2), "log_modes": MODES}}))
    first, second = update(None), update(update(None))
    assert jax.tree.map(lambda x: x.dtype, first) == jax.tree.map(lambda x: x.dtype, second)
    assert first["x"]["mean"]["value"].dtype == jnp.float32


def test_a_scan_over_steps_gives_what_a_loop_gives():
    values, counts = jnp.array([-1.0, 4.0, 2.0]), jnp.array([1, 0, 2])
    start = jax.tree.map(jnp.zeros_like, update(None, values[0], counts[0]))

    def step(metrics, inputs):
        return update(metrics, *inputs), None

    scanned, _ = jax.jit(lambda: jax.lax.scan(step, start, (values, counts)))()
    assert get_metrics(scanned)[1] == report(zip(values, counts, strict=True))


def test_values_of_narrow_types_are_summed_without_overflow():
    metrics = None
    for _ in range(3):
        metrics = update_metrics(metrics, {"x": {"value": jnp.int8(100), "count": jnp.bool_(1)}, "flag": jnp.bool_(1)})
    assert get_metrics(metrics)[1] == {"x": 100.0, "flag": 1.0}


def test_an_update_leaves_what_it_was_given_alone():
    before = update_metrics(None, {"a": 1.0, "b": 2.0})
    after = update_metrics(before, {"a": 5.0})
    assert get_metrics(before)[1] == {"a": 1.0, "b": 2.0}
    assert get_metrics(after)[1] == {"a": 3.0, "b": 2.0}
    mutable = {"a": {"max": {"value": jnp.float32(1), "count": jnp.int32(1)}}}
    update_metrics(mutable, {"a": 5.0, "b": 1.0}, ["max"])
    assert mutable == {"a": {"max": {"value": 1, "count": 1}}}


def test_own_log_modes_go_before_the_default_ones():
    step = {"a": 1.0, "b": {"value": 2.0}, "c": {"value": 3.0, "log_modes": ["max"]}, "d": {"value": 1.0, "count": 2}}
    assert get_metrics(update_metrics(None, step))[1] == {"a": 1.0, "b": 2.0, "c_max": 3.0, "d": 0.5}
    assert get_metrics(update_metrics(None, step, ["mean", "single"]))[1] == {
        "a_mean": 1.0,
        "a_single": 1.0,
        "b_mean": 2.0,
        "b_single": 2.0,
        "c_max": 3.0,
        "d_mean": 0.5,
        "d_single": 0.5,
    }


def test_no_metrics_give_no_results():
    assert update_metrics(None, {}) == FrozenDict()
    assert get_metrics(FrozenDict()) == (FrozenDict(), {})
    assert get_metrics({}) == (FrozenDict(), {})
    assert aggregate_metrics({}, FrozenDict()) == {}
    assert reduce_step_metrics({}, ()) == {}


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"value": 1.0, "log_modes": ["mean", "median"]}, "'loss' has the log mode 'median': .*mean_nopostfix, single"),
        ({"count": 1}, "'loss' has the keys .*value is needed"),
        ({"value": 1.0, "log_mode": ["max"]}, "'loss' has the keys .*log_mode"),
        ("low", "'loss' is 'low', but must be a number"),
        ({"value": None}, "'loss' is None, but must be a number"),
    ],
)
def test_a_metric_that_cannot_be_read_is_an_error_that_names_it(element, message):
    with pytest.raises(ValueError, match=message):
        update_metrics(None, {"loss": element})


@pytest.mark.parametrize("metrics", [None, [1.0]])
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_update_metrics_has_not_returned_is_refused(metrics):
    with pytest.raises(ValueError, match=r"global_metrics is .*, but must be what update_metrics has returned"):
        get_metrics(metrics)


def test_an_unknown_default_log_mode_is_an_error():
    with pytest.raises(ValueError, match="'median'"):
        update_metrics(None, {"loss": 1.0}, ["median"])


def test_a_metric_without_a_count_is_zero_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert report([(5.0, 0)]) == dict.fromkeys(["x", "x_mean", "x_single", "x_max", "x_std"], 0.0)
    assert len(caplog.records) == 5
    assert "x_std" in caplog.text


def test_values_that_are_not_reduced_come_back_as_they_are():
    value, count = jnp.array([1.0, 2.0]), jnp.array([3, 0])
    step = {"x": {"value": value, "count": count, "log_modes": ["single_noreduce", "single_noreduce_wcount"]}}
    reported = get_metrics(update_metrics(update_metrics(None, step), step))[1]
    np.testing.assert_array_equal(reported["x_single_noreduce"], [1.0, 2.0])
    np.testing.assert_array_equal(reported["x_single_noreduce_wcount"], [[1.0, 2.0], [3, 0]])
    assert isinstance(reported["x_single_noreduce_wcount"], tuple)


def test_arrays_are_accumulated_element_by_element():
    metrics = None
    for value, count in [([-2.0, 5.0, math.nan], [1, 0, 0]), ([4.0, -3.0, 7.0], [2, 1, 0])]:
        element = {"value": jnp.array(value), "count": jnp.array(count), "log_modes": ["mean", "max"]}
        metrics = update_metrics(metrics, {"x": element})
    reported = get_metrics(metrics)[1]
    assert_close(reported["x_mean"], np.array([2 / 3, -3.0, 0.0]))
    assert_close(reported["x_max"], np.array([2.0, -3.0, 0.0]))


def test_numbers_are_python_numbers_and_what_is_no_dictionary_passes_through():
    metrics = {"loss": update_metrics(None, {"loss": jnp.ones(1)})["loss"], "time": 3, "one": jnp.ones(1), "s": "text"}
    kept, reported = get_metrics(metrics)
    assert reported == {"loss": 1.0, "time": 3, "one": 1.0, "s": "text"}
    assert type(reported["loss"]) is type(reported["one"]) is float
    assert isinstance(kept, FrozenDict)


def test_metrics_stay_where_they_are_when_they_are_reset():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    metrics = jax.device_put(update_metrics(None, {"x": 1.0}), sharding)
    reset, _ = get_metrics(metrics)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(reset))
    kept, reported = get_metrics(metrics, reset_metrics=False)
    assert kept == metrics
    assert reported == {"x": 1.0}


def test_batches_are_collected_on_the_host():
    collected = {}
    metrics = None
    for batch in range(3):
        value, count = jnp.array([batch, 10.0 * batch]), jnp.array([1, batch])
        metrics = update_metrics(
            metrics,
            {
                "raw": {"value": value, "log_modes": ["single_noreduce"]},
                "pair": {"value": value, "count": count, "log_modes": ["single_noreduce_wcount"]},
                "scalar": {"value": float(batch), "log_modes": ["single_noreduce"]},
                "loss": {"value": float(batch), "log_modes": ["mean"]},
            },
        )
        collected = aggregate_metrics({**collected, "gone": {"mean": {}}}, metrics)
    assert set(collected) == {"raw", "pair", "scalar", "loss"}
    assert collected["raw"]["single_noreduce"]["count"] == 3
    reported = get_metrics(collected)[1]
    np.testing.assert_array_equal(reported["raw_single_noreduce"], [0, 0, 1, 10, 2, 20])
    np.testing.assert_array_equal(reported["pair_single_noreduce_wcount"], [[0, 0, 1, 10, 2, 20], [1, 0, 1, 1, 1, 2]])
    np.testing.assert_array_equal(reported["scalar_single_noreduce"], [0, 1, 2])
    assert reported["loss_mean"] == 1.0


AXES = ("dp", "fsdp", "tp")


def on_eight_devices(step_metrics_of_device, default_log_modes=None):
    """Report the metrics that eight devices return, each for its value and count."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def step(value, count):
        reduced = reduce_step_metrics(step_metrics_of_device(value[0], count[0]), AXES, default_log_modes)
        return update_metrics(None, reduced, default_log_modes)

    spec = PartitionSpec(AXES)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(lambda value, count: sharded(value, count))


@given(st.lists(st.tuples(VALUES, st.integers(0, 3)), min_size=8, max_size=8))
@settings(deadline=None, max_examples=30)
def test_devices_are_joined_by_sums_and_maxima_by_the_largest(pairs):
    values, counts = (np.array(column, dtype) for column, dtype in zip(zip(*pairs, strict=True), "fi", strict=True))
    reported = get_metrics(REDUCE(values, counts))[1]
    counted = counts > 0
    mean = values[counted].sum(dtype=np.float64) / max(1, counts.sum())
    largest = max((values / np.maximum(counts, 1))[counted], default=0.0)
    for key, number in {"x_mean": mean, "x_max": mean, "top_max": largest, "plain": values.mean()}.items():
        assert reported[key] == pytest.approx(number, rel=1e-5, abs=1e-4), key


REDUCE = on_eight_devices(
    lambda value, count: {
        "x": {"value": value, "count": count, "log_modes": ["mean", "max"]},
        "top": {"value": value, "count": count, "log_modes": ("max",)},
        "plain": value,
    }
)


def test_a_nan_on_one_device_is_the_maximum_of_all():
    values = np.array([1, 2, np.nan, 4, 5, 6, 7, 8], np.float32)
    assert math.isnan(get_metrics(REDUCE(values, np.ones(8, np.int32)))[1]["top_max"])
    uncounted = np.array([1, 1, 0, 1, 1, 1, 1, 1], np.int32)
    reported = get_metrics(REDUCE(values, uncounted))[1]
    assert reported["top_max"] == 8.0
    assert reported["x_mean"] == pytest.approx(33 / 7)


def test_a_maximum_that_no_device_counts_is_zero_of_nothing():
    def step(value):
        return reduce_step_metrics({"x": {"value": value, "count": 0, "log_modes": ["max"]}}, "dp")["x"]["value"]

    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("dp")
    largest = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False))(jnp.ones(8))
    assert largest.tolist() == [0.0] * 8


def test_the_default_log_modes_decide_for_metrics_that_name_none():
    values = np.arange(8, dtype=np.float32) - 10
    reduce_default_max = on_eight_devices(lambda value, count: {"x": value}, default_log_modes=["max"])
    assert get_metrics(reduce_default_max(values, np.ones(8, np.int32)))[1] == {"x_max": -3.0}


def test_values_that_are_not_reduced_are_summed_over_devices_whatever_their_count():
    reduce_raw = on_eight_devices(
        lambda value, count: {"x": {"value": value * jnp.ones(2), "count": count, "log_modes": ["single_noreduce"]}}
    )
    reported = get_metrics(reduce_raw(np.ones(8, np.float32), np.zeros(8, np.int32)))[1]
    np.testing.assert_array_equal(reported["x_single_noreduce"], [8.0, 8.0])
