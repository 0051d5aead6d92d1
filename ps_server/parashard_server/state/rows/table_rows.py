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
from parashard_server.state.rows.row_copy import RowCopy
from parashard_server.state.rows.row_index import ABSENT, RowIndex
from parashard_server.state.rows.row_memory import RowMemory

SCRATCH_ROWS = 1 << 15  # rows that are gathered, moved and scattered at once: their vectors stay in the cache


class TableRows:
    """The rows of a table whose keys are in a shard's buckets.

    Parameters
    ----------
    table : EmbeddingTable
        Its declaration.
    seed : int
        The job's.
    rows_max : int
        Most rows.
    """

    def __init__(self, table: EmbeddingTable, seed: int, rows_max: int) -> None:
        self.table = table
        self._first_rows = first_rows(table, seed)
        self._optimizer = Optimizer(table.optimizer)
        self._variable = Variable(table.name, (1,))
        parts = 1 + len(self._optimizer.slots)
        self._memory = RowMemory(table.row_elements * parts, rows_max)
        self._index = RowIndex(self._memory)
        self._parts = np.full(parts, table.row_elements, np.int64)
        self._sizes = np.array([self._memory.stride], np.int64)
        self._scratch: Float32s = np.empty(0, np.float32)

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
                f"{self._memory.rows_max:,}: no room for {new_rows:,} more"
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
        self._memory.used(found, clock)
        flat = gradients.reshape(-1)
        for begin in range(0, len(found), SCRATCH_ROWS):
            rows = found[begin : begin + SCRATCH_ROWS]
            values = self._values(rows, len(self._parts))
            vectors = values.reshape(len(self._parts), -1)
            first = begin * self._row_elements
            self._optimizer.update(
                vectors[0],
                flat[first : first + vectors.shape[1]],
                dict(zip(self._optimizer.slots, vectors[1:], strict=True)),
                t=clock,
                scale=scale,
                damping=damping,
                variable=self._variable,
                learning_rate=learning_rate,
            )
            fused.scatter_rows(rows, self._memory.words, values, self._parts, self._sizes)

    def copy(self) -> RowCopy:
        """Return a copy of all rows."""
        memory = self._memory
        words = memory.words[: memory.rows * memory.stride].copy()
        return RowCopy(words, memory.stride, self._row_elements, self._optimizer.slots)

    def restore(self, stored: StoredRows) -> None:
        """Take rows of a checkpoint, whose keys have none here.

        Raises
        ------
        JobFailed
            If there is no room for them.
        DamagedCheckpoint
            If their slots are not the optimizer's.
        """
        found = (stored.values.shape[1], sorted(stored.slots))
        due = (self._row_elements, sorted(self._optimizer.slots))
        if found != due:
            raise DamagedCheckpoint(
                f"table {self.table.name!r} has rows of {found[0]} elements with the slots {found[1]}; due: {due[0]} "
                f"and {due[1]}"
            )
        self.check_room(len(stored.keys))
        rows = self._memory.add(stored.keys)
        self._index.enter(stored.keys, rows)
        self._memory.set_use(rows, stored.t, stored.last_use)
        parts = [stored.values, *(stored.slots[slot] for slot in self._optimizer.slots)]
        values = np.concatenate([part.reshape(-1) for part in parts])
        fused.scatter_rows(rows, self._memory.words, values, self._parts, self._sizes)

    def _added(self, keys: Keys) -> NDArray[np.uint32]:
        """Make rows of keys that have none, and return their references."""
        rows = self._memory.add(keys)
        self._index.enter(keys, rows)
        initial = [self._first_rows(keys).reshape(-1)]
        initial += [np.full(initial[0].size, value, np.float32) for value in self._optimizer.initial_values.values()]
        fused.scatter_rows(rows, self._memory.words, np.concatenate(initial), self._parts, self._sizes)
        return rows

    def _values(self, rows: NDArray[np.uint32], parts: int) -> Float32s:
        """Return the first parts of records as one vector, part by part; valid until the next call."""
        elements = len(rows) * self._row_elements * parts
        if len(self._scratch) < elements:
            self._scratch = np.empty(elements, np.float32)
        values = self._scratch[:elements]
        fused.gather_rows(rows, self._memory.words, values, self._parts[:parts], self._sizes)
        return values

    @property
    def _row_elements(self) -> int:
        return self.table.row_elements
