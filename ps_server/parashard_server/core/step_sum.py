"""StepSum: the sum of the gradients of consecutive steps, which make one update.

Pure. Invariant: gradients are added in the order of the steps, whatever order they arrive in, so that the sum has the
same bits each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from parashard.plan.intervals import IntervalSet
from parashard.plan.variables import Float32s
from parashard_server.state.rows.embedding_tables import Pushed, copied, summed
from parashard_server.state.storage import Storage


class StepSum:
    """The gradients of steps [first, stop), summed by a storage in its `memory`, which can be reused afterwards.

    `memory` has the sum of the steps before `_next`, and is undefined while `pushes`, the number of gradients in it, is
    0; `_early` has the gradients that arrived before their turn. `changes_weights`: at least one push was not void (a
    gradient without elements). `learning_rate`: of the held steps; None while there are none, and for the job's own.
    """

    def __init__(self, first: int, stop: int, storage: Storage, memory: Float32s) -> None:
        self.first, self.stop, self.memory = first, stop, memory
        self._storage = storage
        self.pushes = 0
        self.changes_weights = False
        self.learning_rate: float | None = None
        self._next = first
        self._early: dict[int, Float32s | None] = {}
        self._rows: dict[int, Pushed] = {}

    @property
    def held(self) -> IntervalSet:
        """Steps that have been taken."""
        held = IntervalSet([(self.first, self._next)])
        for step in self._early:
            held.add(step)
        return held

    @property
    def count(self) -> int:
        """Number of steps that have been taken."""
        return self._next - self.first + len(self._early)

    @property
    def full(self) -> bool:
        """Whether every step has been added."""
        return self._next == self.stop > self.first

    @property
    def waiting_rows(self) -> Iterable[Pushed]:
        """Gradients of rows of tables, by step."""
        return self._rows.values()

    def holds(self, step: int) -> bool:
        """Tell whether a step has been taken."""
        return self.first <= step < self._next or step in self._early

    def waits(self, step: int) -> bool:
        """Tell whether a step's gradient waits for its turn, and may be replaced."""
        return step in self._early

    def take(self, step: int, gradient: Float32s | None, learning_rate: float | None, rows: Pushed) -> None:
        """Add a gradient, which is borrowed for this call, or keep a copy until its turn; None: the push was empty."""
        # Raises QueueFull if there is no room for the copy; nothing is changed then.
        early = gradient
        if gradient is not None and gradient.size and step != self._next:
            early = self._storage.copy_of(gradient)
        self.learning_rate = learning_rate
        self._rows.pop(step, None)  # of a gradient that the empty push of a skipped step replaces
        if rows:
            self._rows[step] = copied(rows)
        if step != self._next:
            self._early[step] = early
            return
        self._add(gradient)
        while self._next in self._early:
            self._add(self._early.pop(self._next))

    def gradient(self) -> Float32s:
        """Return the sum, zeros where every push was empty; valid until the next call of the storage."""
        return self.memory if self.pushes else self._storage.zeros()

    def rows(self) -> Pushed:
        """Return the sum of the gradients of rows, added in the order of the steps."""
        return summed([self._rows[step] for step in sorted(self._rows)])

    def _add(self, gradient: Float32s | None) -> None:
        self.changes_weights = self.changes_weights or gradient is None or bool(gradient.size)
        if gradient is not None and gradient.size:
            self._storage.add(self.memory, gradient, first=not self.pushes)
            self.pushes += 1
        self._next += 1


class PartNorms:
    """The norms of the parts of one batch.

    With p_k the gradient of part k, weighted by its share, S their sum, and the subscript for this shard's elements:

        |S|^2 is estimated as  |S_shard|^2 / sum_k |p_k,shard|^2 * sum_k |p_k|^2

    The fraction is the part of the squared norms that remains in the sum: noise cancels. With one shard the estimate is
    exact. With several, each assumes that the fraction is the same for its own variables as for all.
    """

    def __init__(self) -> None:
        self._here = 0.0
        self._everywhere = 0.0

    def add(self, squared: float, norm: float | None) -> None:
        """Add a part's squared norm on this shard, and its norm on all shards; None: unknown, taken as that here."""
        self._here += squared
        self._everywhere += squared if norm is None else norm * norm

    def scale(self, squared: float, clip_norm: float) -> float:
        """Return the factor that clips a batch's gradient, whose squared norm on this shard is `squared`."""
        kept = squared / self._here if self._here else 1.0  # all zero on this shard: assume that nothing cancels
        total = kept * self._everywhere
        return min(1.0, clip_norm / math.sqrt(total)) if total > 0 else 1.0
