"""The splits of what `prepare` reads: those of the source, or shares of its documents."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.sources.bad_data import OnBadData
from xlstm_jax.dataset.sources.registry import open_paths
from xlstm_jax.dataset.sources.source import BEGINNING, PathOptions, Position, TextSource
from xlstm_jax.dataset.sources.standard_library import SPLITS, STANDARD_LIBRARY


@dataclasses.dataclass(frozen=True)
class Split:
    """The documents of a source that belong to one split."""

    name: str
    source: TextSource
    validation_share: float | None = None
    """The share of documents for validation, if both splits come from the same documents."""

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, str]]:
        """Yield the documents of the split with their positions in the source."""
        return ((position, text) for position, text in self.source.documents(start) if self._contains(text))

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yield the documents of the split from a sample of about this size of the source."""
        return filter(self._contains, self.source.sample(num_bytes))

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what determines the documents."""
        return {**self.source.describe(), "split": self.name, "validation_share": self.validation_share}

    def take_skipped(self) -> dict[str, int]:
        """Return the number of documents skipped since the last call, by reason.

        The split of an unusable document is unknown: all are counted for training.
        """
        skipped = dict(self.source.skipped)
        self.source.skipped.clear()
        return skipped if self.validation_share is None or self.name == "train" else {}

    def _contains(self, text: str) -> bool:
        if self.validation_share is None:
            return True
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return (number < self.validation_share * 2**64) == (self.name == "validation")


def open_splits(
    paths: Sequence[str],
    *,
    split: str | None,
    validation_share: float | None,
    column: str,
    on_bad_data: OnBadData,
    max_document_bytes: int | None,
) -> list[Split]:
    """Open the splits that `prepare` writes; its docstring has the arguments."""
    if not paths or "" in paths:
        raise ConfigError("A source is empty: name files, folders or patterns of text.")
    splits = []
    for name in _split_names(paths, split, validation_share):
        read = name if validation_share is None else "train"
        source = open_paths(paths, PathOptions(read, column, on_bad_data, max_document_bytes))
        splits.append(Split(name, source, validation_share))
    return splits


def _split_names(paths: Sequence[str], split: str | None, validation_share: float | None) -> Sequence[str]:
    if split is not None and (not split or split.startswith(".") or Path(split).name != split):
        raise ConfigError(
            f"split is {split!r}, but must be a name that a folder can have: without slashes and a dot first."
        )
    has_own_splits = list(paths) == [STANDARD_LIBRARY]
    if validation_share is None:
        return [split] if split else SPLITS if has_own_splits else SPLITS[:1]
    if not 0 < validation_share < 1:
        raise ConfigError(f"validation_share is {validation_share}, but must be more than 0 and less than 1.")
    if has_own_splits:
        raise ConfigError(f"validation_share makes two splits of one, but {STANDARD_LIBRARY} has two: leave it out.")
    if split:
        raise ConfigError(f"validation_share makes two splits of one: leave it out, as the split is {split}.")
    return SPLITS
