"""The interfaces of sources: texts, tokenised documents, and how a training run reads them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from xlstm_jax.dataset.sources.bad_data import OnBadData
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary

Position = tuple[int, int]
"""The position of a document: the index of its file, and its index among the usable documents of that file."""
BEGINNING: Position = (0, 0)


@runtime_checkable
class Texts(Protocol):
    """A numbered set of texts. Workers get a pickled copy."""

    def __len__(self) -> int:
        """Return the number of texts."""
        ...

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return the texts with these indices."""
        ...

    @property
    def digest(self) -> str:
        """A hash that identifies the texts."""
        ...


@runtime_checkable
class TextSource(Protocol):
    """Texts of one data set: by number for training, one after the other for `prepare`."""

    @property
    def skipped(self) -> dict[str, int]:
        """The number of skipped documents, by reason."""
        ...

    @property
    def num_bytes(self) -> int:
        """The approximate size of all texts."""
        ...

    @property
    def num_bytes_read(self) -> int:
        """The approximate size of the texts up to the last document that was read."""
        ...

    @property
    def locations(self) -> list[Path]:
        """The files and folders of the source."""
        ...

    def numbered(self) -> Texts:
        """Return the texts by number."""
        ...

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, str]]:
        """Yield documents with their positions, from a position on."""
        ...

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yield documents of about this size in total, from all parts of the source."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Return, for JSON, what determines the documents."""
        ...


class PathOptions(NamedTuple):
    """How `prepare` reads a source that is given by its path."""

    split: str
    column: str
    on_bad_data: OnBadData
    max_document_bytes: int | None


@runtime_checkable
class Documents(Protocol):
    """A numbered set of documents. Workers get a pickled copy."""

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of some documents, without the token that ends a document."""
        ...

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens in all documents, where it is known without reading them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what identifies this set, wherever it is stored."""
        ...


class Document(NamedTuple):
    """One document."""

    source: int
    """The index of its source."""
    position: int
    """Its position in the endless order of its source."""
    tokens: np.ndarray
    """All of its tokens, including the one that ends it."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents, and how a training run reads them."""

    documents: Documents
    shuffle_seed: int | None = None
    """The seed of the order of each pass; `None` to keep the order of the documents."""
    eod_token_id: int | None = None
    """The token that is appended to each document, if any."""
    on_bad_data: Literal["error", "skip"] = "error"
    """Whether a document without tokens, or that is not text, is an error, or is skipped and counted."""
    skips_unreadable: bool = True
    """Whether "skip" includes documents whose file is missing or damaged. With several processes it must not: only some
    of them may find the file so, and they would no longer agree."""
    name: str = "data"
    """The name of the source in statistics."""
    location: str = "the data"
    """The name of the source in messages."""
    num_skipped: int = 0
    """The number of documents skipped while it was opened."""
    vocabulary: Vocabulary | None = None
    """The token ids that documents can hold, where they are known beforehand."""

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens in a pass, including those that end documents, where it is known."""
        count = self.documents.num_tokens
        return None if count is None else count + len(self.documents) * (self.eod_token_id is not None)

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, everything that determines the documents and their order."""
        return {
            **self.documents.describe(),
            "shuffle_seed": self.shuffle_seed,
            "eod_token_id": self.eod_token_id,
            "on_bad_data": self.on_bad_data,
        }
