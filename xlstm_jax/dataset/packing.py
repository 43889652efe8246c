"""How documents are laid out in rows.

A row is a list of pieces of documents. Each token of a document is a target once: what does not fit goes on elsewhere.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.sources.source import Document


class Piece(NamedTuple):
    """Some tokens of a document, one after the other."""

    document: Document
    start: int
    stop: int
    origin: int
    """Where positions are counted from: the first token that the model has seen of what it still remembers."""


Row = list[Piece]
Draw = Callable[[], Document | None]
"""Returns the next document, or `None` when there is none."""
Find = Callable[[int, int], Document]
"""Returns the document of a source at a position."""


PackingState = Mapping[str, list[list[list[int]]]]
"""Rows by name, for JSON; a piece is its source, the position of its document there, and its other fields."""


@runtime_checkable
class Packing(Protocol):
    """Fills rows with documents."""

    def fill(self, num_rows: int, draw: Draw) -> list[Row]:
        """Return the next rows; those for which there is no document are empty."""
        ...

    def get_state(self) -> PackingState:
        """Return the pieces that have been drawn and not yet been laid out."""
        ...

    def set_state(self, state: PackingState, find: Find) -> None:
        """Take up these pieces."""
        ...


class StreamPacking:
    """Every row is a stream without end: a document goes on in the next batch, where the row has ended in this one.

    A row takes a new document when it has room left. Only once there are no more documents is a row padded. Where a
    batch has fewer rows than the one before, the documents of the last rows go on in the first ones that have room, as
    if they began there.

    Args:
        length: The number of tokens in a row.
    """

    def __init__(self, length: int):
        self._length = length
        self._rest: list[Piece | None] = []
        self._homeless: deque[Piece] = deque()

    def fill(self, num_rows: int, draw: Draw) -> list[Row]:
        """Return the next rows."""
        self._homeless.extend(rest._replace(origin=rest.start) for rest in self._rest[num_rows:] if rest is not None)
        self._rest = [*self._rest[:num_rows], *[None] * (num_rows - len(self._rest))]
        return [self._fill_row(index, draw) for index in range(num_rows)]

    def _fill_row(self, index: int, draw: Draw) -> Row:
        row, room = [], self._length
        while room:
            rest = self._rest[index] or self._next_rest(draw)
            if rest is None:
                break
            stop = min(rest.start + room, rest.stop)
            row.append(rest._replace(stop=stop))
            room -= stop - rest.start
            self._rest[index] = rest._replace(start=stop) if stop < rest.stop else None
        return row

    def _next_rest(self, draw: Draw) -> Piece | None:
        if self._homeless:
            return self._homeless.popleft()
        document = draw()
        return None if document is None else _whole(document)

    def get_state(self) -> PackingState:
        """Return what is left of the document of each row."""
        rest = [[] if piece is None else [piece] for piece in self._rest]
        return {"rest": _describe(rest), "homeless": _describe([[piece] for piece in self._homeless])}

    def set_state(self, state: PackingState, find: Find) -> None:
        """Take up these documents."""
        self._rest = [row[0] if row else None for row in _find_rows(state["rest"], find)]
        self._homeless = deque(row[0] for row in _find_rows(state["homeless"], find))


class FirstFitPacking:
    """Puts each piece into the first row that has room for it; documents longer than a row are cut into several pieces.

    Some rows are filled at a time. If a piece fits into none of them, the fullest is finished and makes room.

    Args:
        length: The number of tokens in a row.
        num_bins: How many rows are filled at a time; with 0, every piece has a row of its own.
    """

    def __init__(self, length: int, num_bins: int):
        self._length = length
        self._bins: list[Row] = [[] for _ in range(num_bins)]
        self._room = np.full(num_bins, length)
        self._finished: deque[Row] = deque()
        self._rest: Piece | None = None

    def fill(self, num_rows: int, draw: Draw) -> list[Row]:
        """Return the next rows."""
        while len(self._finished) < num_rows:
            piece = self._next_piece(draw)
            if piece is None:
                self._finished.extend(row for row in self._bins if row)
                self._set_bins([[] for _ in self._bins])
                break
            self._place(piece)
        return [self._finished.popleft() if self._finished else [] for _ in range(num_rows)]

    def _next_piece(self, draw: Draw) -> Piece | None:
        if self._rest is None:
            document = draw()
            if document is None:
                return None
            self._rest = _whole(document)
        rest = self._rest
        stop = min(rest.start + self._length, rest.stop)
        self._rest = rest._replace(start=stop) if stop < rest.stop else None
        return rest._replace(stop=stop, origin=rest.start)

    def _place(self, piece: Piece) -> None:
        size = piece.stop - piece.start
        if size == self._length or not self._bins:
            self._finished.append([piece])
            return
        has_room = self._room >= size
        index = int(np.argmax(has_room))
        if not has_room[index]:
            index = int(np.argmin(self._room))
            self._finished.append(self._bins[index])
            self._bins[index], self._room[index] = [], self._length
        self._bins[index].append(piece)
        self._room[index] -= size

    def _set_bins(self, bins: list[Row]) -> None:
        self._bins = bins
        self._room = np.array([self._length - sum(piece.stop - piece.start for piece in row) for row in bins])

    def get_state(self) -> PackingState:
        """Return the rows that are being filled, those that are finished, and what is left of a document."""
        rest = [[] if self._rest is None else [self._rest]]
        return {"bins": _describe(self._bins), "finished": _describe(self._finished), "rest": _describe(rest)}

    def set_state(self, state: PackingState, find: Find) -> None:
        """Take up these rows."""
        self._set_bins(_find_rows(state["bins"], find))
        self._finished = deque(_find_rows(state["finished"], find))
        (rest,) = _find_rows(state["rest"], find)
        self._rest = rest[0] if rest else None


def make_batch(rows: Sequence[Row], length: int, first_input: int) -> LLMBatch:
    """Write rows as a batch of NumPy arrays.

    The input before a target is the token before it in its document, or `first_input` if there is none: no token of
    one document is an input of another.

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


def _describe(rows: Iterable[Row]) -> list[list[list[int]]]:
    return [[[piece.document.source, piece.document.position, *piece[1:]] for piece in row] for row in rows]


def _find_rows(rows: list[list[list[int]]], find: Find) -> list[Row]:
    return [[Piece(find(source, position), *rest) for source, position, *rest in row] for row in rows]


def _whole(document: Document) -> Piece:
    return Piece(document, 0, len(document.tokens), 0)
