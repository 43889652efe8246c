"""Texts in the shapes in which libraries hold them, as numbered documents of tokens."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from xlstm_jax.dataset.shards.records import RecordShards
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

_SAMPLE = 256
"""How many rows of a data set tell it from others."""


@runtime_checkable
class Texts(Protocol):
    """A numbered set of texts. Workers get a pickled copy."""

    def __len__(self) -> int:
        """Return the number of texts."""
        ...

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return some texts."""
        ...

    @property
    def digest(self) -> str:
        """What tells these texts from others."""
        ...


class EncodedTexts:
    """The documents of some texts, tokenised as they are read.

    Args:
        texts: The texts.
        encoder: The tokenizer.
    """

    num_tokens = None

    def __init__(self, texts: Texts, encoder: TextEncoder):
        self._texts = texts
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of some documents."""
        texts = self._texts.read(indices)
        # Of an empty text, special tokens would be all that there is to learn.
        return [tokens if text else tokens[:0] for text, tokens in zip(texts, self._encoder(texts), strict=True)]

    @property
    def tokenizer_digest(self) -> str:
        """What the tokenizer is known by."""
        return self._encoder.digest

    def describe(self) -> dict[str, Any]:
        """Return by what these documents are told from others."""
        return {"documents": len(self), "texts": self._texts.digest, "tokenizer": self.tokenizer_digest}


class RecordTexts:
    """Records of UTF-8 text.

    Args:
        records: The records.
    """

    def __init__(self, records: RecordShards):
        self._records = records
        self.digest = hashlib.sha256(json.dumps(records.describe()).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return some texts."""
        records = self._records.read_records(indices)
        return [self._decode(index, record) for index, record in zip(indices, records, strict=True)]

    def _decode(self, index: int, record: bytes) -> str:
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"The {self._records.locate(index)} is no UTF-8 text ({error}): take it out, set "
                'on_bad_data="skip", or, if the records are tokens, tokenize_data=False.'
            ) from error


class ColumnTexts:
    """A column of a data set of Hugging Face.

    Args:
        dataset: The data set.
        column: The name of the column.
    """

    def __init__(self, dataset: Any, column: str):
        if column not in dataset.column_names:
            raise ValueError(f"There is no column {column!r}, only {', '.join(dataset.column_names)}: set data_column.")
        self._dataset = dataset.select_columns([column])
        self._column = column
        # All of it may be too much to read: some of it tells most sets apart, wherever they are stored.
        rows = np.linspace(0, len(dataset) - 1, num=_SAMPLE, dtype=int).tolist() if len(dataset) else []
        self.digest = hashlib.sha256(repr([len(dataset), self._dataset[rows][column]]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return some texts."""
        texts = self._dataset[list(indices)][self._column]
        for index, text in zip(indices, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(
                    f"Row {index} of the column {self._column!r} holds a {type(text).__name__}, not a text: set "
                    'data_column, or on_bad_data="skip" to leave such rows out.'
                )
        return texts


def is_saved_dataset(path: str) -> bool:
    """Return whether a path is a folder that `save_to_disk` of a data set has written."""
    return any(Path(path, file).is_file() for file in ("dataset_dict.json", "state.json"))
