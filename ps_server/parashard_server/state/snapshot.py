"""Snapshot: a consistent copy of a shard's weights and slots, made concurrently with pushes.

Pure. Copy-on-write by partition: `Storage.apply` saves a partition before it first moves it, and the checkpointer saves
the others one at a time. A push waits only for the copies of the partitions that it moves. Knows no step, no file and
no lock: every call is made under the shard's lock, except reading a complete snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.plan.partition import Placed
from parashard.plan.variables import Float32s


class Snapshot:
    """Copies of a shard's vectors, taken partition by partition; complete once `missing` is empty.

    `copy` copies into the first vector, in host memory, from the second, which is live.
    """

    def __init__(
        self,
        layout: Sequence[Placed],
        weights: Float32s,
        slots: Mapping[str, Float32s],
        copy: Callable[[Float32s, Any], None] = np.copyto,
    ) -> None:
        self.layout = tuple(layout)
        self.missing: dict[Placed, None] = dict.fromkeys(layout)
        self.weights: Float32s = np.empty(weights.shape, np.float32)
        self.slots: dict[str, Float32s] = {name: np.empty(slot.shape, np.float32) for name, slot in slots.items()}
        self._live_weights = weights
        self._live_slots = slots
        self._copy = copy

    def save(self, placed: Placed) -> None:
        """Copy a partition, unless it is copied already."""
        if placed not in self.missing:
            return
        run = slice(placed.offset, placed.stop)
        self._copy(self.weights[run], self._live_weights[run])
        for name, slot in self._live_slots.items():
            self._copy(self.slots[name][run], slot[run])
        del self.missing[placed]

    def save_next(self) -> bool:
        """Copy one partition that is missing; return whether more are."""
        if self.missing:
            self.save(next(iter(self.missing)))
        return bool(self.missing)
