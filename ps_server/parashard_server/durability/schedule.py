"""CheckpointSchedule: when a shard's state is to be saved. Pure: `now_s` is an argument.

Without rounds each shard has its own clock. In `sync:N` all shards must save the same rounds: every Nth one, which each
shard counts itself, and rounds that the coordinator names in advance to implement an interval in seconds.
"""

from __future__ import annotations

from parashard.process.backoff import retry_pause_s

AHEAD_MAX = 16  # rounds that may be named in advance; the coordinator names one at a time


class CheckpointSchedule:
    """Decides for one shard, which starts with `steps` applied.

    `every_s` and `every_steps` are between two checkpoints; 0: not by time, or not by steps. With rounds of
    `round_steps` it is not by time, and steps are rounded up to whole rounds.
    """

    def __init__(self, *, every_s: float, every_steps: int, round_steps: int | None, steps: int, now_s: float) -> None:
        self._every_s = every_s
        self._every_steps = every_steps
        self._every_rounds = -(-every_steps // round_steps) if round_steps else 0
        self._steps = steps
        self._saved_s = now_s
        self._round: int | None = None  # the last saved one
        self._ahead: set[int] = set()
        self._failures = 0  # consecutive, to store a cut
        self._again_s = now_s  # earliest next cut after a failure

    def name_ahead(self, round_: int) -> None:
        """Save this round's starting weights once they are reached; drop past rounds."""
        self._ahead.add(round_)
        for passed in sorted(self._ahead)[:-AHEAD_MAX]:
            self._ahead.discard(passed)

    def due(self, steps: int, round_: int | None, now_s: float) -> bool:
        """Return whether to save the present state, which has `steps` applied steps."""
        # A failed one is retried with back-off; with rounds only while the shard is at that round, since all shards
        # save the same ones.
        if round_ is not None:
            if self._failures and round_ == self._round:
                return now_s >= self._again_s
            periodic = bool(self._every_rounds and round_ and round_ % self._every_rounds == 0)
            return round_ != self._round and (periodic or round_ in self._ahead)
        if self._failures:
            return now_s >= self._again_s
        if steps == self._steps:
            return False
        by_steps = bool(self._every_steps) and steps - self._steps >= self._every_steps
        return by_steps or (bool(self._every_s) and now_s - self._saved_s >= self._every_s)

    def returned(self, round_: int | None) -> None:
        """Record a rollback to a saved state: later rounds will be saved again."""
        self._round = round_

    def cut(self, steps: int, round_: int | None, now_s: float) -> None:
        """Record a cut of the present state."""
        self._steps, self._round, self._saved_s = steps, round_, now_s
        if round_ is not None:
            self._ahead.discard(round_)

    def failed(self, now_s: float) -> None:
        """Record that a cut could not be stored."""
        self._failures += 1
        self._again_s = now_s + retry_pause_s(self._failures)

    def stored(self) -> None:
        """Record that a cut is stored."""
        self._failures = 0
