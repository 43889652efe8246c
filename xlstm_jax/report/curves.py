"""Curves of metrics over steps, and downsampling that preserves their appearance."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Curve:
    """The values of a metric over steps.

    Args:
        steps: The steps, strictly increasing.
        values: The values; `None` for a non-finite one.
    """

    steps: Sequence[int]
    values: Sequence[float | None]

    @classmethod
    def from_points(cls, points: Mapping[int, float | None]) -> "Curve":
        """Build a curve from points, sorted by step."""
        steps = sorted(points)
        return cls(steps, [points[step] for step in steps])

    def finite(self) -> list[tuple[int, float]]:
        """Return the points with a finite value."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    def last(self) -> tuple[int, float] | None:
        """Return the last point with a finite value."""
        return next(reversed(self.finite()), None)

    def lowest(self) -> tuple[int, float] | None:
        """Return the first point with the lowest value."""
        return min(self.finite(), key=lambda point: point[1], default=None)

    def is_constant(self) -> bool:
        """Return whether all finite values are equal, or there is at most one."""
        return len({value for _, value in self.finite()}) <= 1

    def at(self, indices: Sequence[int]) -> "Curve":
        """Return the curve at some indices."""
        return Curve([self.steps[index] for index in indices], [self.values[index] for index in indices])

    def downsampled(self, most: int) -> "Curve":
        """Reduce the number of points, keeping extremes, ends and gaps.

        Args:
            most: The maximum number of points, at least 5.

        Returns:
            The ends and, for each interval of points, the lowest point, the highest point and the first gap.
        """
        count = len(self.steps)
        if count <= most:
            return self
        kinds = 3 if any(value is None for value in self.values) else 2
        num_stretches = (most - 2) // kinds
        kept = {0, count - 1}
        for stretch in range(num_stretches):
            indices = range(stretch * count // num_stretches, (stretch + 1) * count // num_stretches)
            kept |= _notable(self.values, indices)
        return self.at(sorted(kept))


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the first `count` indices, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def finite_or_none(value: Any) -> float | None:
    """Return a number as a float; `None` if it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def _notable(values: Sequence[float | None], indices: range) -> set[int]:
    finite = [(value, index) for index in indices if (value := values[index]) is not None]
    gap = next((index for index in indices if values[index] is None), None)
    notable = {min(finite)[1], max(finite)[1]} if finite else set()
    return notable if gap is None else notable | {gap}
