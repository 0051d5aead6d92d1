"""TableRows: the rows of one embedding table on one shard.

A row is what its initializer draws until it is first pushed, and takes memory from then on (P27). Its update is that of
a dense variable's optimizer: the pushed rows and their slots are gathered into vectors, moved by the same kernel, and
scattered back. Owns memory and index; knows no step, no message and no lock. `reference_rows` says the same, readably.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parashard.checkpoints.tables import StoredRows
from parashard.errors import DamagedCheckpoint, JobFailed
from parashard.plan.embedding import EmbeddingTable, Keys, first_rows
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import PresentRows
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.rows.row_index import ABSENT, RowIndex
from parashard_server.state.rows.row_memory import RowMemory
from parashard_server.state.rows.row_saving import RowSaving

MOVED_LISTS = 4096  # so many short lists become one
SCRATCH_ROWS = 1 << 15  # rows that are gathered, moved and scattered at once: their vectors stay in the cache


class TableRows:
    """The rows of a table whose keys are in a shard's buckets.

    Parameters
    ----------
    table : EmbeddingTable
        Its declaration.
    seed : int
        The job's.
    """

    def __init__(self, table: EmbeddingTable, seed: int) -> None:
        self.table = table
        self._first_rows = first_rows(table, seed)
        self._optimizer = Optimizer(table.optimizer, by_row=True)
        self._variable = Variable(table.name, (1,))
        parts = [table.row_elements, *[table.slot_elements] * len(self._optimizer.slots)]
        self._memory = RowMemory(sum(parts), table.rows_max)
        self._index = RowIndex(self._memory)
        self._parts = np.array(parts, np.int64)
        self._sizes = np.array([self._memory.stride], np.int64)
        self._scratch: Float32s = np.empty(0, np.float32)
        self._cut = np.int64(0)  # time of the last cut
        self._saved_until = 0  # time of the last one that is stored
        self._moved: list[NDArray[np.uint32]] = []  # rows that a push moved since the last cut, each once
        self._waiting: list[NDArray[np.uint32]] = []  # those of a save that is not stored yet
        self._saving: RowSaving | None = None

    @property
    def moved_rows(self) -> int:
        """Number of rows that moved since the last save that is stored; those of one under way may count twice."""
        return sum(map(len, (*self._waiting, *self._moved)))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._memory.rows

    @property
    def memory_bytes(self) -> int:
        """Memory of rows, slots, headers and index."""
        return self.rows * self._memory.record_bytes + self._index.memory_bytes

    def check_room(self, new_rows: int) -> None:
        """Refuse what could not be taken.

        Raises
        ------
        JobFailed
            If there is not room for so many more rows (P34).
        """
        if self.rows + new_rows > self._memory.rows_max:
            raise JobFailed(
                f"table {self.table.name!r} has {self.rows:,} rows on this shard, of at most "
                f"{self._memory.rows_max:,}: no room for {new_rows:,} more; raise tables.{self.table.name}.rows_max, "
                "or use more shards, and resume"
            )

    def pull(self, keys: Keys) -> PresentRows:
        """Return the rows of those mixed keys that have one, valid until the next call."""
        found, absent = self._index.find(keys)
        present = found != ABSENT
        return PresentRows(
            present, self._values(found[present] if absent else found, 1).reshape(-1, self._row_elements)
        )

    def push(
        self,
        keys: Keys,
        gradients: Float32s,
        *,
        clock: int,
        scale: float = 1.0,
        damping: float = 1.0,
        learning_rate: float | None = None,
    ) -> None:
        """Move rows by their gradients; those that are not there come to be.

        Parameters
        ----------
        keys : ndarray of uint64, shape (keys,)
            Mixed, each once.
        gradients : ndarray of float32, shape (keys, row_elements)
            Finite; only read.
        clock : int
            Steps (in sync mode: rounds) in the applied set with this one, >= 1; the schedule's t.
        scale, damping, learning_rate
            As in `Storage.apply`.
        """
        found, absent = self._index.find(keys)
        if absent:
            found[found == ABSENT] = self._added(keys[found == ABSENT])
        self._use(found, clock)
        flat = gradients.reshape(-1)
        for begin in range(0, len(found), SCRATCH_ROWS):
            rows = found[begin : begin + SCRATCH_ROWS]
            values = self._values(rows, len(self._parts))
            weights, *slots = np.split(values, np.cumsum(self._parts[:-1]) * len(rows))
            first = begin * self._row_elements
            self._optimizer.update(
                weights,
                flat[first : first + len(weights)],
                dict(zip(self._optimizer.slots, slots, strict=True)),
                t=clock,
                scale=scale,
                damping=damping,
                variable=self._variable,
                learning_rate=learning_rate,
                t_of_rows=self._memory.t_of(rows) if self._optimizer.counts else None,
            )
            fused.scatter_rows(rows, self._memory.words, values, self._parts, self._sizes)

    def cut(self, clock: int, *, whole: bool) -> RowSaving:
        """Begin to save the rows as they are at a time: all, or those that moved since the last that was `saved`.

        An earlier save that was neither `saved` nor given up is over.
        """
        self._waiting, self._moved = [*self._waiting, *self._moved], []
        self._cut = np.int64(clock)
        self._saving = RowSaving(
            self._memory,
            None if whole else tuple(self._waiting),
            0 if whole else self._saved_until,
            clock,
            self._row_elements,
            {slot: self.table.slot_elements for slot in self._optimizer.slots},
        )
        return self._saving

    def ended(self, saving: RowSaving, clock: int, *, stored: bool) -> None:
        """Take note that a save is over; of one that is not stored the rows come into the next one."""
        if self._saving is saving:
            self._saving = None
            if not stored:
                self._moved = [*self._waiting, *self._moved]
            else:
                self._saved_until = clock
            self._waiting = []

    def restored(self, clock: int, *, saved: bool) -> None:
        """Take note of the time of a restored checkpoint; `saved`: the next one may be an increment of it."""
        self._cut = np.int64(clock)
        self._saved_until = clock if saved else 0

    def restore(self, stored: StoredRows) -> None:
        """Take rows of a checkpoint, whose keys have none here.

        Raises
        ------
        JobFailed
            If there is no room for them.
        DamagedCheckpoint
            If their slots are not the optimizer's.
        """
        found = (stored.values.shape[1], {slot: values.shape[1] for slot, values in stored.slots.items()})
        due = (self._row_elements, dict.fromkeys(self._optimizer.slots, self.table.slot_elements))
        if found != due:
            raise DamagedCheckpoint(
                f"table {self.table.name!r} has rows of {found[0]} elements with the slots {found[1]} (name and "
                f"elements); due: {due[0]} and {due[1]}"
            )
        self.check_room(len(stored.keys))
        rows = self._memory.add(stored.keys)
        self._index.enter(stored.keys, rows)
        self._memory.set_use(rows, stored.t, stored.last_use)
        parts = [stored.values, *(stored.slots[slot] for slot in self._optimizer.slots)]
        values = np.concatenate([part.reshape(-1) for part in parts])
        fused.scatter_rows(rows, self._memory.words, values, self._parts, self._sizes)

    def _use(self, rows: NDArray[np.uint32], clock: int) -> None:
        """Count a push of these rows; keep what a save that is under way still lacks of them."""
        if self._saving is not None:
            self._saving.keep(rows)
        first = np.empty(len(rows), np.uint32)
        sizes = np.array([self._memory.stride, clock, self._cut], np.int64)
        moved = fused.use_rows(rows, self._memory.headers, first, sizes)
        if moved:
            self._moved.append(first[:moved].copy())
            if len(self._moved) > MOVED_LISTS:
                self._moved = [np.concatenate(self._moved)]

    def _added(self, keys: Keys) -> NDArray[np.uint32]:
        """Make rows of keys that have none, and return their references."""
        rows = self._memory.add(keys)
        self._index.enter(keys, rows)
        initial, elements = [self._first_rows(keys).reshape(-1)], len(keys) * self.table.slot_elements
        initial += [np.full(elements, value, np.float32) for value in self._optimizer.initial_values.values()]
        fused.scatter_rows(rows, self._memory.words, np.concatenate(initial), self._parts, self._sizes)
        return rows

    def _values(self, rows: NDArray[np.uint32], parts: int) -> Float32s:
        """Return the first parts of records as one vector, part by part; valid until the next call."""
        elements = len(rows) * int(self._parts[:parts].sum())
        if len(self._scratch) < elements:
            self._scratch = np.empty(elements, np.float32)
        values = self._scratch[:elements]
        fused.gather_rows(rows, self._memory.words, values, self._parts[:parts], self._sizes)
        return values

    @property
    def _row_elements(self) -> int:
        return self.table.row_elements
