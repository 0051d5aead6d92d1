"""Records: records by key, of which each is there from its first use until the rules end it.

Owns memory, index, and what checkpoints lack. What is gone by the rules is hidden from every search, and its record
swept later, a few with each push; while a checkpoint is saved no record that it may need is used again. Knows no
gradient, no step and no lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.row_files import StoredRows
from parashard.plan.embedding import BUCKETS, Keys
from parashard.plan.row_rules import RowRules
from parashard.plan.variables import Float32s
from parashard_server.state.kernels import row_loops
from parashard_server.state.rows.row_index import ABSENT, RowIndex
from parashard_server.state.rows.row_memory import KEPT, HottestKeys, References, Region, RowMemory, RowValues
from parashard_server.state.rows.row_saving import RowSaving

if TYPE_CHECKING:
    from parashard_server.state.rows.live_rows import RowNotes

MOVED_LEAST = 1 << 20  # records that moved are noted for the next increment; more than there are: it is whole
SWEPT_LEAST = 1024  # records that a sweep looks at
SWEPT_SHARE = 3  # and for each record that came to be: those that are gone must not outnumber the others
GONE_LEAST = 1 << 20  # keys of ended records that are remembered for the next increment; beyond that it is whole
LEFT_OF_TEN = 9
_NEVER = np.iinfo(np.int64).max


class Records:
    """Records of a table's keys in some buckets.

    `values` says how values lie in them, and `slots` what is behind these, with the elements of each. A rule by norm
    needs float32.
    """

    def __init__(
        self,
        values: RowValues,
        slots: Mapping[str, int],
        rows_max: int,
        rules: RowRules,
        buckets: tuple[int, int] = (0, BUCKETS),
    ) -> None:
        self.parts = np.array([values.words, *slots.values()], np.int64)  # elements of the values, then of each slot
        self.memory = RowMemory(int(self.parts.sum()), rows_max)
        self.swept = 0  # how many records the rules have ended
        self.rules = rules
        # The keys that were used the most, where records have values.
        self.hottest = HottestKeys(KEPT if values.words else 0)
        self._values, self._slots = values, slots
        self._index = RowIndex(self.memory, buckets)
        self._limits = np.array([rules.evict_norm_below**2])
        self._at = 0  # where the next sweep begins
        self._cut = 0  # time of the last cut
        self._saved_until = 0  # time of the last one that is stored
        self._moved = References()  # records that moved since the last cut, each once but for those that were freed
        self._added_rows = 0  # since the last sweep
        self._gone: list[Keys] = []  # keys whose records were ended since
        self._waiting: list[NDArray[np.uint32]] = []  # those of a save that is not stored yet
        self._gone_keys = 0
        self._waiting_gone: list[Keys] = []
        self._waiting_whole = False
        self._saving: RowSaving | None = None
        self._ended: list[NDArray[np.uint32]] = []  # records that were ended while a save may still need them
        self._ended_rows = 0
        self._is_ended: NDArray[np.uint8] = Region(rows_max, dense=False).view(np.uint8)  # 1 for these
        self.whole_due = False  # whether the next save has to be of all records: more were ended than are remembered
        self.notes: RowNotes | None = None  # told of every change, under the name `noted_as`, for readers
        self.noted_as = ""

    @property
    def rows(self) -> int:
        """Number of keys with a record; some may be gone by the rules."""
        return self.memory.end - self.memory.free - self._ended_rows

    @property
    def grown_places(self) -> int:
        """How many places of the index came with its growth."""
        return self._index.grown_places

    @property
    def moved_rows(self) -> int:
        """Number of records that moved since the last save that is stored; those of one under way may count twice."""
        return sum(map(len, self._waiting)) + len(self._moved)

    @property
    def memory_bytes(self) -> int:
        """Memory of records and index."""
        return self.memory.end * self.memory.record_bytes + self._index.memory_bytes

    def find(self, keys: Keys, now: int) -> tuple[NDArray[np.uint32], int, NDArray[np.uint32] | None]:
        """Return the reference of each key's record, ABSENT where it has none or it is gone, and how many have none."""
        # The third is None where no record is gone; else the references with those that are.
        found, absent = self._index.find(keys)
        if not self.rules.ends_rows or absent == len(found):
            return found, absent, None
        visible = found.copy()
        hidden = self._hide(visible, now)
        return visible, absent + hidden, found if hidden else None

    def standing(self, rows: NDArray[np.uint32], now: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return which of some records are there at a time, and which are gone by the rules and not swept yet."""
        rows = rows[~self.memory.is_free(rows) & (self._is_ended[rows] == 0)]
        if not self.rules.ends_rows:
            return rows, rows[:0]
        seen = rows.copy()
        self._hide(seen, now)
        return rows[seen != ABSENT], rows[seen == ABSENT]

    def read(self, keys: Keys, now: int, values: Float32s) -> tuple[NDArray[np.uint32], int]:
        """Find as `find` does, and copy the values found to the beginning of `values`, which has room for all keys."""
        if not self.rules.ends_rows:
            return self._index.read(keys, values)
        found, absent, _ = self.find(keys, now)
        rows = found[found != ABSENT]
        row_loops.gather_rows(
            rows, self.memory.words, values[: len(rows) * self._values.words], self.parts[:1], self._sizes
        )
        return found, absent

    def add(self, keys: Keys) -> NDArray[np.uint32]:
        """Make records of keys that have none, and return their references; t and last use are 0, floats are any."""
        if self._is_saving and self.memory.end + len(keys) > self.memory.rows_max:
            assert self._saving is not None
            self._saving.given_up = True  # this push needs the records
            self._release()
        rows = self.memory.add(keys, reuse=not self._is_saving)
        self._index.enter(keys, rows)
        self._added_rows += len(rows)
        return rows

    def keep(self, rows: NDArray[np.uint32]) -> None:
        """Keep what a save that is under way still lacks of records; before they change."""
        if self._saving is not None:
            self._saving.keep(rows)
            if self._saving.given_up:
                self._release()

    def use(self, rows: NDArray[np.uint32], clock: int) -> None:
        """Count a use of these records, each once, and note that they moved."""
        first = np.empty(len(rows), np.uint32)
        sizes = np.array([self.memory.stride, clock, self._cut], np.int64)
        hottest = self.hottest
        if self.notes is not None:
            self.notes.moved(self.noted_as, rows)
        moved = row_loops.use_rows(
            rows, self.memory.headers, first, self.memory.keys, hottest.keys, hottest.counts, sizes
        )
        if moved and not self.whole_due:
            self._moved.note(first[:moved])
            if len(self._moved) > max(MOVED_LEAST, self.memory.end):
                self._moved, self.whole_due = References(), True

    def most_used(self, now: int) -> list[tuple[int, int]]:
        """Return mixed keys whose records were used the most often, and how often since each began; most first."""
        keys = self.hottest.noted()
        found, _, _ = self.find(keys, now)
        there = found != ABSENT
        return self.hottest.update(keys[there], self.memory.t_of(found[there]))

    def remove(self, rows: NDArray[np.uint32]) -> None:
        """End records: their keys have none any more."""
        if not len(rows):
            return
        keys = self.memory.keys_of(rows)
        self._index.remove(keys)
        if self.notes is not None:
            self.notes.gone(self.noted_as, keys)
        self._gone.append(keys)
        self._gone_keys += len(keys)
        if self._gone_keys > max(GONE_LEAST, self.rows):
            self._gone, self._gone_keys, self.whole_due = [], 0, True
        self._ended.append(rows)
        self._ended_rows += len(rows)
        self._is_ended[rows] = 1
        if not self._is_saving:
            self._release()

    def sweep(self, now: int) -> None:
        """Free some records that are gone by the rules, the more the more came to be since the last time."""
        if self.rules.ends_rows:
            stop = min(self.memory.end, self._at + SWEPT_LEAST + SWEPT_SHARE * self._added_rows)
            self._added_rows = 0
            self._sweep(self._at, stop, now)
            self._at = 0 if stop == self.memory.end else stop

    def sweep_all(self, now: int) -> None:
        """Free all records that are gone by the rules."""
        if self.rules.ends_rows:
            self._sweep(0, self.memory.end, now)

    def evict(self, now: int) -> None:
        """Where there are more records than the rules want, end some of them."""
        most = self.rules.evict_above_rows
        if most is None or self.rows <= most:
            return
        self.sweep_all(now)
        if self.rows <= most:
            return
        rows = self._live()
        memory = self.memory
        by = memory.last_use_of(rows) if self.rules.evict_first == "lru" else memory.t_of(rows)
        count = len(rows) - max(1, most * LEFT_OF_TEN // 10)
        last = np.partition(by, count - 1)[count - 1]
        tied = rows[by == last]
        tied = tied[np.argsort(memory.keys_of(tied))]
        first = rows[by < last]
        out = np.concatenate([first, tied[: count - len(first)]])
        self.swept += len(out)
        self.remove(out)

    def cut(self, clock: int, *, whole: bool) -> RowSaving:
        """Begin to save the records as they are at a time: all, or those that moved since the last save."""
        # An earlier save that has not ended is over.
        self._release()
        self._waiting, self._moved = [*self._waiting, *self._moved.arrays()], References()
        self._waiting_gone, self._gone, self._gone_keys = [*self._waiting_gone, *self._gone], [], 0
        self._waiting_whole, self.whole_due = whole, False
        self._cut = clock
        self._saving = RowSaving(
            self.memory,
            tuple(self._waiting),
            whole,
            () if whole else tuple(self._waiting_gone),
            0 if whole else self._saved_until + 1,
            clock,
            self._values,
            self._slots,
        )
        return self._saving

    def ended(self, saving: RowSaving, clock: int, *, stored: bool) -> None:
        """Take note that a save is over; what one that is not stored had comes into the next one."""
        if self._saving is not saving:
            return
        self._saving = None
        self._release()
        if stored:
            self._saved_until = clock
        else:
            self._moved.take_back(self._waiting)
            self._gone = [*self._waiting_gone, *self._gone]
            self._gone_keys = sum(map(len, self._gone))
            self.whole_due |= self._waiting_whole
        self._waiting, self._waiting_gone = [], []

    def restored(self, clock: int, *, saved: bool) -> None:
        """Take note of the time of a restored checkpoint; `saved`: the next one may be an increment of it."""
        self._cut = clock
        self._saved_until = clock if saved else 0

    def restore(self, stored: StoredRows, values: Float32s) -> None:
        """Take records of a checkpoint, whose keys have none here; `values` are theirs in words."""
        rows = self.memory.add(stored.keys)
        self._index.enter(stored.keys, rows)
        self.memory.set_use(rows, stored.t, stored.last_use)
        self.hottest.of_checkpoint(stored.keys, stored.t)
        parts = np.concatenate([values, *(stored.slots[slot].reshape(-1) for slot in self._slots)])
        row_loops.scatter_rows(rows, self.memory.words, parts, self.parts, self._sizes)

    def _sweep(self, begin: int, end: int, now: int) -> None:
        if begin == end:
            return
        rows = np.arange(begin, end, dtype=np.uint32)
        seen = rows.copy()
        if self._ended_rows:
            seen[self._is_ended[begin:end] == 1] = ABSENT
        before = seen == ABSENT
        if self._hide(seen, now):
            out = rows[(seen == ABSENT) & ~before]
            self.swept += len(out)
            self.remove(out)

    def _hide(self, rows: NDArray[np.uint32], now: int) -> int:
        rules = self.rules
        unused = _NEVER if rules.evict_unused_steps is None else rules.evict_unused_steps
        sizes = np.array([self.memory.stride, self._values.words, now, unused, rules.norm_checked_at(now)], np.int64)
        return int(row_loops.hide_rows(rows, self.memory.headers, self.memory.words, sizes, self._limits))

    def _live(self) -> NDArray[np.uint32]:
        rows = np.arange(self.memory.end, dtype=np.uint32)
        live: NDArray[np.uint32] = rows[~self.memory.is_free(rows) & (self._is_ended[: self.memory.end] == 0)]
        return live

    def _release(self) -> None:
        """Free records that were ended; no save needs them any more."""
        for rows in self._ended:
            self.memory.give_back(rows)
            self._is_ended[rows] = 0
        self._ended, self._ended_rows = [], 0

    @property
    def _is_saving(self) -> bool:
        return self._saving is not None and not self._saving.given_up

    @property
    def _sizes(self) -> NDArray[np.int64]:
        return np.array([self.memory.stride], np.int64)
