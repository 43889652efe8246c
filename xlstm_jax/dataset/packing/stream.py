"""Packing in which every row is an endless stream of documents."""

from collections import deque

from xlstm_jax.dataset.packing.rows import Draw, Find, PackingState, Piece, Row, describe_rows, find_rows, whole


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
        return None if document is None else whole(document)

    def get_state(self) -> PackingState:
        """Return what is left of the document of each row."""
        rest = [[] if piece is None else [piece] for piece in self._rest]
        return {"rest": describe_rows(rest), "homeless": describe_rows([[piece] for piece in self._homeless])}

    def set_state(self, state: PackingState, find: Find) -> None:
        """Take up these documents."""
        self._rest = [row[0] if row else None for row in find_rows(state["rest"], find)]
        self._homeless = deque(row[0] for row in find_rows(state["homeless"], find))
