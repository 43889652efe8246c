"""Fewer points that look the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm_jax.report.curves import Curve, finite_or_none, spread

pytestmark = pytest.mark.slow

VALUES = st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=300)


@given(VALUES, st.integers(5, 60))
def test_downsampling_keeps_extremes_ends_and_whether_there_are_gaps(values, most):
    curve = Curve(list(range(len(values))), values)
    fewer = curve.downsampled(most)
    assert len(fewer.steps) <= most or fewer == curve
    assert all(value == values[step] for step, value in zip(fewer.steps, fewer.values, strict=True))
    assert list(fewer.steps) == sorted(set(fewer.steps))
    assert (fewer.steps[0], fewer.steps[-1]) == (0, len(values) - 1)
    assert (None in fewer.values) == (None in values)
    numbers, kept = ([x for x in some if x is not None] for some in (values, fewer.values))
    assert bool(kept) == bool(numbers)
    if numbers:
        assert (min(kept), max(kept)) == (min(numbers), max(numbers))


def test_a_single_spike_among_many_points_is_kept():
    values = [0.0] * 100_000
    values[77_777] = 9.0
    fewer = Curve(list(range(100_000)), values).downsampled(2000)
    assert len(fewer.steps) <= 2000
    assert dict(zip(fewer.steps, fewer.values, strict=True))[77_777] == 9.0


def test_points_are_sorted_and_what_is_not_finite_is_no_value():
    curve = Curve.from_points({3: 1.0, 1: 2.0, 2: finite_or_none(float("nan"))})
    assert curve == Curve([1, 2, 3], [2.0, None, 1.0])
    assert curve.last() == curve.lowest() == (3, 1.0)
    assert Curve([1], [None]).last() is None


def test_a_line_that_never_changes_is_constant():
    assert Curve([1, 2, 3], [5.0, None, 5.0]).is_constant()
    assert not Curve([1, 2], [5.0, 6.0]).is_constant()


def test_indices_are_spread_over_all_with_both_ends():
    assert spread(3, 5) == [0, 1, 2]
    assert spread(101, 5) == [0, 25, 50, 75, 100]
