"""What can be tokenised: files, data sets of several libraries and the standard library, cut into splits."""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.shards.manifest import MANIFEST_FILE, read_manifest
from xlstm_jax.dataset.shards.records import find_shards, open_records, spread_numbers
from xlstm_jax.dataset.sources.text_files import (
    BEGINNING,
    BadDataPolicy,
    OnBadData,
    Position,
    TextFiles,
    check_text,
    cut_at_lines,
)
from xlstm_jax.dataset.sources.texts import ColumnTexts, is_saved_dataset

STANDARD_LIBRARY = "stdlib"
"""The source that is Python's standard library."""
HUGGING_FACE = "hf:"
"""What stands before the name of a data set on the hub."""

_BOTH_SPLITS = ("train", "validation")
_BLOCK = 1024
"""How many numbered texts are read at a time."""


class NumberedTexts:
    """Documents of which each can be asked for by its number, with the methods of `TextFiles`.

    Args:
        name: What they are called in messages.
        read: Returns those from one number on, up to another: texts, or bytes of UTF-8.
        num_texts: How many there are.
        num_bytes: About how large they are together.
        description: What decides on them, for JSON.
        on_bad_data: Whether a document that cannot be used is an error, or is left out and counted.
        locations: The files and folders that they are read from.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[int, int], Sequence[Any]],
        *,
        num_texts: int,
        num_bytes: int,
        description: Mapping[str, Any],
        on_bad_data: OnBadData,
        locations: Sequence[Path] = (),
    ):
        self._name = name
        self._read = read
        self._num_texts = num_texts
        self._num_read = 0
        self._description = description
        self._policy = BadDataPolicy(on_bad_data)
        self.num_bytes = num_bytes
        self.locations = list(locations)
        self.skipped = self._policy.skipped

    @property
    def num_bytes_read(self) -> int:
        """How much has been read."""
        return self.num_bytes * self._num_read // max(self._num_texts, 1)

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, str]]:
        """Yield documents and where they stand, from a position on; only its second number counts."""
        for first in range(start[1], self._num_texts, _BLOCK):
            for number, text in self._read_block(first):
                self._num_read = number + 1
                yield (0, number), text

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yield about so much of the documents, in blocks from all over."""
        starts = np.arange(0, self._num_texts, _BLOCK)
        for first in np.random.default_rng(0).permutation(starts).tolist():
            for _, text in self._read_block(first):
                if num_bytes <= 0:
                    return
                yield text
                num_bytes -= len(text.encode())

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what decides on the documents."""
        return dict(self._description)

    def _read_block(self, first: int) -> Iterator[tuple[int, str]]:
        values = self._read(first, min(first + _BLOCK, self._num_texts))
        for number, value in enumerate(values, first):
            document = check_text(value)
            if isinstance(document, str):
                yield number, document
            else:
                self._policy.handle(document._replace(place=f"document {number}"), self._name)


TextSource = TextFiles | NumberedTexts


@dataclasses.dataclass(frozen=True)
class Split:
    """Some documents of a source."""

    name: str
    source: TextSource
    validation_share: float | None = None
    """The share of documents that are for validation, if the source has both."""

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, str]]:
        """Yield the documents of the split and where they stand in the source."""
        return ((position, text) for position, text in self.source.documents(start) if self._has(text))

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yield about so much of the documents of the source, but only those of the split."""
        return filter(self._has, self.source.sample(num_bytes))

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what decides on the documents."""
        return {**self.source.describe(), "split": self.name, "validation_share": self.validation_share}

    def take_skipped(self) -> dict[str, int]:
        """Return how many documents have been left out since the last call, by reason.

        Nobody knows on which side of a source with both splits a bad document would be: all are counted for training.
        """
        skipped = dict(self.source.skipped)
        self.source.skipped.clear()
        return skipped if self.validation_share is None or self.name == "train" else {}

    def _has(self, text: str) -> bool:
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
    """Open what `prepare` is to read, as it describes these arguments."""
    if not paths or "" in paths:
        raise ConfigError("A source is empty: name files, folders or patterns of text.")

    def open_source(name: str) -> TextSource:
        if len(paths) == 1:
            path = paths[0]
            if path == STANDARD_LIBRARY:
                return _open_standard_library(name, on_bad_data, max_document_bytes)
            if path == HUGGING_FACE:
                raise ConfigError(f"{path!r} names no data set: write {HUGGING_FACE}OWNER/NAME.")
            if path.startswith(HUGGING_FACE) or is_saved_dataset(path):
                return _open_dataset(path.removeprefix(HUGGING_FACE), name, column, on_bad_data)
            for folder in (Path(path, name), Path(path)):
                if find_shards(folder):
                    return _open_records(folder, on_bad_data, locations=[Path(path), folder])
        return TextFiles(paths, column, on_bad_data, max_document_bytes)

    return [
        Split(name, open_source(name if validation_share is None else "train"), validation_share)
        for name in _split_names(paths, split, validation_share)
    ]


def _split_names(paths: Sequence[str], split: str | None, validation_share: float | None) -> Sequence[str]:
    if split is not None and (not split or split.startswith(".") or Path(split).name != split):
        raise ConfigError(
            f"split is {split!r}, but must be a name that a folder can have: without slashes and a dot first."
        )
    has_own_splits = list(paths) == [STANDARD_LIBRARY]
    if validation_share is None:
        return [split] if split else _BOTH_SPLITS if has_own_splits else _BOTH_SPLITS[:1]
    if not 0 < validation_share < 1:
        raise ConfigError(f"validation_share is {validation_share}, but must be more than 0 and less than 1.")
    if has_own_splits:
        raise ConfigError(f"validation_share makes two splits of one, but {STANDARD_LIBRARY} has two: leave it out.")
    if split:
        raise ConfigError(f"validation_share makes two splits of one: leave it out, as the split is {split}.")
    return _BOTH_SPLITS


def _open_standard_library(split: str, on_bad_data: OnBadData, max_document_bytes: int | None) -> TextSource:
    """Open a split, of which files for training are cut as other plain text is; those for validation stay whole."""
    from xlstm_jax.dataset.sources.standard_library import count_bytes, load_standard_library

    if split not in _BOTH_SPLITS:
        raise ConfigError(f"The standard library has no split {split!r}, only {' and '.join(_BOTH_SPLITS)}.")
    corpus = load_standard_library()
    documents = corpus.train if split == "train" else corpus.validation
    max_bytes = max_document_bytes if split == "train" else None
    texts = [document.content.decode("utf-8", "replace").encode() for document in documents]
    if max_bytes is not None:
        texts = [piece for text in texts for piece in cut_at_lines(io.BytesIO(text), max_bytes)]
    return NumberedTexts(
        STANDARD_LIBRARY,
        lambda start, end: texts[start:end],
        num_texts=len(texts),
        num_bytes=count_bytes(documents),
        description={"paths": [STANDARD_LIBRARY], "sha256": corpus.sha256, "max_document_bytes": max_bytes},
        on_bad_data=on_bad_data,
    )


def _open_dataset(path: str, split: str, column: str, on_bad_data: OnBadData) -> TextSource:
    from xlstm_jax.dataset.configs import HFHubDataConfig
    from xlstm_jax.dataset.sources.huggingface import load_huggingface_dataset

    dataset: Any = load_huggingface_dataset(HFHubDataConfig(hf_path=path, split=split, global_batch_size=1))
    digest = ColumnTexts(dataset, column).digest
    texts = dataset.select_columns([column])
    samples = texts[spread_numbers(len(texts))][column]
    return NumberedTexts(
        path,
        lambda start, end: texts[start:end][column],
        num_texts=len(texts),
        num_bytes=texts.data.nbytes,
        description={
            "paths": [path],
            "column": column,
            "num_texts": len(texts),
            "digest": digest,
            "sha256_of_samples": hashlib.sha256(json.dumps(list(samples), default=repr).encode()).hexdigest(),
        },
        on_bad_data=on_bad_data,
        locations=[Path(path)],
    )


def _open_records(folder: Path, on_bad_data: OnBadData, locations: Sequence[Path]) -> TextSource:
    if read_manifest(folder) is not None:
        raise ValueError(f"The documents in {folder} are tokenised already, see its {MANIFEST_FILE}.")
    records = open_records(folder)
    return NumberedTexts(
        str(folder),
        lambda start, end: records.read_records(range(start, end)),
        num_texts=len(records),
        num_bytes=records.num_bytes,
        description={"paths": [str(folder)], **records.describe()},
        on_bad_data=on_bad_data,
        locations=locations,
    )
