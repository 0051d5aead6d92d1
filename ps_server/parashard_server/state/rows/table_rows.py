"""TableRows: the rows of one embedding table on one shard.

A row has its initializer's values until it is first pushed, and takes memory from then on (P27), if the table's rules
admit it (P29). Rows are updated by the kernels of dense variables: the pushed rows and their slots are gathered into
vectors, updated, and scattered back. Knows no step, no message and no lock. `ReferenceRows` in the tests is a readable
reference implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.row_files import StoredRows
from parashard.errors import DamagedCheckpoint, JobFailed
from parashard.plan.embedding import (
    BUCKETS,
    EmbeddingTable,
    KeyedRows,
    Keys,
    candidates_of,
    dtype_name,
    first_rows,
    floats_of,
    unmixed,
)
from parashard.plan.row_rules import Chance
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import FoundRows
from parashard_server.state.kernels import row_loops
from parashard_server.state.optimizer import NOTHING_BEFORE, Before, Optimizer, RowTimes
from parashard_server.state.rows.records import Records
from parashard_server.state.rows.row_index import ABSENT
from parashard_server.state.rows.row_memory import RowValues

SCRATCH_ROWS = 1 << 15  # rows that are gathered, updated and scattered at once: their vectors stay in the cache
HOTTEST_MAX = 5  # most often pushed keys that are reported
NO_VALUES = RowValues(0, "float32")


class TableRows:
    """The rows of a table whose keys are in the half-open range `buckets`."""

    def __init__(
        self,
        table: EmbeddingTable,
        seed: int,
        buckets: tuple[int, int] = (0, BUCKETS),
        before: Before = NOTHING_BEFORE,
    ) -> None:
        self.table = table
        # Counters: rows added, keys pulled and those that had a row, bytes pulled and pushed with their keys.
        self.added_rows = self.pulled_keys = self.pulled_rows = self.pulled_bytes = self.pushed_bytes = 0
        rules = table.rules
        self._first_rows = first_rows(table, seed)
        self._optimizer = Optimizer(table.optimizer, by_row=True, before=before)
        self._variable = Variable(table.name, (1,))
        slots = dict.fromkeys(self._optimizer.slots, table.slot_elements)
        self._values = RowValues(table.row_elements, table.dtype)
        self.records = Records(self._values, slots, table.rows_max, rules, buckets)
        counting = rules.admit_after > 1  # of keys that have no row yet
        self.candidates = Records(NO_VALUES, {}, table.rows_max, rules.of_candidates(), buckets) if counting else None
        self._chance = Chance(seed, table.name, rules.admit_probability) if rules.admit_probability < 1.0 else None
        self._sizes = np.array([self.records.memory.stride], np.int64)
        self._scratch: Float32s = np.empty(0, np.float32)

    @property
    def rows(self) -> int:
        """Number of rows, including evicted ones that are not swept yet."""
        return self.records.rows

    @property
    def counted_keys(self) -> int:
        """Number of candidates: keys that are counted and have no row yet."""
        return 0 if self.candidates is None else self.candidates.rows

    @property
    def memory_bytes(self) -> int:
        """Memory of rows, slots, headers and indexes."""
        return sum(records.memory_bytes for records in self.saved.values())

    @property
    def saved(self) -> dict[str, Records]:
        """The table's records that checkpoints save, by their names there."""
        found = {self.table.name: self.records}
        if self.candidates is not None:
            found[candidates_of(self.table.name)] = self.candidates
        return found

    def check_room(self, pushed: Sequence[Keys], now: int) -> None:
        """Raise JobFailed if pushes need more rows than `rows_max`."""
        most = sum(map(len, pushed))
        for records in self.saved.values():
            if records.rows + most <= self.table.rows_max:
                continue
            records.sweep_all(now)
            keys = np.unique(np.concatenate(pushed))
            without_row = keys[self.records.find(keys, now)[0] == ABSENT]
            new_rows = records.find(without_row, now)[1]
            if records.rows + new_rows > self.table.rows_max:
                what = "rows" if records is self.records else "keys that have no row yet"
                raise JobFailed(
                    f"table {self.table.name!r} has {records.rows:,} {what} on this shard, of at most "
                    f"{self.table.rows_max:,}: no room for {new_rows:,} more; raise tables.{self.table.name}.rows_max, "
                    "or use more shards, and resume"
                )

    def pull(self, keys: Keys, now: int) -> FoundRows:
        """Return the rows of mixed keys that exist at a time; valid until the next call."""
        words = self._room(len(keys) * self._values.words)
        found, absent = self.records.read(keys, now, words)
        rows = len(keys) - absent
        self.pulled_keys += len(keys)
        self.pulled_rows += rows
        found_rows = FoundRows(found != ABSENT, self._values.kept(words[: rows * self._values.words], rows))
        self.pulled_bytes += keys.nbytes + -(-len(keys) // 8) + found_rows.values.nbytes
        return found_rows

    def values_of(self, rows: NDArray[np.uint32]) -> Float32s:
        """Return the values of records in float32, shape (rows, row_elements), a new array."""
        kept = self._values.kept(self._words(rows, 1), len(rows))
        return kept.copy() if kept.dtype == np.float32 else floats_of(kept)

    def push(
        self,
        keys: Keys,
        gradients: Float32s,
        *,
        clock: int,
        scale: float = 1.0,
        learning_rate: float | None = None,
    ) -> None:
        """Update the rows of mixed keys by their finite gradients; add missing rows if the rules admit them.

        `clock` is the number of applied steps (in sync mode: rounds) with this one, at least 1: the schedule's t.
        `scale` and `learning_rate` are as in `Storage.apply`.
        """
        found, absent, gone = self.records.find(keys, clock - 1)
        if absent:
            new = found == ABSENT
            admitted = self._admitted(keys, new, clock)
            if gone is not None:
                self._reset_evicted(found, gone, new & admitted, new & ~admitted)
                new = new & (found == ABSENT)
            if not admitted.all():
                keys, gradients, found, new = keys[admitted], gradients[admitted], found[admitted], new[admitted]
            self.records.keep(found[~new])
            found[new] = self._added(keys[new])
        else:
            self.records.keep(found)
        self.records.use(found, clock)
        flat = gradients.reshape(-1)
        parts = self.records.parts
        for begin in range(0, len(found), SCRATCH_ROWS):
            rows = found[begin : begin + SCRATCH_ROWS]
            words = self._words(rows, len(parts))
            kept, *slots = np.split(words, np.cumsum(parts[:-1]) * len(rows))
            weights, first = self._values.floats(kept), begin * self._row_elements
            self._optimizer.update(
                weights,
                flat[first : first + len(weights)],
                dict(zip(self._optimizer.slots, slots, strict=True)),
                t=RowTimes(clock, self.records.memory.t_of(rows)) if self._optimizer.counts else clock,
                scale=scale,
                variable=self._variable,
                learning_rate=learning_rate,
            )
            self._values.put(weights, kept)
            row_loops.scatter_rows(rows, self.records.memory.words, words, parts, self._sizes)
        for records in self.saved.values():
            records.evict(clock)
        self.sweep(clock)

    def sweep(self, now: int) -> None:
        """Remove some records that the rules have evicted."""
        for records in self.saved.values():
            records.sweep(now)

    def hottest_keys(self, now: int) -> list[tuple[int, int]]:
        """Return the most often pushed keys, as the user gave them, and the number of pushes of their rows."""
        found = self.records.most_used(now)[:HOTTEST_MAX]
        keys = unmixed(np.array([key for key, _ in found], np.uint64))
        return list(zip(keys.tolist(), (pushes for _, pushes in found), strict=True))

    def restore(self, name: str, stored: StoredRows, now: int) -> None:
        """Add a checkpoint's rows or candidates, depending on the name; their keys have none here."""
        records = self.saved[name]
        values = self._values if records is self.records else NO_VALUES
        slots = dict.fromkeys(self._optimizer.slots, self.table.slot_elements) if records is self.records else {}
        due = (values.elements, values.name, slots)
        found = (
            stored.values.shape[1],
            dtype_name(stored.values.dtype),
            {slot: part.shape[1] for slot, part in stored.slots.items()},
        )
        if found != due:
            raise DamagedCheckpoint(
                f"table {self.table.name!r} has rows of {found[0]} elements in {found[1]} with the slots {found[2]} "
                f"(name and elements); due: {due[0]}, {due[1]} and {due[2]}"
            )
        self.check_room([stored.keys], now)
        records.restore(stored, values.words_of(stored.values))

    def begin_with(self, rows: KeyedRows) -> None:
        """Add a job's initial rows, with their optimizer state or a new one; their keys have no row here yet."""
        if rows.values.shape[1] != self._row_elements:
            raise DamagedCheckpoint(
                f"table {self.table.name!r} begins with rows of {rows.values.shape[1]} elements; due: "
                f"{self._row_elements}"
            )
        self.check_room([rows.keys], 0)
        never = np.zeros(len(rows.keys), np.uint32)
        slots = {slot: rows.slots.get(slot, self._new_slot(slot, len(rows.keys))) for slot in self._optimizer.slots}
        stored = StoredRows(rows.keys, never if rows.t is None else rows.t, never, rows.values, slots)
        self.records.restore(stored, self._values.words_of(rows.values))

    def _new_slot(self, slot: str, rows: int) -> Float32s:
        return np.full((rows, self.table.slot_elements), self._optimizer.initial_values[slot], np.float32)

    def _admitted(self, keys: Keys, new: NDArray[np.bool_], clock: int) -> NDArray[np.bool_]:
        """Return a mask of the keys whose row a push updates: it exists, or the rules admit it now."""
        admitted = np.ones(len(keys), np.bool_)
        if self._chance is not None:
            admitted[new] = self._chance.admits(keys[new], clock)
        if self.candidates is not None:
            asked = np.flatnonzero(new & admitted)
            admitted[asked] = self._counted(keys[asked], clock)
        return admitted

    def _counted(self, keys: Keys, clock: int) -> NDArray[np.bool_]:
        """Count a use of keys without rows; return a mask of those with `admit_after` uses, no longer candidates."""
        candidates, due = self.candidates, self.table.rules.admit_after
        assert candidates is not None
        found, absent, gone = candidates.find(keys, clock - 1)
        if gone is not None:
            again = (found == ABSENT) & (gone != ABSENT)
            candidates.keep(gone[again])
            candidates.memory.forget_use(gone[again])
            found[again] = gone[again]
            absent -= int(again.sum())
        candidates.keep(found[found != ABSENT])
        if absent:
            new = found == ABSENT
            found[new] = candidates.add(keys[new])
        candidates.use(found, clock)
        enough: NDArray[np.bool_] = candidates.memory.t_of(found) >= due
        candidates.remove(found[enough])
        return enough

    def _reset_evicted(
        self,
        found: NDArray[np.uint32],
        gone: NDArray[np.uint32],
        admitted: NDArray[np.bool_],
        refused: NDArray[np.bool_],
    ) -> None:
        """Reset evicted rows that are pushed again to initial values, in place; remove those that are not admitted."""
        held = gone != ABSENT
        again, over = gone[admitted & held], gone[refused & held]
        self.records.evicted += len(again) + len(over)
        self.added_rows += len(again)
        self.records.keep(again)
        self.records.memory.forget_use(again)
        self._set(again, self._first_rows(self.records.memory.keys_of(again)))
        found[admitted & held] = again
        self.records.remove(over)

    def _added(self, keys: Keys) -> NDArray[np.uint32]:
        """Add rows of keys that have none, and return their references."""
        rows = self.records.add(keys)
        self.added_rows += len(keys)
        self._set(rows, self._first_rows(keys))
        return rows

    def _set(self, rows: NDArray[np.uint32], values: Float32s) -> None:
        """Set rows to values, and their slots to initial values."""
        initial, elements = [self._values.words_of(values)], len(rows) * self.table.slot_elements
        initial += [np.full(elements, value, np.float32) for value in self._optimizer.initial_values.values()]
        row_loops.scatter_rows(
            rows, self.records.memory.words, np.concatenate(initial), self.records.parts, self._sizes
        )

    def _words(self, rows: NDArray[np.uint32], parts: int) -> Float32s:
        """Return the first parts of records as one vector, part by part; valid until the next call."""
        words = self._room(len(rows) * int(self.records.parts[:parts].sum()))
        row_loops.gather_rows(rows, self.records.memory.words, words, self.records.parts[:parts], self._sizes)
        return words

    def _room(self, elements: int) -> Float32s:
        """Return a scratch vector, valid until the next call."""
        if len(self._scratch) < elements:
            self._scratch = np.empty(elements, np.float32)
        return self._scratch[:elements]

    @property
    def _row_elements(self) -> int:
        return self.table.row_elements
