"""Packing in which each piece of a document goes into the first row with room for it."""

from collections import deque

import numpy as np

from xlstm_jax.dataset.packing.rows import Draw, Find, PackingState, Piece, Row, describe_rows, find_rows, whole


class FirstFitPacking:
    """Puts each piece into the first row with room for it; documents longer than a row are cut into pieces.

    Several rows (bins) are open at a time. If a piece fits into none of them, the fullest row is finished and replaced.

    Args:
        length: The number of tokens in a row.
        num_bins: The number of open rows; with 0, every piece is a row of its own.
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
            self._rest = whole(document)
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
        """Return the open rows, the finished rows, and the remainder of a document."""
        rest = [[] if self._rest is None else [self._rest]]
        return {
            "bins": describe_rows(self._bins),
            "finished": describe_rows(self._finished),
            "rest": describe_rows(rest),
        }

    def set_state(self, state: PackingState, find: Find) -> None:
        """Restore these rows."""
        self._set_bins(find_rows(state["bins"], find))
        self._finished = deque(find_rows(state["finished"], find))
        (rest,) = find_rows(state["rest"], find)
        self._rest = rest[0] if rest else None
