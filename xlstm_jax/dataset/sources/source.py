"""What a source of documents is, whatever stores them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary


@runtime_checkable
class Documents(Protocol):
    """A numbered set of documents. Workers get a pickled copy."""

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def read(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of some documents, without the end of a document."""
        ...

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens in all documents, where it is known without reading them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, by what this set is told from others, wherever it is stored."""
        ...


class Document(NamedTuple):
    """One document."""

    source: int
    """Which of several sources it is from."""
    position: int
    """Where it stands in the endless order of its source."""
    tokens: np.ndarray
    """All of its tokens, the end of the document among them."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents, and how they are read."""

    documents: Documents
    shuffle_seed: int | None = None
    """Each pass has an order of its own that follows from this seed; without one, documents keep their order."""
    eod_token_id: int | None = None
    """What is put at the end of each document."""
    on_bad_data: Literal["error", "skip"] = "error"
    """Whether a document that has no tokens or is no text is an error, or is left out and counted."""
    skips_unreadable: bool = True
    """Whether that also holds of a document whose file is missing or damaged, which one of several processes alone may
    find: they would no longer agree."""
    name: str = "data"
    """What the source is called in statistics."""
    location: str = "the data"
    """What it is called in messages."""
    num_left_out: int = 0
    """How many documents were left out when it was opened."""
    vocabulary: Vocabulary | None = None
    """The token ids that documents can hold, where they are known beforehand."""

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens in a pass, the ends of documents among them, where it is known."""
        count = self.documents.num_tokens
        return None if count is None else count + len(self.documents) * (self.eod_token_id is not None)

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, all that decides on the documents and their order."""
        return {
            **self.documents.describe(),
            "shuffle_seed": self.shuffle_seed,
            "eod_token_id": self.eod_token_id,
            "on_bad_data": self.on_bad_data,
        }
