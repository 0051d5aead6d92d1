"""LiveRows: reads the rows of a shard's tables while pushes change them.

Owns the log of changes, and the order of keys in which buckets are read. Each call reads at most PIECE_BYTES and is
made under the shard's lock, except `sorted_rows`. Changes no row.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.errors import UnknownVariable
from parashard.plan.embedding import BUCKET_BITS, BUCKETS, KEY_BYTES, Keys, buckets_of
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.variables import Float32s
from parashard_server.state.rows.row_index import ABSENT
from parashard_server.state.rows.row_memory import RowMemory
from parashard_server.state.rows.table_rows import TableRows

PIECE_BYTES = 1 << 20
IDLE_LOOKS_MAX = 256
"""Calls of `changes` after which orders that were not used meanwhile are discarded."""
ITEMS_LEAST = 1 << 22
"""Bound of the log's items, or the number of rows if that is more; an item is four bytes for a changed row."""
ITEMS_OF_A_NOTE = 64
"""Overhead of a note, counted in items."""


class Noted(NamedTuple):
    """Changed records of a table, or keys whose records were removed."""

    position: int
    table: str
    rows: NDArray[np.uint32]
    gone: Keys

    @property
    def items(self) -> int:
        """Number of records or keys."""
        return len(self.rows) + len(self.gone)


NO_ROWS: NDArray[np.uint32] = np.empty(0, np.uint32)
NO_KEYS: Keys = np.empty(0, np.uint64)


class RowNotes:
    """A bounded log of changed references and removed keys, from a first reader's request on.

    When it is full, its older half is dropped, or all of it if no reader has asked since: then nothing is noted until a
    reader asks again. Each item has a unique position. The bound is `most()` items, and at least `ITEMS_LEAST`.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._noted: list[Noted] | None = None  # None: nothing is noted
        self._first = 1
        self._used = 0
        self._asked = False
        self.end = 1

    def begin(self) -> int:
        """Note changes from now on, if they are not noted already; return the position of the next one."""
        self._asked = True
        if self._noted is None:
            self._noted, self._first, self._used = [], self.end, 0
        return self.end

    def moved(self, table: str, rows: NDArray[np.uint32]) -> None:
        """Note records that a push changed; the array is kept."""
        if self._noted is not None:
            self._note(Noted(self.end, table, rows, NO_KEYS))

    def gone(self, table: str, keys: Keys) -> None:
        """Note keys whose records were removed; the array is kept."""
        if self._noted is not None:
            self._note(Noted(self.end, table, NO_ROWS, keys))

    def has(self, position: int) -> bool:
        """Return whether all changes since a position are noted."""
        self._asked = True
        return self._noted is not None and self._first <= position <= self.end

    def since(self, position: int) -> Iterator[Noted]:
        """Yield the notes from a position on, for which `has` is true; the first note is cut at the position."""
        assert self._noted is not None
        begin = max(0, bisect_right(self._noted, position, key=lambda noted: noted.position) - 1)
        for noted in itertools.islice(self._noted, begin, None):
            cut = max(0, position - noted.position)
            yield Noted(noted.position + cut, noted.table, noted.rows[cut:], noted.gone[cut:])

    def _note(self, noted: Noted) -> None:
        assert self._noted is not None
        if not noted.items:
            return
        self.end += noted.items
        self._noted.append(noted)
        self._used += ITEMS_OF_A_NOTE + noted.items
        if self._used <= max(ITEMS_LEAST, self._most()):
            return
        if not self._asked:
            self._noted = None
            return
        self._asked = False
        while self._used > max(ITEMS_LEAST, self._most()) // 2:
            half = len(self._noted) // 2 + 1
            self._used -= sum(ITEMS_OF_A_NOTE + old.items for old in self._noted[:half])
            del self._noted[:half]
        self._first = self._noted[0].position if self._noted else self.end


class RowsRead(NamedTuple):
    """Rows of a table at a moment, new arrays."""

    keys: Keys  # mixed, ascending, each once
    values: Float32s  # shape (rows, row_elements)
    last_use: NDArray[np.uint32]
    gone: Keys  # keys without a row, ascending, each once


class Changes(NamedTuple):
    """Rows that changed since a position, in their present state."""

    position: int  # up to where
    lost: bool  # the changes since the position are not known
    complete: bool  # no changes are left
    rows: Mapping[str, RowsRead]  # by table


class RowOrder(NamedTuple):
    """Records of a table in the order of the keys that they had at a position."""

    position: int
    keys: Keys
    rows: NDArray[np.uint32]

    def place(self, key: int) -> int:
        """Return the place of the first key that is not below `key`."""
        return int(np.searchsorted(self.keys, np.uint64(key)))

    def places(self, first: int, stop: int) -> tuple[int, int]:
        """Return the places of the keys of buckets [first, stop)."""
        shift = 64 - BUCKET_BITS
        return self.place(first << shift), len(self.keys) if stop == BUCKETS else self.place(stop << shift)

    def key_end(self, place: int) -> int:
        """Return the end of all records with the key before a place: a freed record may still have it, too."""
        return int(np.searchsorted(self.keys, self.keys[place - 1], side="right"))

    def bucket_within(self, first: int, stop: int, rows: int) -> int:
        """Return the end of the longest run of buckets from `first` with at most `rows` rows; at least one bucket."""
        begin, end = self.places(first, stop)
        if end - begin <= rows:
            return stop
        return min(stop, max(first + 1, int(buckets_of(self.keys[begin + rows : begin + rows + 1])[0])))


class LiveRows:
    """The rows of a shard's tables, for readers."""

    def __init__(self, tables: Mapping[str, TableRows]) -> None:
        self._tables = tables
        self._orders: dict[str, RowOrder] = {}
        self._idle_looks = 0
        self.notes = RowNotes(lambda: sum(table.rows for table in tables.values()))
        for name, table in tables.items():
            table.records.notes, table.records.noted_as = self.notes, name

    def changes(self, position: int, now: int) -> Changes:
        """Return rows that changed since a position, at most one piece; at 0 begin to note, and return none."""
        self._idle_looks += 1
        if self._idle_looks > IDLE_LOOKS_MAX:
            self._orders.clear()
        if not self.notes.has(position):
            return Changes(self.notes.begin(), position != 0, False, {})
        moved: dict[str, list[NDArray[np.uint32]]] = {}
        gone: dict[str, list[Keys]] = {}
        left_bytes = PIECE_BYTES
        for noted in self.notes.since(position):
            row_bytes = self.row_bytes(noted.table) if len(noted.rows) else KEY_BYTES
            some = min(noted.items, max(left_bytes // row_bytes, left_bytes == PIECE_BYTES))
            moved.setdefault(noted.table, []).append(noted.rows[:some])
            gone.setdefault(noted.table, []).append(noted.gone[:some])
            left_bytes -= row_bytes * some
            position = noted.position + some
            if some < noted.items:
                break
        read = {
            name: self._read(name, np.unique(np.concatenate(rows)), np.concatenate(gone[name]), now)
            for name, rows in moved.items()
        }
        return Changes(position, False, position == self.notes.end, read)

    def order(self, table: str, position: int) -> RowOrder | None:
        """Return a kept order that is not older than a position; None: one has to be made."""
        table_of(self._tables, table)
        self._idle_looks = 0
        order = self._orders.get(table)
        return order if order is not None and order.position >= position else None

    def records_of(self, table: str) -> tuple[int, RowMemory, int]:
        """Return the arguments of `sorted_rows`: a position, the table's memory and its number of records."""
        memory = table_of(self._tables, table).records.memory
        return self.notes.begin(), memory, memory.end

    def keep(self, table: str, order: RowOrder) -> None:
        """Keep an order for the calls that follow."""
        self._orders[table] = order

    def piece(self, table: str, order: RowOrder, begin: int, stop: int, now: int) -> RowsRead:
        """Return the rows at the places [begin, stop) of an order."""
        rows = order.rows[begin:stop]
        records = table_of(self._tables, table).records
        rows = rows[records.memory.keys_of(rows) == order.keys[begin:stop]]
        return self._rows(table, records.standing(rows, now)[0], NO_KEYS)

    def row_bytes(self, table: str) -> int:
        """Return the length of a row with its key."""
        return KEY_BYTES + ELEMENT_BYTES * (1 + table_of(self._tables, table).table.row_elements)

    def _read(self, name: str, rows: NDArray[np.uint32], gone: Keys, now: int) -> RowsRead:
        records = self._tables[name].records
        there, hidden = records.standing(rows, now)
        there = there[np.argsort(records.memory.keys_of(there))]
        gone = np.unique(np.concatenate([gone, records.memory.keys_of(hidden)]))
        return self._rows(name, there, gone[records.find(gone, now)[0] == ABSENT])

    def _rows(self, name: str, rows: NDArray[np.uint32], gone: Keys) -> RowsRead:
        table, memory = self._tables[name], self._tables[name].records.memory
        return RowsRead(memory.keys_of(rows), table.values_of(rows), memory.last_use_of(rows), gone)


def table_of(tables: Mapping[str, TableRows], name: str) -> TableRows:
    """Return a table by its name; UnknownVariable if the job has none of that name."""
    if name not in tables:
        raise UnknownVariable(f"table {name!r} is none of the job's: {', '.join(sorted(tables)) or 'none'}")
    return tables[name]


def sorted_rows(position: int, memory: RowMemory, end: int) -> RowOrder:
    """Return records in the order of their keys; without the lock: records reused meanwhile are noted."""
    rows = np.arange(end, dtype=np.uint32)
    keys = memory.keys_of(rows)
    places = np.argsort(keys, kind="stable")
    return RowOrder(position, keys[places], rows[places])
