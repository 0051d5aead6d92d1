"""Buffers: several memory areas treated as one byte sequence, to be sent or filled without an intermediate copy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Buffers:
    """A run of bytes in pieces: contiguous buffers in order, not copied; writable if they are to be filled."""

    def __init__(self, pieces: Iterable[memoryview | bytes | bytearray] = ()) -> None:
        views = [memoryview(piece) for piece in pieces]
        self.pieces: tuple[memoryview, ...] = tuple(view.cast("B") for view in views if view.nbytes)
        self._starts = (0, *accumulate(piece.nbytes for piece in self.pieces))
        self.nbytes = self._starts[-1]

    def whole(self) -> memoryview:
        """Return the run as one view; only several pieces are copied."""
        return self.pieces[0] if len(self.pieces) == 1 else memoryview(b"".join(self.pieces))

    def run(self, begin: int, end: int) -> Sequence[memoryview]:
        """Return views of the bytes [begin, end), in order, or raise ValueError if they are not all in the run."""
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(f"bytes [{begin}, {end}) are not within {self.nbytes}")
        views = []
        index = bisect_right(self._starts, begin) - 1
        while begin < end:
            start, piece = self._starts[index], self.pieces[index]
            stop = min(end, start + piece.nbytes)
            views.append(piece[begin - start : stop - start])
            begin, index = stop, index + 1
        return views
