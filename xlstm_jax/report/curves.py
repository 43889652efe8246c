"""Numbers over steps, and fewer of them that look the same."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a metric was at some steps.

    Args:
        steps: The steps, each larger than the one before.
        values: The values; `None` where one was logged that is not finite.
    """

    steps: Sequence[int]
    values: Sequence[float | None]

    @classmethod
    def from_points(cls, points: Mapping[int, float | None]) -> "Curve":
        """Sort points by their steps."""
        steps = sorted(points)
        return cls(steps, [points[step] for step in steps])

    def finite(self) -> list[tuple[int, float]]:
        """Return the points that have a value."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    def last(self) -> tuple[int, float] | None:
        """Return the last point that has a value."""
        return next(reversed(self.finite()), None)

    def lowest(self) -> tuple[int, float] | None:
        """Return the point with the lowest value, the first of them."""
        return min(self.finite(), key=lambda point: point[1], default=None)

    def is_constant(self) -> bool:
        """Check whether a line would tell nothing: all values are the same, or there is one at most."""
        return len({value for _, value in self.finite()}) <= 1

    def at(self, indices: Sequence[int]) -> "Curve":
        """Return some of the points."""
        return Curve([self.steps[index] for index in indices], [self.values[index] for index in indices])

    def downsampled(self, most: int) -> "Curve":
        """Leave points out such that a drawing keeps its extremes, its ends and its gaps.

        Args:
            most: How many points may be left, at least 5.

        Returns:
            Of each stretch of steps the lowest point, the highest and the first gap.
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
    """Return at most `most` of the first `count` indices, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def finite_or_none(value: Any) -> float | None:
    """Return a number as a float; `None` for what is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def _notable(values: Sequence[float | None], indices: range) -> set[int]:
    finite = [(value, index) for index in indices if (value := values[index]) is not None]
    gap = next((index for index in indices if values[index] is None), None)
    notable = {min(finite)[1], max(finite)[1]} if finite else set()
    return notable if gap is None else notable | {gap}
