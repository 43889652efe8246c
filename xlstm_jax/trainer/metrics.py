"""Metrics: sums and counts on the device, final values on the host.

A step returns `{name: scalar}` or `{name: {"value": ..., "count": ..., "log_modes": [...]}}`, where the value is a sum
over `count` items (1 if not given). The accumulated metrics are `{name: {mode: {"value": ..., "count": ...}}}`. A count
of 0 means that there is no value yet, so setting every leaf to zero resets all metrics. The modes report

- `mean`, `mean_nopostfix`: the sum of all values over the sum of all counts;
- `single`: value over count of the last step;
- `max`: the maximum over steps of value over count;
- `std`: the standard deviation over steps of value over count; `value2` sums the squares;
- `single_noreduce`, `single_noreduce_wcount`: the unreduced value of the last step, without or with its count.

A step whose count is 0 does not contribute to `mean`, `max` and `std`, whatever its value. A NaN with a count is
reported.

Metrics on the device are summed in float32, those on the host, which are NumPy float64 values, in float64.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict, freeze, unfreeze
from jax import lax

from xlstm_jax.common_types import ImmutableMetrics, LogMode, Metrics, StepMetrics

LOGGER = logging.getLogger(__name__)

DEFAULT_LOG_MODES = ("mean_nopostfix",)
NUMBERS = (np.ndarray, np.generic, int, float)
Number = jax.Array | np.ndarray
Sums = dict[str, Any]


def update_metrics(
    global_metrics: Metrics | None,
    step_metrics: StepMetrics | Mapping[str, Any],
    default_log_modes: Sequence[str] | None = None,
) -> ImmutableMetrics:
    """Add the metrics of a step to the accumulated ones; can be jitted and scanned.

    Args:
        global_metrics: The metrics so far, `None` if there are none. They are not modified.
        step_metrics: The metrics of the step.
        default_log_modes: The modes of metrics without `log_modes`; `["mean_nopostfix"]` if not given.

    Returns:
        The accumulated metrics. Those that the step does not have are unchanged.
    """
    metrics = {} if global_metrics is None else unfreeze(global_metrics)
    for name, element in step_metrics.items():
        value, count, log_modes = _parse_step_element(name, element, default_log_modes)
        accumulated = metrics.setdefault(name, {})
        with np.errstate(invalid="ignore", over="ignore"):
            for mode in log_modes:
                accumulated[mode] = _accumulate(mode, accumulated.get(mode), _to_sums(mode, value, count))
    return freeze(metrics)


def reduce_step_metrics(
    step_metrics: StepMetrics | Mapping[str, Any],
    axis_names: str | Sequence[str],
    default_log_modes: Sequence[str] | None = None,
) -> StepMetrics:
    """Reduce the step metrics over all devices, inside `jax.shard_map`.

    Values and counts are summed over the devices. A metric whose only mode is `max` is a maximum already: the result is
    the maximum over devices of value over count, with count 1. A metric with `max` and other modes is a sum like any
    other, and its `max` is the maximum over steps of the mean over all devices.

    Args:
        step_metrics: The metrics of this device.
        axis_names: The mesh axes to reduce over.
        default_log_modes: The modes of metrics without `log_modes`, as for `update_metrics`.

    Returns:
        The metrics of the global step, replicated; the log modes are passed through.
    """
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    reduced = {}
    for name, element in step_metrics.items():
        value, count, log_modes = _parse_step_element(name, element, default_log_modes)
        value, count = _to_array(value), _to_count(count)
        if set(log_modes) == {"max"}:
            value, count = _largest_over_devices(value, count, axes)
        else:
            counted = value if any("noreduce" in mode for mode in log_modes) else jnp.where(count != 0, value, 0)
            value, count = lax.psum((counted, count), axes)
        modes = {"log_modes": element["log_modes"]} if isinstance(element, Mapping) and "log_modes" in element else {}
        reduced[name] = {"value": value, "count": count, **modes}
    return reduced


def get_metrics(
    global_metrics: Metrics | dict[str, Any], reset_metrics: bool = True, *, keep_empty: bool = True
) -> tuple[ImmutableMetrics, dict[str, Any]]:
    """Fetch accumulated metrics to the host, and compute the values to log.

    Args:
        global_metrics: The accumulated metrics.
        reset_metrics: Whether to reset the metrics afterwards.
        keep_empty: Whether a metric whose count is 0 is reported as 0, with a warning; otherwise it is left out.

    Returns:
        The metrics to continue accumulating with, and the values under `<name>_<mode>`, or under `<name>` for
        `mean_nopostfix`. Entries that are not dictionaries of modes are passed through.
    """
    if not isinstance(global_metrics, Mapping):
        raise ValueError(f"global_metrics is {global_metrics!r}, but must be what update_metrics has returned.")
    host_metrics = {}
    for name, modes in jax.device_get(unfreeze(global_metrics)).items():
        if not isinstance(modes, Mapping):
            host_metrics[name] = _to_python(modes)
            continue
        for mode, sums in modes.items():
            if not keep_empty and not np.any(sums["count"]):
                continue
            key = name if mode == "mean_nopostfix" else f"{name}_{mode}"
            host_metrics[key] = _finish(key, mode, sums)
    kept = _zeros_like(global_metrics) if reset_metrics else global_metrics
    return FrozenDict(unfreeze(kept)), host_metrics


def aggregate_metrics(
    aggregated_metrics: Mapping[str, Any] | None, batch_metrics: Metrics | Mapping[str, Any]
) -> dict[str, Any]:
    """Aggregate the metrics of successive batches on the host.

    This is only needed for the modes that `update_metrics` does not accumulate: the values of `single_noreduce`, and
    values and counts of `single_noreduce_wcount`, are concatenated. For other modes, the latest state is kept.

    Args:
        aggregated_metrics: The result of the previous call, or an empty dictionary.
        batch_metrics: The accumulated metrics after the batch.

    Returns:
        Metrics for `get_metrics`. Names that `batch_metrics` does not have are dropped.
    """
    previous = aggregated_metrics or {}
    result = {}
    for name, modes in batch_metrics.items():
        if isinstance(modes, Mapping):
            so_far = previous.get(name, {})
            result[name] = {mode: _append(mode, so_far.get(mode), sums) for mode, sums in modes.items()}
        else:
            result[name] = modes
    return result


def _parse_step_element(
    name: str, element: Any, default_log_modes: Sequence[str] | None
) -> tuple[Number, Number, tuple[str, ...]]:
    parts = element if isinstance(element, Mapping) else {"value": element}
    if "value" not in parts or not set(parts) <= {"value", "count", "log_modes"}:
        raise ValueError(
            f"Metric {name!r} has the keys {list(parts)}: value is needed, count and log_modes may be given."
        )
    log_modes = parts.get("log_modes") or default_log_modes or DEFAULT_LOG_MODES
    log_modes = (log_modes,) if isinstance(log_modes, str) else tuple(log_modes)
    unknown = [mode for mode in log_modes if mode not in get_args(LogMode)]
    if unknown:
        raise ValueError(
            f"Metric {name!r} has the log mode {unknown[0]!r}: choose from {', '.join(get_args(LogMode))}."
        )
    value, count = parts["value"], parts.get("count", 1)
    if value is None or isinstance(value, str):
        raise ValueError(f"Metric {name!r} is {value!r}, but must be a number or an array.")
    if _is_on_host(value) and not isinstance(count, jax.Array):
        return np.asarray(value), np.asarray(count), log_modes
    return _to_array(value), _to_count(count), log_modes


def _is_on_host(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype == np.float64


def _to_array(x: Any) -> jax.Array:
    """Convert to float32 or to an integer type whose sums do not overflow quickly, without a weak type."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.convert_element_type(x, jnp.float32)
    return lax.convert_element_type(x, jnp.int32 if x.dtype.itemsize < 4 else x.dtype)


def _to_count(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return lax.convert_element_type(x, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _to_sums(mode: str, value: Number, count: Number) -> Sums:
    """Return the sums that a step adds to one mode."""
    if mode.startswith("single"):
        return {"value": value, "count": count}
    is_counted = count != 0
    if mode in ("mean", "mean_nopostfix"):
        xp, wide = _arithmetic(value)
        # Integer sums would overflow after two billion tokens and make means negative.
        value, count = value.astype(wide), count.astype(wide)
        return {"value": xp.where(is_counted, value, xp.zeros_like(value)), "count": count}
    ratio = _ratio(value, count, otherwise=0.0)
    once = {"value": ratio, "count": is_counted.astype(count.dtype)}
    return once if mode == "max" else {**once, "value2": ratio * ratio}


def _arithmetic(*numbers: Any) -> tuple[Any, Any]:
    """Return NumPy and float64 if all numbers are on the host, else `jax.numpy` and float32."""
    return (np, np.float64) if all(map(_is_on_host, numbers)) else (jnp, jnp.float32)


def _ratio(value: Number, count: Number, *, otherwise: float) -> Number:
    xp, wide = _arithmetic(value)
    divisor = xp.where(count == 0, 1, count).astype(wide)
    return xp.where(count == 0, otherwise, value.astype(wide) / divisor)


def _accumulate(mode: str, old: Sums | None, new: Sums) -> Sums:
    if old is None or mode.startswith("single"):
        return new
    xp, _ = _arithmetic(old["value"], new["value"])
    if xp is jnp and _is_on_host(new["value"]):
        new = {name: _to_array(number) for name, number in new.items()}
    if mode != "max":
        return {name: xp.add(old[name], number) for name, number in new.items()}
    larger = xp.where(new["count"] == 0, old["value"], xp.maximum(old["value"], new["value"]))
    return {
        "value": xp.where(old["count"] == 0, new["value"], larger),
        "count": xp.maximum(old["count"], new["count"]),
    }


def _largest_over_devices(value: jax.Array, count: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    is_counted = count != 0
    ratio = _ratio(value, count, otherwise=-jnp.inf)
    # Whether `pmax` propagates NaN depends on the device type.
    largest, any_nan, any_counted = lax.pmax(
        (ratio, jnp.isnan(ratio).astype(int), is_counted.astype(count.dtype)), axes
    )
    largest = jnp.where(any_nan > 0, jnp.nan, largest)
    return jnp.where(any_counted > 0, largest, 0.0), any_counted


def _finish(key: str, mode: str, sums: Mapping[str, Any]) -> Any:
    """Return the value that a mode reports."""
    value, count = np.asarray(sums["value"]), np.asarray(sums["count"])
    # Copies: a view of a device's memory would keep it from being donated.
    if mode == "single_noreduce":
        return _to_python(value.copy())
    if mode == "single_noreduce_wcount":
        return value.copy(), count.copy()
    if count.ndim == 0 and count == 0:
        LOGGER.warning("Metric %s has nothing to report: its count is 0. It is reported as 0.", key)
        return 0.0
    divisor = np.where(count == 0, 1, count)
    if mode == "std":
        return _to_python(_standard_deviation(value, np.asarray(sums["value2"]), divisor))
    return _to_python(np.where(count == 0, 0.0, value / divisor.astype(np.float64)))


def _standard_deviation(value: np.ndarray, value2: np.ndarray, count: np.ndarray) -> np.ndarray | np.generic:
    """Return the standard deviation, in the precision of the sums; for a single value it is exactly 0."""
    count = count.astype(value.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.sqrt(np.maximum(value2 / count - np.square(value / count), 0))


def _append(mode: str, old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Mapping[str, Any]:
    if not mode.startswith("single_noreduce"):
        return new
    values, counts = (np.array(jax.device_get(new[part])) for part in ("value", "count"))
    values = np.atleast_1d(values)
    counts = np.atleast_1d(counts) if mode == "single_noreduce_wcount" else counts
    if old is None:
        return {"value": values, "count": counts}
    join = np.add if mode == "single_noreduce" else lambda *arrays: np.concatenate(arrays)
    return {"value": np.concatenate([old["value"], values]), "count": join(old["count"], counts)}


def _to_python(x: Any) -> Any:
    return x.item() if isinstance(x, np.ndarray | np.generic) and x.size == 1 else x


def _zeros_like(metrics: Metrics | dict[str, Any]) -> Any:
    """Return zeros for every leaf, on its device or on the host; one program for all device arrays."""
    leaves, structure = jax.tree.flatten(metrics)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    zeros = iter(_zeros_maker(tuple((x.shape, x.dtype, x.sharding) for x in arrays))())
    return structure.unflatten(
        next(zeros) if isinstance(x, jax.Array) else np.zeros_like(x) if isinstance(x, NUMBERS) else x for x in leaves
    )


@functools.lru_cache(maxsize=32)
def _zeros_maker(kinds: tuple[tuple[tuple[int, ...], Any, Any], ...]) -> Callable[[], list[jax.Array]]:
    shardings = [sharding for _, _, sharding in kinds]
    return jax.jit(lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in kinds], out_shardings=shardings)
