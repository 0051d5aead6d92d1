"""Rounds: where the shards of a `sync:N` job stand, when they must return to an earlier round, and when they save one.

Pure: `now_s` is an argument. All shards save the same rounds, and if one has lost what the others have, all return to
the newest round that each stands at or has saved. Knows what shards said of themselves; sends nothing. Implements rule
P12 of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.policies import NO_LIMIT


class Rounds:
    """Rounds of a job, all of whose shards save one every `every_s` seconds; 0: none by time.

    Without `round_steps` the job has no rounds, and nothing is noted: any state of the shards is legal.
    """

    def __init__(self, shards: int = 1, round_steps: int = 0, steps_total: int = 0, every_s: float = 0.0) -> None:
        self.returning_to: int | None = None
        """The round that all shards have to return to before anything is leased again."""
        self.rollbacks = 0
        self._shards = shards
        self._round_steps = round_steps
        self._steps_total = steps_total
        self._every_s = every_s
        self._progress: dict[int, Announcement] = {}
        self._cut_step: int | None = None  # the first step of a round whose saving the shards are being told of
        self._cut_s: float | None = None

    def note_progress(self, shard: int, progress: Announcement) -> None:
        """Take note of a shard's progress."""
        if not self._round_steps:
            return
        known = self._progress.get(shard)
        if known is None or known.incarnation != progress.incarnation or not progress.precedes(known):
            self._progress[shard] = progress

    def look(self, held: Callable[[int], IntervalSet]) -> bool:
        """Decide whether all must return to an earlier round.

        They can go on if each has acknowledged every step that any has in its weights: it commits them with the next
        request. Else the newest common round is the target; all can return to where their plan began. The same
        where some have the gradient of a step in their weights that others have skipped: then the target is no
        later than that step's round.

        A return ends when every shard stands at its target, and not before: what one shard announces meanwhile may be
        older than an order that another carries out already. Only a target that some shard can no longer reach is
        given up for another one.
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
        """Return (shard, round) of those that do not stand at the target."""
        target = self.returning_to
        if target is None:
            return []
        return [(shard, target) for shard, s in sorted(self._progress.items()) if self._round(s) != target]

    def common_cut(self) -> int | None:
        """Return the newest round that every shard has saved, or None: nothing older than it may go."""
        return max(self._saved_by_all(), default=None)

    def kept_rounds(self) -> list[int]:
        """Return, for each shard, the newest common round before the chain of its newest common one."""
        # Read with `common_cut`: until that passes the first round of a chain, no shard deletes the one before.
        saved = sorted(self._saved_by_all())
        found = set()
        for progress in self._progress.values() if saved else ():
            begun = max((chain for chain in progress.chains if chain <= saved[-1]), default=0)
            found.update([round_ for round_ in saved if round_ < begun][-1:])
        return sorted(found)

    def passed(self) -> int:
        """Return how many steps some shard has in its weights: earlier rounds' weights are gone."""
        return max((len(s.applied) for s in self._progress.values()), default=0)

    def committed(self) -> int:
        """Return how many steps every shard has in its weights: no shard takes or needs one of these any more."""
        if len(self._progress) < self._shards or self.returning_to is not None:
            return 0
        return min(len(progress.applied) for progress in self._progress.values())

    def lease_limit(self) -> int:
        """Return the first step that may not be leased: none while shards return, none of a round being announced."""
        if self.returning_to is not None:
            return 0
        return NO_LIMIT if self._cut_step is None else self._cut_step

    def due_cut(self, lowest_incomplete: int, now_s: float) -> int | None:
        """Return the round to save next, once it is time; nothing of it is leased before `cut_named`."""
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

    def cut_named(self) -> None:
        """Lease on: every shard that could be told knows."""
        self._cut_step = None

    def _saved_by_all(self) -> frozenset[int]:
        if len(self._progress) < self._shards:
            return frozenset()
        return frozenset.intersection(*(progress.returnable for progress in self._progress.values()))

    def _newest_common(self) -> int:
        """Return the newest round that each shard stands at or has saved, from before what they disagree about."""
        common = frozenset.intersection(*(self._reachable(progress) for progress in self._progress.values()))
        contested = self._contested()
        if contested is None:
            return max(common)
        return max((round_ for round_ in common if round_ <= contested // self._round_steps), default=min(common))

    def _reachable(self, progress: Announcement) -> frozenset[int]:
        return progress.returnable | {self._round(progress)}

    def _contested(self) -> int | None:
        """Return the first step that some shard has skipped and another has in its weights with its gradient."""
        found = [
            step
            for some in self._progress.values()
            if some.skipped  # as nearly none has
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
