"""ReferenceRows: what `table_rows` does, as a dictionary from keys to rows, moved by the rules' NumPy reference.

The readable specification, bit for bit; the tests compare. Knows no memory and no index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parashard.plan.embedding import EmbeddingTable, Keys, first_rows
from parashard.plan.variables import Float32s, Variable
from parashard_server.state.kernels import reference
from parashard_server.state.optimizer import Optimizer


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
        self.rows: dict[int, Row] = {}

    def pull(self, keys: Keys) -> tuple[list[bool], list[Float32s]]:
        """Return which mixed keys have a row, and the rows of those."""
        present = [int(key) in self.rows for key in keys]
        return present, [self.rows[int(key)].values for key in keys if int(key) in self.rows]

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
        """Move each key's row by its gradient."""
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            if key not in self.rows:
                self.rows[key] = self._first(key)
            row = self.rows[key]
            row.t, row.last_use = row.t + 1, clock
            self._optimizer.update(
                row.values,
                gradient,
                row.slots,
                t=clock,
                scale=scale,
                damping=damping,
                variable=Variable(self._table.name, (1,)),
                learning_rate=learning_rate,
                t_of_rows=np.array([row.t], np.uint32),
            )

    def _first(self, key: int) -> Row:
        values = self._first_rows(np.array([key], np.uint64))[0]
        slots = {
            name: np.full(self._table.slot_elements, value, np.float32)
            for name, value in self._optimizer.initial_values.items()
        }
        return Row(values, slots)
