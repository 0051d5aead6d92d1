"""Rounds: the present rounds of a `sync:N` job's shards, rollbacks to a common round, and when a round is saved.

Pure: `now_s` is an argument. All shards save the same rounds. If a shard has lost steps that others have, all roll back
to the newest round that each is at or has saved. Knows the shards' announcements; sends nothing. Implements rule P12 of
docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.policies import NO_LIMIT


class Rounds:
    """Rounds of a job; every `every_s` seconds all shards save the same round (0: none by time).

    `round_steps` = 0: the job has no rounds, and nothing is recorded: any state of the shards is legal.
    """

    def __init__(self, shards: int = 1, round_steps: int = 0, steps_total: int = 0, every_s: float = 0.0) -> None:
        self.returning_to: int | None = None
        """The round that all shards are rolling back to; nothing is leased until then. None: no rollback."""
        self.rollbacks = 0
        self._shards = shards
        self._round_steps = round_steps
        self._steps_total = steps_total
        self._every_s = every_s
        self._progress: dict[int, Announcement] = {}
        self._cut_step: int | None = None  # first step of the round that the shards are being told to save
        self._cut_s: float | None = None

    def note_progress(self, shard: int, progress: Announcement) -> None:
        """Record a shard's announcement, unless a newer one of the same incarnation is known."""
        if not self._round_steps:
            return
        known = self._progress.get(shard)
        if known is None or known.incarnation != progress.incarnation or not progress.precedes(known):
            self._progress[shard] = progress

    def decide_rollback(self, held: Callable[[int], IntervalSet]) -> bool:
        """Decide whether all shards must roll back to an earlier round; return whether `returning_to` has changed.

        No rollback is needed if each shard has acknowledged every step that any shard has in its weights: it commits
        them with the next request. Else the target is the newest common round; the plan's first round is always one.
        The same holds if some shards have the gradient of a step in their weights that others have skipped: then the
        target is no later than that step's round.

        A rollback ends only when every shard is at its target: one shard's announcement may be older than a command
        that another shard carries out already. A target is replaced only if some shard can no longer reach it.
        """
        before, shards = self.returning_to, self._progress.values()
        if len(self._progress) < self._shards:
            return False
        if before is None:
            needed = max(len(progress.applied) for progress in shards)
            goes_on = all(self._has(shard, needed, held(shard)) for shard in self._progress)
            if not goes_on or self._contested() is not None:
                self.returning_to = self._newest_common()
                self.rollbacks += 1
        elif all(self._round(progress) == before for progress in shards):
            self.returning_to = None
        elif not all(before in self._reachable(progress) for progress in shards):
            self.returning_to = self._newest_common()
        return before != self.returning_to

    def out_of_round(self) -> list[tuple[int, int]]:
        """Return (shard, target round) of the shards that are not at the rollback's target."""
        target = self.returning_to
        if target is None:
            return []
        return [(shard, target) for shard, s in sorted(self._progress.items()) if self._round(s) != target]

    def common_cut(self) -> int | None:
        """Return the newest round that every shard has saved, or None; shards may delete only older ones."""
        return max(self._saved_by_all(), default=None)

    def kept_rounds(self) -> list[int]:
        """Return, for each shard, the newest common round before the chain that has its newest common round."""
        # Shards keep these rounds besides `common_cut`; they move up once it reaches the first round of a new chain.
        saved = sorted(self._saved_by_all())
        found = set()
        for progress in self._progress.values() if saved else ():
            begun = max((chain for chain in progress.chains if chain <= saved[-1]), default=0)
            found.update([round_ for round_ in saved if round_ < begun][-1:])
        return sorted(found)

    def passed(self) -> int:
        """Return the largest number of steps in any shard's weights: earlier rounds' weights are gone."""
        return max((len(s.applied) for s in self._progress.values()), default=0)

    def committed(self) -> int:
        """Return the number of steps that all shards have in their weights, and no longer accept; 0 in a rollback."""
        if len(self._progress) < self._shards or self.returning_to is not None:
            return 0
        return min(len(progress.applied) for progress in self._progress.values())

    def lease_limit(self) -> int:
        """Return the first step that may not be leased: 0 during a rollback, or the start of a round to be saved."""
        if self.returning_to is not None:
            return 0
        return NO_LIMIT if self._cut_step is None else self._cut_step

    def round_to_save(self, lowest_incomplete: int, now_s: float) -> int | None:
        """Return the round to save next, or None if not due; its steps are not leased before `round_announced`."""
        if not self._round_steps:
            return None
        if self._cut_s is None:
            self._cut_s = now_s
        if self._cut_step is None:
            step = (lowest_incomplete // self._round_steps + 1) * self._round_steps
            waiting = not self._every_s or now_s - self._cut_s < self._every_s
            if waiting or self.returning_to is not None or step >= self._steps_total:
                return None
            self._cut_step, self._cut_s = step, now_s
        return self._cut_step // self._round_steps

    def round_announced(self) -> None:
        """Resume leasing: every reachable shard was told which round to save."""
        self._cut_step = None

    def _saved_by_all(self) -> frozenset[int]:
        if len(self._progress) < self._shards:
            return frozenset()
        return frozenset.intersection(*(progress.returnable for progress in self._progress.values()))

    def _newest_common(self) -> int:
        """Return the newest round that each shard is at or has saved, no later than a contested step's round."""
        common = frozenset.intersection(*(self._reachable(progress) for progress in self._progress.values()))
        contested = self._contested()
        if contested is None:
            return max(common)
        return max((round_ for round_ in common if round_ <= contested // self._round_steps), default=min(common))

    def _reachable(self, progress: Announcement) -> frozenset[int]:
        return progress.returnable | {self._round(progress)}

    def _contested(self) -> int | None:
        """Return the first step that one shard has skipped while another has its gradient in its weights."""
        found = [
            step
            for some in self._progress.values()
            if some.skipped  # rare
            for other in self._progress.values()
            for start, stop in some.skipped.intersection(other.applied).intervals()
            for step, _ in other.skipped.missing(start, stop)
        ]
        return min(found, default=None)

    def _round(self, progress: Announcement) -> int:
        return -(-len(progress.applied) // self._round_steps)

    def _has(self, shard: int, needed: int, acknowledged: IntervalSet) -> bool:
        if acknowledged.lowest_missing() >= needed:  # as nearly always
            return True
        held = self._progress[shard].held.copy()
        for start, stop in acknowledged.intervals():
            held.add_range(start, stop)
        return next(held.missing(0, needed), None) is None
