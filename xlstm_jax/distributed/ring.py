"""All-gather and reduce-scatter around a ring of devices, in steps that can overlap with computation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.array_utils import axis_size


def async_gather(x: PyTree, axis_name: str, shift_up: bool = True) -> list[PyTree]:
    """All-gather arrays around a ring.

    Args:
        x: This device's arrays.
        axis_name: The mesh axis of the ring.
        shift_up: Whether arrays travel to the device with the next higher index, or the next lower.

    Returns:
        The arrays of all devices in the order in which they arrive: on device `r`, entry `i` is that of device `r - i`
        (`r + i` if they travel down).
    """
    parts = [x]
    for _ in range(axis_size(axis_name) - 1):
        parts.append(_shift(parts[-1], axis_name, shift_up))
    return parts


def async_gather_bidirectional(x: PyTree, axis_name: str, shift_up: bool = True) -> list[PyTree]:
    """All-gather arrays in both directions around a ring: the list of `async_gather` in half the steps.

    Args:
        x: This device's arrays.
        axis_name: The mesh axis of the ring.
        shift_up: The order of the result, as in `async_gather`.

    Returns:
        The arrays of all devices, in the order of `async_gather`.
    """
    size = axis_size(axis_name)
    near, far = [x], [x]
    for step in range(1, size):
        direction, parts = (shift_up, near) if step % 2 else (not shift_up, far)
        parts.append(_shift(parts[-1], axis_name, direction))
    return near + far[:0:-1]


def async_gather_split(x: PyTree, axis_name: str) -> list[PyTree]:
    """All-gather the two halves of the features in opposite directions around a ring.

    Args:
        x: This device's arrays; the last axis is halved.
        axis_name: The mesh axis of the ring.

    Returns:
        The first halves of all devices in the order of `async_gather`, then the second halves in the order of
        `async_gather` with `shift_up=False`.
    """
    first, second = _halves(x)
    return async_gather(first, axis_name, shift_up=True) + async_gather(second, axis_name, shift_up=False)


def async_scatter(xs: Sequence[PyTree], axis_name: str, shift_up: bool = True) -> PyTree:
    """Reduce-scatter arrays around a ring: each device gets the sum of the arrays for it.

    Args:
        xs: As many arrays as the ring has devices. On device `r`, entry `i` is for device `r + size - 1 - i`
            (`r - size + 1 + i` if sums travel down): the farthest device first, device `r` last.
        axis_name: The mesh axis of the ring.
        shift_up: Whether sums travel to the device with the next higher index, or the next lower.

    Returns:
        The sum over all devices of the arrays for this one.
    """
    size = axis_size(axis_name)
    if len(xs) != size:
        raise ConfigError(
            f"async_scatter needs one array for each of the {size} devices of {axis_name!r}, not {len(xs)}."
        )
    total = xs[0]
    for x in xs[1:]:
        total = jax.tree.map(jnp.add, _shift(total, axis_name, shift_up), x)
    return total


def async_scatter_split(xs: Sequence[PyTree], axis_name: str) -> PyTree:
    """Run `async_scatter` with the two halves of the features in opposite directions.

    Args:
        xs: As many arrays as the ring has devices, in the order of `async_scatter`; the last axes are halved.
        axis_name: The mesh axis of the ring.

    Returns:
        The result of `async_scatter`.
    """
    halves = [_halves(x) for x in xs]
    up = async_scatter([first for first, _ in halves], axis_name, shift_up=True)
    # The farthest device going up is the nearest going down; the device's own part stays last.
    down_order = [second for _, second in (*halves[-2::-1], halves[-1])]
    down = async_scatter(down_order, axis_name, shift_up=False)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-1), up, down)


def _shift(x: PyTree, axis_name: str, up: bool) -> PyTree:
    size = axis_size(axis_name)
    step = 1 if up else -1
    return jax.tree.map(lambda a: lax.ppermute(a, axis_name, [(i, (i + step) % size) for i in range(size)]), x)


def _halves(x: PyTree) -> tuple[PyTree, PyTree]:
    middle = lambda a: a.shape[-1] // 2  # noqa: E731
    return jax.tree.map(lambda a: a[..., : middle(a)], x), jax.tree.map(lambda a: a[..., middle(a) :], x)
