"""RowRules: admission and eviction of the rows of an embedding table.

Each rule is a predicate of a row and of the time, which is the number of updates (each a step, a round or a batch): an
evicted row *is* absent, whenever its memory is freed. So the rules decide the same on every shard, and after a restore
(P28, P29). Only the limit on the number of rows is per shard. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from parashard.plan.seeding import key_of, splitmix64
from parashard.plan.variables import Float32s

STEPS_MAX = (1 << 32) - 2
"""Times are kept in 32 bits; the last one marks a record that is free."""
Order = Literal["lru", "lfu"]


@dataclass(frozen=True)
class RowRules:
    """When keys of a table get rows, and lose them: the settings of `parashard.job.embeddings.TableSettings`.

    The time is the number of updates; norms are checked when `evict_norm_every` divides it. A shard with more rows than
    `evict_above_rows` evicts some, until nine tenths of that number are left.
    """

    admit_after: int = 1
    admit_probability: float = 1.0
    evict_unused_steps: int | None = None
    evict_norm_below: float = 0.0
    evict_norm_every: int = 1000
    evict_above_rows: int | None = None
    evict_first: Order = "lru"

    @property
    def ends_rows(self) -> bool:
        """Whether a row can be evicted by time alone."""
        return self.evict_unused_steps is not None or self.evict_norm_below > 0

    def of_candidates(self) -> RowRules:
        """Return the rules of candidates, keys that are counted without a row: they expire, and the oldest go first."""
        return RowRules(evict_unused_steps=self.evict_unused_steps, evict_above_rows=self.evict_above_rows)

    def norm_checked_at(self, now: int) -> int:
        """Return the last time until `now` at which norms were checked; 0: none yet."""
        return now // self.evict_norm_every * self.evict_norm_every if self.evict_norm_below > 0 else 0


NO_RULES = RowRules()
"""Each key has a row from its first push on, for ever."""


def evicted(rules: RowRules, now: int, last_use: NDArray[np.uint32], values: Float32s) -> NDArray[np.bool_]:
    """Return a mask of the rows that are evicted at time `now`."""
    # `last_use`, uint32 of shape (rows,), is the time of each row's last push; `values` has shape (rows, row_elements).
    gone = np.zeros(len(last_use), np.bool_)
    if rules.evict_unused_steps is not None:
        gone |= now - last_use.astype(np.int64) >= rules.evict_unused_steps
    if rules.evict_norm_below > 0:
        squares = np.zeros(len(last_use))
        for column in values.T.astype(np.float64):  # in the order of the elements, as the shard's loop adds them
            squares += column * column
        checked = rules.norm_checked_at(now)
        gone |= (checked > 0) & (last_use <= checked) & (squares < rules.evict_norm_below**2)
    return gone


class Chance:
    """Random admission: whether a push gives a key its row is a function of (seed, table, key, time) alone."""

    def __init__(self, seed: int, table: str, probability: float) -> None:
        self._own = key_of(f"parashard admission\0{seed}\0{table}")
        self._below = np.float64(probability)

    def admits(self, keys: NDArray[np.uint64], clock: int) -> NDArray[np.bool_]:
        """Return a mask of the mixed keys to which the push at a time gives a row."""
        counters: Any = keys ^ splitmix64(np.array([clock], np.uint64), self._own)
        words: NDArray[np.uint64] = splitmix64(counters, self._own)
        admitted: NDArray[np.bool_] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self._below
        return admitted
