"""Records: a table's records by key, each of which exists from its first use until the rules evict it.

Owns memory, index, and the changes since the last checkpoint. Evicted records are invisible to look-ups, and are
removed later, a few with each push; while a checkpoint is being saved, no record that it may need is reused. Knows no
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

MOVED_LEAST = 1 << 20  # changed records noted for an increment (or all, if there are more); else the save is full
SWEPT_LEAST = 1024  # records that a sweep examines
SWEPT_SHARE = 3  # and for each record added since, so that evicted records do not outnumber the others
GONE_LEAST = 1 << 20  # removed keys noted for an increment (or all, if there are more); else the save is full
LEFT_OF_TEN = 9
_NEVER = np.iinfo(np.int64).max


class Records:
    """Records of a table's keys in some buckets.

    `values` is the layout of their values, and `slots` the elements of each slot behind these. Eviction by norm needs
    float32.
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
        self.evicted = 0  # number of records that the rules have evicted
        self.rules = rules
        # The most often used keys, if records have values.
        self.hottest = HottestKeys(KEPT if values.words else 0)
        self._values, self._slots = values, slots
        self._index = RowIndex(self.memory, buckets)
        self._limits = np.array([rules.evict_norm_below**2])
        self._at = 0  # where the next sweep begins
        self._cut = 0  # time of the last cut
        self._saved_until = 0  # time of the last stored one
        self._moved = References()  # records changed since the last cut, each once except freed ones
        self._added_rows = 0  # since the last sweep
        self._gone: list[Keys] = []  # keys removed since the last cut
        self._waiting: list[NDArray[np.uint32]] = []  # changed records in a save that is not stored yet
        self._gone_keys = 0
        self._waiting_gone: list[Keys] = []
        self._waiting_full = False
        self._saving: RowSaving | None = None
        self._removed: list[NDArray[np.uint32]] = []  # removed records that a save may still need
        self._removed_rows = 0
        self._is_removed: NDArray[np.uint8] = Region(rows_max, dense=False).view(np.uint8)  # 1 for these
        self.full_due = False  # the next save must be full: too many changes to note
        self.notes: RowNotes | None = None  # notes every change, under the name `noted_as`, for live readers
        self.noted_as = ""

    @property
    def rows(self) -> int:
        """Number of keys with a record, including evicted ones that are not swept yet."""
        return self.memory.end - self.memory.free - self._removed_rows

    @property
    def grown_places(self) -> int:
        """Number of places that the index has grown by."""
        return self._index.grown_places

    @property
    def moved_rows(self) -> int:
        """Number of records changed since the last stored save; those in a save in progress may count twice."""
        return sum(map(len, self._waiting)) + len(self._moved)

    @property
    def memory_bytes(self) -> int:
        """Memory of records and index."""
        return self.memory.end * self.memory.record_bytes + self._index.memory_bytes

    def find(self, keys: Keys, now: int) -> tuple[NDArray[np.uint32], int, NDArray[np.uint32] | None]:
        """Return each key's record reference, ABSENT if it has none or it is evicted, and the number of ABSENT ones."""
        # The third item is None if no record is evicted, else the references including evicted records.
        found, absent = self._index.find(keys)
        if not self.rules.ends_rows or absent == len(found):
            return found, absent, None
        visible = found.copy()
        hidden = self._hide(visible, now)
        return visible, absent + hidden, found if hidden else None

    def standing(self, rows: NDArray[np.uint32], now: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Split records into those that are visible at a time, and those evicted but not swept yet."""
        rows = rows[~self.memory.is_free(rows) & (self._is_removed[rows] == 0)]
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
        """Add records of keys that have none, and return their references; t and last use are 0, floats undefined."""
        if self._is_saving and self.memory.end + len(keys) > self.memory.rows_max:
            assert self._saving is not None
            self._saving.given_up = True  # this push needs the memory that the save holds
            self._release()
        rows = self.memory.add(keys, reuse=not self._is_saving)
        self._index.enter(keys, rows)
        self._added_rows += len(rows)
        return rows

    def keep(self, rows: NDArray[np.uint32]) -> None:
        """Copy those records that a save in progress still needs, before they change."""
        if self._saving is not None:
            self._saving.keep(rows)
            if self._saving.given_up:
                self._release()

    def use(self, rows: NDArray[np.uint32], clock: int) -> None:
        """Count one use of each record, and note it as changed."""
        first = np.empty(len(rows), np.uint32)
        sizes = np.array([self.memory.stride, clock, self._cut], np.int64)
        hottest = self.hottest
        if self.notes is not None:
            self.notes.moved(self.noted_as, rows)
        moved = row_loops.use_rows(
            rows, self.memory.headers, first, self.memory.keys, hottest.keys, hottest.counts, sizes
        )
        if moved and not self.full_due:
            self._moved.note(first[:moved])
            if len(self._moved) > max(MOVED_LEAST, self.memory.end):
                self._moved, self.full_due = References(), True

    def most_used(self, now: int) -> list[tuple[int, int]]:
        """Return the most often used mixed keys with the number of uses of their records, most first."""
        keys = self.hottest.noted()
        found, _, _ = self.find(keys, now)
        there = found != ABSENT
        return self.hottest.update(keys[there], self.memory.t_of(found[there]))

    def remove(self, rows: NDArray[np.uint32]) -> None:
        """Remove records from the index, and free them once no save needs them."""
        if not len(rows):
            return
        keys = self.memory.keys_of(rows)
        self._index.remove(keys)
        if self.notes is not None:
            self.notes.gone(self.noted_as, keys)
        self._gone.append(keys)
        self._gone_keys += len(keys)
        if self._gone_keys > max(GONE_LEAST, self.rows):
            self._gone, self._gone_keys, self.full_due = [], 0, True
        self._removed.append(rows)
        self._removed_rows += len(rows)
        self._is_removed[rows] = 1
        if not self._is_saving:
            self._release()

    def sweep(self, now: int) -> None:
        """Remove some evicted records; examine more of them, the more were added since the last sweep."""
        if self.rules.ends_rows:
            stop = min(self.memory.end, self._at + SWEPT_LEAST + SWEPT_SHARE * self._added_rows)
            self._added_rows = 0
            self._sweep(self._at, stop, now)
            self._at = 0 if stop == self.memory.end else stop

    def sweep_all(self, now: int) -> None:
        """Remove all records that the rules have evicted."""
        if self.rules.ends_rows:
            self._sweep(0, self.memory.end, now)

    def evict(self, now: int) -> None:
        """Above `evict_above_rows` records, remove the first ones by `evict_first` until nine tenths of it are left."""
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
        self.evicted += len(out)
        self.remove(out)

    def cut(self, clock: int, *, full: bool) -> RowSaving:
        """Begin a save of the records as of a time: of all, or of those that changed since the last save."""
        # It abandons an earlier save that has not ended.
        self._release()
        self._waiting, self._moved = [*self._waiting, *self._moved.arrays()], References()
        self._waiting_gone, self._gone, self._gone_keys = [*self._waiting_gone, *self._gone], [], 0
        self._waiting_full, self.full_due = full, False
        self._cut = clock
        self._saving = RowSaving(
            self.memory,
            tuple(self._waiting),
            full,
            () if full else tuple(self._waiting_gone),
            0 if full else self._saved_until + 1,
            clock,
            self._values,
            self._slots,
        )
        return self._saving

    def end_save(self, saving: RowSaving, clock: int, *, stored: bool) -> None:
        """End a save; if it was not stored, the next one includes its records."""
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
            self.full_due |= self._waiting_full
        self._waiting, self._waiting_gone = [], []

    def restored(self, clock: int, *, saved: bool) -> None:
        """Record the time of a restored checkpoint; `saved`: the next one may be an increment of it."""
        self._cut = clock
        self._saved_until = clock if saved else 0

    def restore(self, stored: StoredRows, values: Float32s) -> None:
        """Add records of a checkpoint, whose keys have none here; `values` are their values in words."""
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
        if self._removed_rows:
            seen[self._is_removed[begin:end] == 1] = ABSENT
        before = seen == ABSENT
        if self._hide(seen, now):
            out = rows[(seen == ABSENT) & ~before]
            self.evicted += len(out)
            self.remove(out)

    def _hide(self, rows: NDArray[np.uint32], now: int) -> int:
        rules = self.rules
        unused = _NEVER if rules.evict_unused_steps is None else rules.evict_unused_steps
        sizes = np.array([self.memory.stride, self._values.words, now, unused, rules.norm_checked_at(now)], np.int64)
        return int(row_loops.hide_rows(rows, self.memory.headers, self.memory.words, sizes, self._limits))

    def _live(self) -> NDArray[np.uint32]:
        rows = np.arange(self.memory.end, dtype=np.uint32)
        live: NDArray[np.uint32] = rows[~self.memory.is_free(rows) & (self._is_removed[: self.memory.end] == 0)]
        return live

    def _release(self) -> None:
        """Free removed records; no save needs them any more."""
        for rows in self._removed:
            self.memory.give_back(rows)
            self._is_removed[rows] = 0
        self._removed, self._removed_rows = [], 0

    @property
    def _is_saving(self) -> bool:
        return self._saving is not None and not self._saving.given_up

    @property
    def _sizes(self) -> NDArray[np.int64]:
        return np.array([self.memory.stride], np.int64)
