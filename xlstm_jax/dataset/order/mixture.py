"""Mix documents of several sources by their shares of tokens."""

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from xlstm_jax.dataset.order.document_stream import DocumentStream
from xlstm_jax.dataset.sources.source import Document


class WeightSchedule:
    """The share of tokens of each source, as a function of the step.

    Args:
        num_sources: The number of sources.
        weights: The weight of each source, in any unit; equal weights by default.
        at_steps: Other weights, by the step from which they apply.
    """

    def __init__(
        self,
        num_sources: int,
        weights: Sequence[float | int] | None = None,
        at_steps: Mapping[int, Sequence[float | int]] | None = None,
    ):
        stages = {0: [1.0] * num_sources if weights is None else weights}
        for step, row in (at_steps or {}).items():
            if int(step) < 1:
                raise ValueError(f"Weights are given for step {step}, but can change from step 1 on.")
            stages[int(step)] = row
        for step, row in stages.items():
            is_valid = len(row) == num_sources and min(row) >= 0 and 0 < sum(row) < math.inf
            if not is_valid:
                raise ValueError(
                    f"The weights from step {step} on are {list(row)}, but must be {num_sources} numbers that are "
                    "finite, not negative and not all 0."
                )
        self._steps = sorted(stages)
        self._shares = [[weight / sum(stages[step]) for weight in stages[step]] for step in self._steps]

    def __call__(self, step: int) -> list[float]:
        """Return the shares at a step; they sum to 1."""
        return self._shares[bisect.bisect_right(self._steps, step) - 1]

    def describe(self) -> dict[str, list[float]]:
        """Return, for JSON, the shares by the step from which they apply."""
        return {str(step): shares for step, shares in zip(self._steps, self._shares, strict=True)}


class Mixture:
    """Draws each document from the source that is furthest behind its share of tokens.

    Each drawn document credits every source with the source's share of the document's tokens, and debits its own source
    with all of them. The source with the most credit is next, so the error of a share never exceeds a few documents.

    Args:
        streams: The documents of each source.
        weights: Their shares.
    """

    def __init__(self, streams: Sequence[DocumentStream], weights: WeightSchedule):
        self._streams = streams
        self._weights = weights
        self._credits = [0.0] * len(streams)

    def draw(self, step: int, limit: int | None = None) -> Document | None:
        """Return the next document.

        Args:
            step: The step that the document is drawn for.
            limit: The position at which a source ends, if it ends.
        """
        shares = self._weights(step)
        chosen = max((index for index, share in enumerate(shares) if share), key=self._credits.__getitem__)
        document = self._streams[chosen].draw(limit)
        if document is not None:
            size = len(document.tokens)
            self._credits = [credit + share * size for credit, share in zip(self._credits, shares, strict=True)]
            self._credits[chosen] -= size
        return document

    def get_state(self) -> dict[str, Any]:
        """Return the positions of all sources, for JSON."""
        return {
            "positions": [stream.position for stream in self._streams],
            "skipped": [stream.num_skipped for stream in self._streams],
            "credits": list(self._credits),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume the state of a mixture of the same sources."""
        for stream, position, skipped in zip(self._streams, state["positions"], state["skipped"], strict=True):
            stream.seek(position)
            stream.num_skipped = skipped
        self._credits = list(state["credits"])
