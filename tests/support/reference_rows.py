"""ReferenceRows: what `TableRows` does, as a dictionary from keys to rows, moved by the rules' NumPy reference.

The readable specification, bit for bit; the tests compare. Knows no memory and no index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parashard.plan.embedding import EmbeddingTable, Keys, first_rows, floats_of, kept_as
from parashard.plan.row_rules import Chance, evicted
from parashard.plan.variables import Float32s, Variable
from parashard_server.state.optimizer import Optimizer, RowTimes
from support import reference_rules as reference


@dataclass
class Row:
    """A row that was pushed: its values and slots, how often, and when last."""

    values: Float32s
    slots: dict[str, Float32s]
    t: int = 0
    last_use: int = 0


class ReferenceRows:
    """See `table_rows.TableRows`."""

    def __init__(self, table: EmbeddingTable, seed: int) -> None:
        self._table = table
        self._first_rows = first_rows(table, seed)
        self._optimizer = Optimizer(table.optimizer, reference, by_row=True)
        self._chance = Chance(seed, table.name, table.rules.admit_probability)
        self.rows: dict[int, Row] = {}
        self.counted: dict[int, tuple[int, int]] = {}  # keys that have no row yet: how often, and when last

    def pull(self, keys: Keys, now: int) -> tuple[list[bool], list[Float32s]]:
        """Return which mixed keys have a row at a time, and the rows of those."""
        self._end_rows(now)
        present = [int(key) in self.rows for key in keys]
        return present, [self.rows[int(key)].values for key in keys if int(key) in self.rows]

    def push(
        self,
        keys: Keys,
        gradients: Float32s,
        *,
        clock: int,
        scale: float = 1.0,
        learning_rate: float | None = None,
    ) -> None:
        """Move each key's row by its gradient."""
        self._end_rows(clock - 1)
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            if key not in self.rows:
                if not self._admits(key, clock):
                    continue
                self.rows[key] = self._first(key)
            row = self.rows[key]
            row.t, row.last_use = row.t + 1, clock
            self._optimizer.update(
                row.values,
                gradient,
                row.slots,
                t=RowTimes(clock, np.array([row.t], np.uint32)),
                scale=scale,
                variable=Variable(self._table.name, (1,)),
                learning_rate=learning_rate,
            )
            row.values = floats_of(kept_as(row.values, self._table.dtype))
        self._evict(clock)

    def _admits(self, key: int, clock: int) -> bool:
        rules = self._table.rules
        if rules.admit_probability < 1.0 and not self._chance.admits(np.array([key], np.uint64), clock)[0]:
            return False
        times = self.counted.pop(key, (0, 0))[0] + 1
        if times < rules.admit_after:
            self.counted[key] = times, clock
        return times >= rules.admit_after

    def _end_rows(self, now: int) -> None:
        rules = self._table.rules
        for key, row in list(self.rows.items()):
            if evicted(rules, now, np.array([row.last_use], np.uint32), row.values[None])[0]:
                del self.rows[key]
        for key, (_, last_use) in list(self.counted.items()):
            if rules.evict_unused_steps is not None and now - last_use >= rules.evict_unused_steps:
                del self.counted[key]

    def _evict(self, clock: int) -> None:
        rules = self._table.rules
        if rules.evict_above_rows is None:
            return
        self._end_rows(clock)
        if len(self.rows) > rules.evict_above_rows:
            by = {key: row.last_use if rules.evict_first == "lru" else row.t for key, row in self.rows.items()}
            order = sorted(self.rows, key=lambda key: (by[key], key))
            for key in order[: len(order) - max(1, rules.evict_above_rows * 9 // 10)]:
                del self.rows[key]
        if len(self.counted) > rules.evict_above_rows:
            order = sorted(self.counted, key=lambda key: (self.counted[key][1], key))
            for key in order[: len(order) - max(1, rules.evict_above_rows * 9 // 10)]:
                del self.counted[key]

    def _first(self, key: int) -> Row:
        values = self._first_rows(np.array([key], np.uint64))[0]
        slots = {
            name: np.full(self._table.slot_elements, value, np.float32)
            for name, value in self._optimizer.initial_values.items()
        }
        return Row(values, slots)
