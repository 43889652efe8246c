"""Sources whose texts have a number each: records, data sets and lists of texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from xlstm_jax.dataset.sources.bad_data import BadDataPolicy, OnBadData, check_text
from xlstm_jax.dataset.sources.source import BEGINNING, Position, Texts

_BLOCK = 1024
"""How many texts are read at a time."""


@runtime_checkable
class ScannableTexts(Texts, Protocol):
    """Texts that can also be read without a check of their type."""

    def scan(self, start: int, stop: int) -> Sequence[object]:
        """Return the unchecked texts from one index up to another: strings, or bytes of UTF-8."""
        ...


class NumberedTexts:
    """A `TextSource` of texts that can be read by number.

    Args:
        name: The name of the source in messages.
        texts: The texts.
        num_bytes: The approximate size of all texts.
        describe: Returns, for JSON, what determines the texts.
        on_bad_data: Whether an unusable document is an error, or is skipped and counted.
        locations: The files and folders of the source.
    """

    def __init__(
        self,
        name: str,
        texts: ScannableTexts,
        *,
        num_bytes: int,
        describe: Callable[[], Mapping[str, Any]],
        on_bad_data: OnBadData,
        locations: Sequence[Path] = (),
    ):
        self._name = name
        self._texts = texts
        self._describe = describe
        self._num_read = 0
        self._policy = BadDataPolicy(on_bad_data)
        self.num_bytes = num_bytes
        self.locations = list(locations)
        self.skipped = self._policy.skipped

    @property
    def num_bytes_read(self) -> int:
        """The approximate size of the texts up to the last document that was read."""
        return self.num_bytes * self._num_read // max(len(self._texts), 1)

    def numbered(self) -> Texts:
        """Return the texts by number."""
        return self._texts

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, str]]:
        """Yield documents with their positions, from a position on, of which only the second number counts."""
        for first in range(start[1], len(self._texts), _BLOCK):
            for number, text in self._read_block(first):
                self._num_read = number + 1
                yield (0, number), text

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yield documents of about this size in total, in blocks from all parts of the source."""
        starts = np.arange(0, len(self._texts), _BLOCK)
        for first in np.random.default_rng(0).permutation(starts).tolist():
            for _, text in self._read_block(first):
                if num_bytes <= 0:
                    return
                yield text
                num_bytes -= len(text.encode())

    def describe(self) -> Mapping[str, Any]:
        """Return, for JSON, what determines the documents."""
        return self._describe()

    def _read_block(self, first: int) -> Iterator[tuple[int, str]]:
        values = self._texts.scan(first, min(first + _BLOCK, len(self._texts)))
        for number, value in enumerate(values, first):
            document = check_text(value)
            if isinstance(document, str):
                yield number, document
            else:
                self._policy.handle(document._replace(place=f"document {number}"), self._name)
