"""HottestKeys: the keys of a table's rows that were pushed the most often, a bounded number of them.

How often a row was pushed is in its record (its t), so nothing is counted beside it, nothing is estimated, and a
restored shard knows as much as the one before it. A sketch of pushes would tell less: a key is in a push once, so its
share of all pushed keys is at most one in a push's keys, below what a bounded number of counters can tell from none.
Knows no index and no lock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from parashard.plan.embedding import Keys

KEPT = 64


class HottestKeys:
    """Mixed keys and how often they were pushed.

    `row_loops.use_rows` keeps both arrays: a row whose t is above the least of them takes its place. Where rows end and
    are dropped, the next ones pushed take theirs. `kept` is how many keys there are at most; 0: none are noted.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.keys: Keys = np.zeros(kept, np.uint64)
        self.counts: NDArray[np.int64] = np.zeros(kept, np.int64)  # 0: the place is free

    def of_checkpoint(self, keys: Keys, t: NDArray[np.uint32]) -> None:
        """Take in rows of a checkpoint, whose keys are not among these."""
        kept = len(self.counts)
        if not kept or not len(keys):
            return
        most = np.argpartition(t, -kept)[-kept:] if len(t) > kept else np.arange(len(t))
        self._set(np.concatenate([self.keys, keys[most]]), np.concatenate([self.counts, t[most].astype(np.int64)]))

    def noted(self) -> Keys:
        """Return the keys, in no order."""
        return self.keys[self.counts > 0]

    def update(self, keys: Keys, t: NDArray[np.uint32]) -> list[tuple[int, int]]:
        """Replace all by those that still have rows, and their t; return (key, t), the most often pushed first."""
        self._set(keys, t.astype(np.int64))
        order = np.lexsort((self.keys, -self.counts))
        return [(int(self.keys[at]), int(self.counts[at])) for at in order if self.counts[at]]

    def _set(self, keys: Keys, counts: NDArray[np.int64]) -> None:
        kept = len(self.counts)
        most = np.argsort(-counts, kind="stable")[:kept]
        self.keys[:], self.counts[:] = 0, 0
        self.keys[: len(most)], self.counts[: len(most)] = keys[most], counts[most]
