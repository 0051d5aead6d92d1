"""Regions of virtual memory that are committed on first use, and records of rows in one.

A region never moves and is never copied to grow, so that a row's address never changes. Also lists of changed records,
and the most often pushed keys. Knows no index and no arithmetic.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import Keys, RowDtype, floats_of, kept_as, kept_dtype
from parashard.plan.variables import Float32s

HEADER_BYTES = 16
"""Of a record: the key (uint64), t (uint32), last use (uint32)."""
HUGE_BYTES = 2 << 20
"""A large page."""
_MAP_NORESERVE = 0x4000  # Linux: reserve no swap space; Python names it from 3.13 on


class Region:
    """Zeroed memory of a fixed length; the kernel allocates each page on its first write.

    `dense`: the region is filled from its beginning on, and uses large pages if the kernel has some, which makes random
    reads of many rows about twice as fast; its first `small_bytes` use small pages.
    """

    def __init__(self, size_bytes: int, *, dense: bool = True, small_bytes: int = 0) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, size_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{size_bytes:,} bytes of addresses for rows of a table: {error}") from error
        before = np.frombuffer(self._map, np.uint8).ctypes.data % HUGE_BYTES  # the region begins within a large page
        self._first = min(small_bytes + -before % HUGE_BYTES, size_bytes)  # large pages begin here
        self._unused = np.zeros(-(-(size_bytes - self._first) // HUGE_BYTES), np.uint32)  # bytes of each
        begin = self._first if small_bytes else 0
        if dense and begin < size_bytes:
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, begin // mmap.PAGESIZE * mmap.PAGESIZE)

    def view(self, dtype: Any) -> NDArray[Any]:
        """Return the whole region as an array, shape (items,)."""
        size_bytes = len(self._map) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize
        return np.frombuffer(memoryview(self._map)[:size_bytes], dtype)

    def give_back(self, begin: int, end: int) -> None:
        """Release bytes [begin, end), which were in use, for ever."""
        # A large page is returned to the kernel only when none of it is in use: returning a part would split the rest
        # into small pages, where reads are slower.
        within = min(end, self._first)
        first, stop = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, within // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)
        begin = max(begin, within)
        while begin < end:
            page = (begin - self._first) // HUGE_BYTES
            first = self._first + page * HUGE_BYTES
            stop = min(end, first + HUGE_BYTES)
            self._unused[page] += stop - begin
            if self._unused[page] == HUGE_BYTES:
                self._map.madvise(mmap.MADV_DONTNEED, first, HUGE_BYTES)
            begin = stop

    @property
    def unused_bytes(self) -> int:
        """Released bytes in large pages that are partly in use, and so still take memory."""
        return int(self._unused[self._unused < HUGE_BYTES].sum())


FREE = np.uint32(0xFFFFFFFF)
"""In place of the last use: the record is free."""


class RowMemory:
    """At most `rows_max` records of equal length, each a header and `elements` floats of a row and its slots.

    `words`, `keys` and `headers` are the same memory: all records end to end, each `stride` floats long. Records below
    `end` are or were in use; `free` of them are free.
    """

    def __init__(self, elements: int, rows_max: int) -> None:
        self.stride = HEADER_BYTES // 4 + elements + elements % 2  # a key begins at a multiple of 8 bytes
        self.rows_max = rows_max
        self.end = 0
        region = Region(rows_max * self.stride * 4)
        self.words: Float32s = region.view(np.float32)
        self.keys: Keys = region.view(np.uint64)
        self.headers: NDArray[np.uint32] = region.view(np.uint32)
        self._by_row = self.headers.reshape(rows_max, self.stride)
        self._free: NDArray[np.uint32] = Region(4 * rows_max, dense=False).view(np.uint32)  # the first `free` of it
        self.free = 0

    @property
    def record_bytes(self) -> int:
        """Length of a record."""
        return self.stride * 4

    def add(self, keys: Keys, *, reuse: bool = True) -> NDArray[np.uint32]:
        """Allocate records for keys, with t and last use 0, and return their references; `reuse`: free ones first."""
        again = min(len(keys), self.free) if reuse else 0
        self.free -= again
        rows = self._free[self.free : self.free + again]
        begin, self.end = self.end, self.end + len(keys) - again
        assert self.end <= self.rows_max, f"{self.end} records; there is room for {self.rows_max}"
        rows = np.concatenate([rows, np.arange(begin, self.end, dtype=np.uint32)])
        self.keys.reshape(self.rows_max, self.stride // 2)[rows, 0] = keys
        self._by_row[rows[:again], 2:4] = 0
        return rows

    def give_back(self, rows: NDArray[np.uint32]) -> None:
        """Free records."""
        self._by_row[rows, 3] = FREE
        self._free[self.free : self.free + len(rows)] = rows
        self.free += len(rows)

    def is_free(self, rows: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return a mask of the free records."""
        free: NDArray[np.bool_] = self._by_row[rows, 3] == FREE
        return free

    def keys_of(self, rows: NDArray[np.uint32]) -> Keys:
        """Return the keys of rows."""
        keys: Keys = self.keys.reshape(self.rows_max, self.stride // 2)[rows, 0]
        return keys

    def set_use(self, rows: NDArray[np.uint32], t: NDArray[np.uint32], last_use: NDArray[np.uint32]) -> None:
        """Set rows' number of pushes (t), and the time of the last one."""
        self._by_row[rows, 2], self._by_row[rows, 3] = t, last_use

    def forget_use(self, rows: NDArray[np.uint32]) -> None:
        """Reset the t of rows to 0."""
        self._by_row[rows, 2] = 0

    def t_of(self, rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return each row's number of pushes."""
        counts: NDArray[np.uint32] = self._by_row[rows, 2]
        return counts

    def last_use_of(self, rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the time of each row's last push."""
        times: NDArray[np.uint32] = self._by_row[rows, 3]
        return times


ARRAY_ITEMS = 1 << 16


class References:
    """References of records in the order in which they were noted, possibly with repetitions."""

    def __init__(self) -> None:
        self._full: list[NDArray[np.uint32]] = []
        self._full_items = 0
        self._last = np.empty(ARRAY_ITEMS, np.uint32)
        self._used = 0  # items of the last array

    def __len__(self) -> int:
        return self._full_items + self._used

    def note(self, rows: NDArray[np.uint32]) -> None:
        """Append a copy of references."""
        begin = 0
        while begin < len(rows):
            some = rows[begin : begin + ARRAY_ITEMS - self._used]
            self._last[self._used : self._used + len(some)] = some
            self._used += len(some)
            begin += len(some)
            if self._used == ARRAY_ITEMS:
                self.take_back([self._last])
                self._last, self._used = np.empty(ARRAY_ITEMS, np.uint32), 0

    def take_back(self, arrays: Iterable[NDArray[np.uint32]]) -> None:
        """Append whole arrays, without a copy."""
        found = list(arrays)
        self._full += found
        self._full_items += sum(map(len, found))

    def arrays(self) -> list[NDArray[np.uint32]]:
        """Return all references; valid until more are noted."""
        return [*self._full, self._last[: self._used]]


class RowValues:
    """Layout of rows' values in records; an odd number of two-byte elements is padded with a zero half word."""

    def __init__(self, elements: int, dtype: RowDtype) -> None:
        self.name = dtype
        self.dtype = kept_dtype(dtype)
        self.words = elements if dtype == "float32" else -(-elements // 2)
        self.elements = elements

    def kept(self, words: Float32s, rows: int) -> NDArray[Any]:
        """Return a view of words as `rows` rows in the stored dtype, shape (rows, elements)."""
        wide: NDArray[Any] = words.view(self.dtype).reshape(rows, self.words * 4 // self.dtype.itemsize)
        return wide[:, : self.elements]

    def floats(self, words: Float32s) -> Float32s:
        """Return rows as one vector of float32; rows stored as float32 are the words themselves."""
        if self.dtype == np.float32:
            return words
        return floats_of(self.kept(words, len(words) // self.words)).reshape(-1)

    def put(self, floats: Float32s, words: Float32s) -> None:
        """Round rows to the stored dtype, into words; for float32 do nothing, as they are the words themselves."""
        if self.dtype != np.float32:
            rows = len(words) // self.words
            self.kept(words, rows)[:] = kept_as(floats, self.name).reshape(rows, self.elements)

    def words_of(self, rows: NDArray[Any]) -> Float32s:
        """Return rows of any dtype as words, end to end."""
        if self.dtype == np.float32:
            return np.ascontiguousarray(rows, np.float32).reshape(-1)
        words = np.zeros(len(rows) * self.words, np.float32)
        self.kept(words, len(rows))[:] = rows if rows.dtype == self.dtype else kept_as(floats_of(rows), self.name)
        return words


KEPT = 64


class HottestKeys:
    """The most often pushed keys of a table's rows, at most `kept` (0: none), and their numbers of pushes.

    A record has the number of its row's pushes (its t), so nothing is counted twice or estimated, and a restored shard
    knows as much as the one before it. A sketch of pushes would be less precise: a push has a key once, so the key's
    share of all pushed keys is at most 1 / (keys of a push), too little for a bounded number of counters to detect.

    `row_loops.use_rows` updates both arrays: a row whose t is above the least of them replaces that one. Removed rows
    are dropped, and the next rows pushed take their places.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.keys: Keys = np.zeros(kept, np.uint64)
        self.counts: NDArray[np.int64] = np.zeros(kept, np.int64)  # 0: the place is free

    def of_checkpoint(self, keys: Keys, t: NDArray[np.uint32]) -> None:
        """Merge rows of a checkpoint, whose keys are not among these."""
        kept = len(self.counts)
        if not kept or not len(keys):
            return
        most = np.argpartition(t, -kept)[-kept:] if len(t) > kept else np.arange(len(t))
        self._set(np.concatenate([self.keys, keys[most]]), np.concatenate([self.counts, t[most].astype(np.int64)]))

    def noted(self) -> Keys:
        """Return the keys, in no order."""
        return self.keys[self.counts > 0]

    def update(self, keys: Keys, t: NDArray[np.uint32]) -> list[tuple[int, int]]:
        """Replace the entries by these keys and t, of existing rows; return (key, t), the most often pushed first."""
        self._set(keys, t.astype(np.int64))
        order = np.lexsort((self.keys, -self.counts))
        return [(int(self.keys[at]), int(self.counts[at])) for at in order if self.counts[at]]

    def _set(self, keys: Keys, counts: NDArray[np.int64]) -> None:
        kept = len(self.counts)
        most = np.argsort(-counts, kind="stable")[:kept]
        self.keys[:], self.counts[:] = 0, 0
        self.keys[: len(most)], self.counts[: len(most)] = keys[most], counts[most]
