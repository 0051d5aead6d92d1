"""Leases: which worker may compute which step, and which steps every shard has acknowledged.

Pure: `now_s` is an argument. Acks decide whether a step is complete; leases only pace. Losing a lease never
loses a step, and granting a step twice never counts it twice, because the shards identify steps by number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.policies import LeasingPolicy
from parashard_coordinator.core.progress import StepTimes, median

SPECULATION_MIN_S = 0.5
SLOW_S = 30.0  # a lease held for longer, and for more than SLOW_MEDIANS median durations, causes a warning
SLOW_MEDIANS = 4
DURATIONS_KEPT = 128
RETRY_PAUSE_S = 0.25
RETRY_PAUSE_MAX_S = 5.0


class Grant(NamedTuple):
    """A step for a worker to compute."""

    step: int
    skip: bool = False  # push nothing for it, marked skipped
    # A previous holder died. The next one announces the step before it computes it, so that a death while computing
    # can be told from a death while only holding it.
    announce: bool = False
    learning_rate: float = 0.0  # for its push; 0: the job's
    probe: bool = False  # the worker measures the drift of its gradient
    least_version: int = 0  # minimum version of the weights; shards hold the worker's pull until they have it


class NextBatches(NamedTuple):
    """The next batches, whose steps may be leased early: how many batches, and how many steps each has."""

    batches: int
    batch_steps: int


class Failed(NamedTuple):
    """A step's number of failed attempts, and whether it is given up."""

    attempts: int
    given_up: bool


@dataclass
class _Step:
    """State of a step that was leased at least once and is not complete."""

    holders: set[str] = field(default_factory=set)
    failures: int = 0
    not_before_s: float = 0.0  # when a step that failed may be leased again; 0: it has not failed, or is given up
    suspect: bool = False  # a worker died while holding it


class StepLeases:
    """The steps of a job and their leases.

    Invariants: the steps acknowledged by shard i are `complete` | `_acknowledged[i]`, and `complete` is the
    intersection of these sets; every step below `_frontier` is either complete, held, in `_returned` or in `_paused`;
    `_granted_s` has an entry for each holder of each step, the oldest first.

    With 0 shards a report alone completes a step. A step held longer than `speculate_after` median durations may go to
    a second worker (0: never); one that failed `max_attempts` times is given up. The pause before the next attempt
    doubles from `retry_pause_s`: all pauses together are long enough for every shard to announce its steps once.
    """

    def __init__(
        self,
        steps_total: int,
        shards: int,
        policy: LeasingPolicy,
        *,
        speculate_after: float = 4.0,
        max_attempts: int = 5,
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        self.target = steps_total  # lowered by an early stop
        self.policy = policy
        self.complete = IntervalSet()
        self.lowest_incomplete = 0
        self.speculative_leases = 0
        self.skips: set[int] = set()  # steps given up: empty pushes for every shard, whenever they are leased
        self._speculate_after = speculate_after
        self._max_attempts = max_attempts
        self._retry_pause_s = retry_pause_s
        self._acknowledged = [IntervalSet() for _ in range(shards)]  # in addition to `complete`
        self._frontier = 0
        self._returned = IntervalSet()  # ranges: a worker may list a step far ahead
        self._paused: dict[int, float] = {}  # steps that failed -> when they may be leased again
        self._pause_ends: list[tuple[float, int]] = []  # a heap of the same, with some outdated entries
        self._steps: dict[int, _Step] = {}
        self._held: dict[str, set[int]] = {}
        self._granted_s: dict[tuple[int, str], float] = {}
        self._sole_holder_since_s: dict[int, float] = {}  # steps with one holder -> since when, about the oldest first
        self._durations_s: deque[float] = deque(maxlen=DURATIONS_KEPT)
        self.times = StepTimes()

    @property
    def finished(self) -> bool:
        """Every step of the target is complete."""
        return self.lowest_incomplete >= self.target

    @property
    def any_succeeded(self) -> bool:
        """Some step was completed with its gradient, not as an empty push."""
        return len(self.complete) > sum(step in self.complete for step in self.skips)

    @property
    def leased(self) -> int:
        """Number of leased steps."""
        return sum(1 for step in self._steps.values() if step.holders)

    def held_by(self, worker: str) -> set[int]:
        """Return the steps that a worker holds."""
        return set(self._held.get(worker, ()))

    def holds(self, worker: str) -> int:
        """Return how many steps a worker holds."""
        return len(self._held.get(worker, ()))

    def limit(self) -> int:
        """Return the first step that may not be leased now."""
        return min(self.target, self.policy.limit(self.lowest_incomplete))

    def grant(
        self, worker: str, want: int, workers: int, now_s: float, limit: int, after: NextBatches | None = None
    ) -> list[Grant]:
        """Lease up to `want` steps below `limit` to a worker, lowest first; then its shares of the batches `after`."""
        # If none is free, a straggling step of another worker is leased a second time (speculative execution).
        self._end_pauses(now_s)
        last = min(limit, self.target)
        limit = min(limit, self.limit())
        leasable = len(self._returned) + max(0, limit - self._frontier)
        granted = list(islice(self._free(0, limit), min(want, self.policy.share(leasable, workers))))
        for step in granted:
            self._hold(worker, step, now_s)
        if want and not granted:
            straggling = self._straggling(worker, now_s, limit)
            if straggling is not None:
                self.speculative_leases += 1
                self._hold(worker, straggling, now_s)
                return [self._grant_of(straggling)]
        if after is not None:
            last = min(last, limit + after.batches * after.batch_steps)
            granted += self._ahead(worker, want - len(granted), workers, now_s, range(limit, last), after.batch_steps)
        return [self._grant_of(step) for step in granted]

    def openings(self, now_s: float, limit: int, after: NextBatches | None = None) -> int:
        """Return an upper bound on the steps that `grant` could lease now with these limits, without visiting any."""
        self._end_pauses(now_s)
        last = min(limit, self.target)
        limit = min(limit, self.limit())
        stop = limit if after is None else max(limit, min(last, limit + after.batches * after.batch_steps))
        never_leased = max(0, stop - self._frontier)
        returned = len(self._returned) if next(self._returned.within(0, stop), None) is not None else 0
        return never_leased + returned or int(self._straggling("", now_s, limit) is not None)

    def acknowledge(
        self, worker: str, step: int, shards: Collection[int], now_s: float, *, skipped: bool = False
    ) -> bool:
        """Record which shards acknowledged a worker's step; return True if that completed it just now."""
        # For a skipped step, only acks of the empty push count: in rounds they confirm that it replaced the gradient.
        if step >= self.target:
            return False
        if step in self.skips and not skipped:
            self._release(worker, step)
            return False
        self.advance_frontier(step)
        granted_s = self._granted_s.get((step, worker))
        if granted_s is not None:
            self._durations_s.append(now_s - granted_s)
            self._count_time(worker, step, granted_s, now_s)
        if step in self.complete:
            self._release(worker, step)
            return False
        if len(shards) < len(self._acknowledged):  # rare: workers report steps that every shard has acknowledged
            for shard in shards:
                self._acknowledged[shard].add(step)
            if not all(step in acknowledged for acknowledged in self._acknowledged):
                self._release(worker, step)
                return False
        self._complete(step)
        return True

    def renew(self, worker: str, held: Sequence[int], now_s: float) -> list[int]:
        """Keep the leases that a worker lists and free its others; return the listed steps that it should drop."""
        # A listed step counts as held even if it is not leased, or only to others: the worker is computing it anyway.
        # In `sync:N` a step of a later round than the present one was leased before a shard lost steps: it is dropped,
        # or it would commit a round on one shard while another shard lacks some of its steps.
        listed = set(held)
        limit = min(self.target, self.policy.keep_limit(self.lowest_incomplete))
        revoked = [step for step in held if step in self.complete or step >= limit]
        for step in self._held.get(worker, set()) - listed.difference(revoked):
            self._release(worker, step)
        for step in listed.difference(revoked) - self._held.get(worker, set()):
            self._hold(worker, step, now_s)
        return revoked

    def end(self, worker: str) -> list[int]:
        """End every lease of a worker; return the steps that it held, ascending."""
        steps = sorted(self._held.get(worker, ()))
        for step in steps:
            self._release(worker, step)
        self.times.forget(worker)
        return steps

    def fail(self, worker: str, step: int, now_s: float, *, skip: bool) -> Failed | None:
        """Count a holder's failed attempt, and lease the step again after a pause; None if it does not count."""
        # With `skip`, a step that is given up is leased again at once, as an empty push.
        state = self._steps.get(step)
        if state is None or worker not in state.holders:
            return None
        state.failures += 1
        given_up = state.failures >= self._max_attempts
        if given_up and skip:
            self.skips.add(step)
        pause_s = min(RETRY_PAUSE_MAX_S, self._retry_pause_s * 2.0 ** min(state.failures - 1, 30))
        state.not_before_s = 0.0 if given_up else now_s + pause_s
        self._release(worker, step)
        return Failed(state.failures, given_up)

    def mark_suspect(self, steps: Iterable[int]) -> None:
        """Mark steps whose holder died: their next holders announce that they compute them."""
        for step in steps:
            if step < self.target and step not in self.complete:
                self._steps.setdefault(step, _Step()).suspect = True

    def acknowledged_steps(self, applied: IntervalSet, held: IntervalSet, skipped: IntervalSet) -> IntervalSet:
        """Return the steps of `held` that count as acknowledged."""
        # A buffered gradient of a given-up step does not count: the empty push will replace it.
        acknowledged = held.copy()
        for step in self.skips:
            if step not in applied and step not in skipped:
                acknowledged.discard(step)
        return acknowledged

    def confirm(self, shard: int, held: IntervalSet) -> list[int]:
        """Count the failed steps in a shard's `held` set as acknowledged; return the steps that this completes."""
        # A worker may have died between a push and its report: retrying that step could exhaust its attempts.
        for step in self._paused:
            if step in held:
                self._acknowledged[shard].add(step)
        confirmed = [step for step in self._paused if all(step in each for each in self._acknowledged)]
        for step in confirmed:
            self._complete(step)
        return confirmed

    def shard_registered(self, shard: int, applied: IntervalSet) -> int:
        """Replace the steps that a shard has acknowledged; return how many of its earlier ones are lost."""
        # Lost steps will be recomputed.
        for other in range(len(self._acknowledged)):  # before `complete` loses the steps that this shard lacks
            self._acknowledged[other] = self.held_by_shard(other)
        believed = self._acknowledged[shard]
        lost = len(believed) - len(believed.intersection(applied))
        self._acknowledged[shard] = applied.copy()
        complete = self._acknowledged[0].copy()
        for acknowledged in self._acknowledged[1:]:
            complete = complete.intersection(acknowledged)
        self._recount(complete)
        return lost

    def complete_committed(self, stop: int) -> None:
        """Mark the steps below `stop` as complete even if their acks were lost: every shard has committed them.

        Shards would reject pushes of these steps.
        """
        if stop <= self.lowest_incomplete:
            return
        complete = self.complete.copy()
        complete.add_range(0, stop)
        self._recount(complete)

    def held_by_shard(self, shard: int) -> IntervalSet:
        """Return the steps that a shard's present incarnation has acknowledged."""
        held = self.complete.copy()
        for start, stop in self._acknowledged[shard].intervals():
            held.add_range(start, stop)
        return held

    def leased_so_far(self) -> int:
        """Return the first step that was never leased, rounded up to a round's end: a place to drain at."""
        return min(self.target, self.policy.boundary(self._frontier))

    def stop_at_frontier(self) -> int:
        """Lower the target to the steps leased so far (in rounds: to the round's end); return it."""
        self.target = self.leased_so_far()
        return self.target

    def stop_at(self, target: int) -> None:
        """Lower the target to at most `target`."""
        self.target = min(self.target, target)

    def advance_frontier(self, step: int) -> None:
        """Move the frontier past a step that an earlier coordinator has leased."""
        if self._frontier <= step:
            self._returned.add_range(self._frontier, step + 1)
            self._frontier = step + 1

    def slowest(self, now_s: float) -> tuple[str, int, float] | None:
        """Return the longest-held lease, if it is far too long: the worker, the step and its age in seconds."""
        if not self._granted_s:
            return None
        (step, worker), granted_s = next(iter(self._granted_s.items()))
        held_s = now_s - granted_s
        if held_s <= SLOW_S:
            return None
        usual_s = median(self._durations_s) if self._durations_s else 0.0
        return (worker, step, held_s) if held_s > SLOW_MEDIANS * usual_s else None

    def _count_time(self, worker: str, step: int, granted_s: float, now_s: float) -> None:
        """Record a worker's time for a step, and for each overtaken earlier holder its time so far as a lower bound."""
        self.times.took(worker, granted_s, now_s)
        for other in self._steps[step].holders:
            if self._granted_s[step, other] < granted_s:
                self.times.took(other, self._granted_s[step, other], now_s)

    def _recount(self, complete: IntervalSet) -> None:
        """Replace `complete`, and derive which steps may still be leased."""
        self._frontier = max(self._frontier, complete.stop())
        self.complete = complete
        self.lowest_incomplete = complete.lowest_missing()
        for step in [step for step in self._steps if step in complete]:
            self._forget(step)
        self._returned = IntervalSet(complete.missing(0, self._frontier))
        for step, _ in self._granted_s:
            self._returned.discard(step)
        for step in self._paused:
            self._returned.discard(step)

    def _ahead(self, worker: str, want: int, workers: int, now_s: float, steps: range, batch_steps: int) -> list[int]:
        """Lease up to `want` of these steps, and at most an even share of each batch to one worker."""
        share = -(-batch_steps // max(1, workers))
        held = Counter(step // batch_steps for step in self._held.get(worker, ()))
        found: list[int] = []
        start = steps.start
        while start < steps.stop and len(found) < want:
            stop = min(steps.stop, start - start % batch_steps + batch_steps)
            room = min(want - len(found), share - held[start // batch_steps])
            found += islice(self._free(start, stop), max(0, room))
            start = stop
        for step in found:
            self._hold(worker, step, now_s)
        return found

    def _free(self, start: int, stop: int) -> Iterator[int]:
        """Yield the steps from `start` to before `stop` that may be leased, lowest first."""
        for first, end in self._returned.within(start, stop):
            yield from range(first, end)
        yield from range(max(self._frontier, start), stop)

    def _straggling(self, worker: str, now_s: float, limit: int) -> int | None:
        """Return the step below `limit` that another worker alone has held longest, if it straggles."""
        if not self._speculate_after or not self._durations_s or not self._sole_holder_since_s:
            return None
        oldest_s = next(iter(self._sole_holder_since_s.values()))
        if now_s - oldest_s <= SPECULATION_MIN_S:  # the usual case, told without a median
            return None
        straggles_after_s = max(SPECULATION_MIN_S, self._speculate_after * median(self._durations_s))
        for step, granted_s in self._sole_holder_since_s.items():
            if now_s - granted_s <= straggles_after_s:
                break
            if step < limit and worker not in self._steps[step].holders:
                return step
        return None

    def _grant_of(self, step: int) -> Grant:
        skip = step in self.skips
        return Grant(step, skip, announce=self._steps[step].suspect and not skip)

    def _end_pauses(self, now_s: float) -> None:
        while self._pause_ends and self._pause_ends[0][0] <= now_s:
            end_s, step = heappop(self._pause_ends)
            if self._paused.get(step) == end_s:  # else it was leased, completed or failed again meanwhile
                del self._paused[step]
                self._returned.add(step)

    def _hold(self, worker: str, step: int, now_s: float) -> None:
        if step == self._frontier:  # its first lease: the usual case
            self._frontier += 1
        else:
            self.advance_frontier(step)
            self._returned.discard(step)
            self._paused.pop(step, None)
        holders = self._steps.setdefault(step, _Step()).holders
        holders.add(worker)
        self._granted_s[step, worker] = now_s
        self._note_sole_holder(step, holders)
        self._held.setdefault(worker, set()).add(step)

    def _release(self, worker: str, step: int) -> None:
        self._held.get(worker, set()).discard(step)
        self._granted_s.pop((step, worker), None)
        state = self._steps.get(step)
        if state is None:
            return
        state.holders.discard(worker)
        self._note_sole_holder(step, state.holders)
        if not state.holders:
            if step in self.complete:
                pass
            elif state.not_before_s:
                self._paused[step] = state.not_before_s
                heappush(self._pause_ends, (state.not_before_s, step))
            else:
                self._returned.add(step)
            if not state.failures and not state.suspect:
                del self._steps[step]

    def _note_sole_holder(self, step: int, holders: set[str]) -> None:
        """Update the index of steps with a single holder, which are candidates for speculative execution."""
        if len(holders) == 1:
            (holder,) = holders
            self._sole_holder_since_s[step] = self._granted_s[step, holder]
        else:
            self._sole_holder_since_s.pop(step, None)

    def _complete(self, step: int) -> None:
        self.complete.add(step)
        self._returned.discard(step)
        self._forget(step)
        if step == self.lowest_incomplete:
            self.lowest_incomplete = self.complete.lowest_missing()

    def _forget(self, step: int) -> None:
        self._paused.pop(step, None)
        self._sole_holder_since_s.pop(step, None)
        for worker in self._steps.pop(step, _UNHELD).holders:
            self._held[worker].discard(step)
            del self._granted_s[step, worker]


_UNHELD = _Step()
