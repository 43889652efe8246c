"""Retention policy: which checkpoints of a run are kept, and which is the best."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Retention:
    """Keeps the newest checkpoints, the best one, and optionally one every `keep_every` steps."""

    max_to_keep: int | None = None
    """The number of newest checkpoints to keep; `None` for all."""
    keep_every: int | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    monitor: str | None = None
    """The metric that determines the best checkpoint."""
    mode: str = "min"
    """Whether low (`min`) or high (`max`) values of the metric are good."""

    def best(self, metrics: Mapping[int, Mapping[str, Any]]) -> int | None:
        """Return the step of the best checkpoint; `None` if no checkpoint has a finite value of the metric.

        Of several equal ones, it is the latest.

        Args:
            metrics: The metrics of each checkpoint, from the oldest to the newest.
        """
        values = {step: found.get(self.monitor) for step, found in metrics.items()} if self.monitor else {}
        finite = {step: x for step, x in values.items() if isinstance(x, int | float) and math.isfinite(x)}
        if not finite:
            return None
        wanted = min(finite.values()) if self.mode == "min" else max(finite.values())
        return [step for step, value in finite.items() if value == wanted][-1]

    def dropped(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Return the steps whose checkpoints are not kept.

        Args:
            steps: All steps, from the oldest checkpoint to the newest.
            metrics: The metrics of each checkpoint, in the same order.
        """
        if self.max_to_keep is None:
            return []
        kept = {self.best(metrics), *steps[-self.max_to_keep :]}
        return [step for step in steps if step not in kept and not (self.keep_every and step % self.keep_every == 0)]
