"""How documents are laid out in rows.

A row is a list of pieces of documents. Each token of a document is a target exactly once: tokens that do not fit into a
row continue in another one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.sources.source import Document


class Piece(NamedTuple):
    """Consecutive tokens of a document."""

    document: Document
    start: int
    stop: int
    origin: int
    """The token at which positions start: the first one of the document that the recurrent state still covers."""


Row = list[Piece]
Draw = Callable[[], Document | None]
"""Returns the next document, or `None` when there is none."""
Find = Callable[[int, int], Document]
"""Returns the document of a source at a position."""
PackingState = Mapping[str, list[list[list[int]]]]
"""Rows by name, for JSON; a piece is stored as the source and position of its document, and its other fields."""


@runtime_checkable
class Packing(Protocol):
    """Fills rows with documents."""

    def fill(self, num_rows: int, draw: Draw) -> list[Row]:
        """Return the next rows; they are empty once there are no more documents."""
        ...

    def get_state(self) -> PackingState:
        """Return the pieces that have been drawn and are not yet in a returned row."""
        ...

    def set_state(self, state: PackingState, find: Find) -> None:
        """Restore these pieces."""
        ...


def make_batch(rows: Sequence[Row], length: int, first_input: int) -> LLMBatch:
    """Make a batch of NumPy arrays from rows.

    The input of a target is the previous token of its document, or `first_input` for the first token: no token of one
    document is an input of another.

    Args:
        rows: The rows.
        length: The number of tokens in a row.
        first_input: The first input of a document.
    """
    inputs, targets, segmentation, position = np.zeros((4, len(rows), length), np.int32)
    count = np.arange(length, dtype=np.int32)
    for index, row in enumerate(rows):
        begin = 0
        for number, (document, start, stop, origin) in enumerate(row, 1):
            size = stop - start
            end = begin + size
            tokens = document.tokens
            targets[index, begin:end] = tokens[start:stop]
            inputs[index, begin] = tokens[start - 1] if start else first_input
            inputs[index, begin + 1 : end] = tokens[start : stop - 1]
            segmentation[index, begin:end] = number
            position[index, begin:end] = count[:size] + (start - origin)
            begin = end
    return LLMBatch(
        inputs=inputs,
        targets=targets,
        inputs_position=position,
        inputs_segmentation=segmentation,
        targets_position=position,
        targets_segmentation=segmentation,
    )


def describe_rows(rows: Iterable[Row]) -> list[list[list[int]]]:
    """Return rows for the state of a packing."""
    return [[[piece.document.source, piece.document.position, *piece[1:]] for piece in row] for row in rows]


def find_rows(rows: list[list[list[int]]], find: Find) -> list[Row]:
    """Return the rows that `describe_rows` has described."""
    return [[Piece(find(source, position), *rest) for source, position, *rest in row] for row in rows]


def whole(document: Document) -> Piece:
    """Return a document as one piece."""
    return Piece(document, 0, len(document.tokens), 0)
