"""Packing in which every row is an endless stream of documents."""

from collections import deque

from xlstm_jax.dataset.packing.rows import Draw, Find, PackingState, Piece, Row, describe_rows, find_rows, whole


class StreamPacking:
    """Every row is an endless stream: a document that reaches its end continues in the same row of the next batch.

    A row with room left takes a new document, and is padded only once there are no more documents. If a batch has fewer
    rows than the previous one, the documents of the removed rows continue in the first rows with room, with positions
    that restart there.

    Args:
        length: The number of tokens in a row.
    """

    def __init__(self, length: int):
        self._length = length
        self._remainders: list[Piece | None] = []
        self._displaced: deque[Piece] = deque()

    def fill(self, num_rows: int, draw: Draw) -> list[Row]:
        """Return the next rows."""
        self._displaced.extend(
            rest._replace(origin=rest.start) for rest in self._remainders[num_rows:] if rest is not None
        )
        self._remainders = [*self._remainders[:num_rows], *[None] * (num_rows - len(self._remainders))]
        return [self._fill_row(index, draw) for index in range(num_rows)]

    def _fill_row(self, index: int, draw: Draw) -> Row:
        row, room = [], self._length
        while room:
            rest = self._remainders[index] or self._next_remainder(draw)
            if rest is None:
                break
            stop = min(rest.start + room, rest.stop)
            row.append(rest._replace(stop=stop))
            room -= stop - rest.start
            self._remainders[index] = rest._replace(start=stop) if stop < rest.stop else None
        return row

    def _next_remainder(self, draw: Draw) -> Piece | None:
        if self._displaced:
            return self._displaced.popleft()
        document = draw()
        return None if document is None else whole(document)

    def get_state(self) -> PackingState:
        """Return the remainder of the document of each row, and those of rows that no longer exist."""
        remainders = [[] if piece is None else [piece] for piece in self._remainders]
        # "homeless" is the key of the displaced documents in saved states.
        return {"rest": describe_rows(remainders), "homeless": describe_rows([[piece] for piece in self._displaced])}

    def set_state(self, state: PackingState, find: Find) -> None:
        """Restore these remainders."""
        self._remainders = [row[0] if row else None for row in find_rows(state["rest"], find)]
        self._displaced = deque(row[0] for row in find_rows(state["homeless"], find))
