"""CallbackProgress: the progress of a job's callbacks, and the learning rates that they decided.

Pure. A *milestone* is a number of steps at which epochs have ended, or an evaluation is due, or both. It is named by
that number and follows from the job alone, so a restarted coordinator reports the same milestones, and the follower
states its progress as one number. A learning rate is a property of steps (rule P37 of docs/protocol.md): a decision
governs the first step that was never leased, and all later ones. It may include planned rates of later epochs. A batch
is one step, or in `auto` the steps that are its parts; callbacks get each batch once, even if steps are recomputed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from parashard.errors import ConfigurationError
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.policies import NO_LIMIT, Auto, LeasingPolicy
from parashard_coordinator.core.training_figures import (
    MetricSums,
    TrainingFigures,
    figures_together,
    finite,
    known_figures,
    nullable,
    numbers,
    plain_sums,
    sums_of_plain,
)

if TYPE_CHECKING:
    from parashard_coordinator.core.saved import Saved

ENDS_AT_ONCE = 4096
_NO_METRICS: Mapping[str, float] = MappingProxyType({})


class BatchEnd(NamedTuple):
    """A completed batch: its first step, its mean loss (NaN: it was skipped), and the figures of its metrics."""

    step: int
    loss: float
    metrics: Mapping[str, float] = _NO_METRICS


class StepResult(NamedTuple):
    """A completed step: its mean loss over its examples (None: skipped), their number, and the sums of its metrics."""

    step: int
    loss: float | None
    examples: int = 0
    metrics: Sequence[MetricSums] = ()


class BatchEnds:
    """The completed batches that callbacks have not received, in the order of their completion."""

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._ended = IntervalSet()  # steps
        self._open: dict[int, list[StepResult]] = {}  # complete steps of incomplete batches, by batch
        self._queue: deque[BatchEnd] = deque()
        self._heard = 0
        self._wanted = True

    def __len__(self) -> int:
        return len(self._queue)

    def step_completed(self, part: StepResult) -> None:
        """Record a step that every shard has; a repetition has no effect."""
        if not self._ended.add(part.step) or not self._wanted:
            return
        batch = part.step // self._parts
        parts = self._open.setdefault(batch, [])
        parts.append(part)
        if len(parts) == self._parts:
            self._queue.append(_end_of(batch * self._parts, self._open.pop(batch)))

    def since(self, heard: int) -> tuple[list[BatchEnd], int]:
        """Drop the first `heard` batches; return the next ones, and the number of batches up to the last of these."""
        while self._queue and self._heard < heard:
            self._queue.popleft()
            self._heard += 1
        some = list(islice(self._queue, ENDS_AT_ONCE))
        return some, self._heard + len(some)

    def want(self, wanted: bool) -> None:
        """Set whether completed batches are kept for callbacks."""
        self._wanted = wanted
        if not wanted:
            self._queue.clear()
            self._open.clear()

    # --- state for a successor ---

    def saved(self) -> dict[str, Any]:
        """Return these batches as fields of `Saved`."""
        parts = [part for parts in self._open.values() for part in parts]
        return {
            "ends": tuple((end.step, finite(end.loss)) for end in self._queue),
            "ends_metrics": {end.step: nullable(end.metrics) for end in self._queue if end.metrics},
            "parts": tuple((part.step, finite(part.loss), part.examples) for part in parts),
            "parts_metrics": {part.step: plain_sums(part.metrics) for part in parts if part.metrics},
        }

    def resume(self, saved: Saved) -> None:
        """Restore an earlier coordinator's state."""
        for step, loss in saved.ends:
            self._ended.add_range(step, step + self._parts)
            metrics = numbers(saved.ends_metrics.get(step, {}))
            self._queue.append(BatchEnd(step, math.nan if loss is None else loss, metrics))
        for step, loss, examples in saved.parts:
            sums = sums_of_plain(saved.parts_metrics.get(step, {}))
            self.step_completed(StepResult(step, loss, examples, sums))


def _end_of(first: int, parts: Sequence[StepResult]) -> BatchEnd:
    """Return the end of a batch whose parts are all complete."""
    some = [part for part in parts if part.loss is not None and (part.examples or len(parts) == 1)]
    if len(some) < 2:
        only = some[0] if some else StepResult(first, None)
        return BatchEnd(first, math.nan if only.loss is None else only.loss, known_figures(only.metrics))
    figures = figures_together([(part.examples, part.loss or 0.0, part.metrics) for part in some])
    return BatchEnd(first, figures.pop("loss"), figures)


ENDS_MAX = 1 << 14
"""Completed batches that callbacks have not received: at this number no new step is leased."""
MILESTONES_AHEAD, MILESTONES_AHEAD_STORED = 100, 8
"""How many milestones training may be ahead of callbacks; the second applies if each has a file of weights."""
SMALLEST_RATE = 5e-324
"""Encodes a rate of 0 in leases, where 0 means the job's own rate: rounded to float32 it is 0."""
RATES_MAX = 10_000
LEASED_AHEAD = 1024
"""Where callbacks may decide, how many steps are leased per stored update of `leased_to`."""


class CallbackOptions(NamedTuple):
    """Options of the launcher's callbacks."""

    followed: bool = False
    decide: bool = False
    ahead: int | None = None  # milestones that training may be ahead of callbacks; None: the maximum
    store_evaluated: bool = False  # store evaluated weights before the result is reported


NO_CALLBACKS = CallbackOptions()


class DecidedRate(NamedTuple):
    """A learning rate of the steps from `first_step` on, decided at the milestone `after_steps`."""

    first_step: int
    learning_rate: float
    after_steps: int


class ReachedMilestone(NamedTuple):
    """A milestone: the epochs that ended there, with their losses, and the evaluation's result."""

    after_steps: int
    first_epoch: int
    epoch_losses: Sequence[float]
    evaluated: bool
    metrics: Mapping[str, float]
    weights: str
    judged_steps: int = 0
    learning_rates: Sequence[float] = ()  # by epoch, of its last step; NaN: the job's own
    epoch_metrics: Sequence[Mapping[str, float]] = ()  # figures computed here
    epoch_sums: Sequence[Sequence[MetricSums]] = ()  # of metrics whose figures only the user's code can compute

    @property
    def epochs(self) -> range:
        """The epochs that ended."""
        return range(self.first_epoch, self.first_epoch + len(self.epoch_losses))


class CallbackProgress:
    """The milestones of one job, and the decisions about its learning rate.

    Invariant: each step is leased with the last of `rates` that begins at or before it, and that rate was stored first.

    Without a follower or without epochs nothing is recorded. If callbacks decide, no step is leased before they have
    started. Training may be at most `ahead` milestones ahead of callbacks; 0: it waits at each.
    """

    def __init__(
        self,
        steps_total: int,
        steps_per_epoch: int,
        figures: TrainingFigures,
        policy: LeasingPolicy,
        evaluations: Evaluations,
        callbacks: CallbackOptions,
    ) -> None:
        self._steps_total = steps_total
        self._steps_per_epoch = steps_per_epoch if callbacks.followed else 0
        self._figures = figures
        self._policy = policy
        self._evaluations = evaluations
        self.decides = callbacks.decide
        kept = MILESTONES_AHEAD_STORED if callbacks.store_evaluated else MILESTONES_AHEAD
        self._ahead = kept if callbacks.ahead is None else callbacks.ahead
        self._limit = (-1, -1, 0)  # cached lease limit: (handled milestone, target, limit)
        self._epochs = range(-(-steps_total // steps_per_epoch)) if self._steps_per_epoch else range(0)
        self.handled = -1
        """The last milestone that callbacks have handled; 0: they have started; -1: they have not called yet."""
        self.stopped_by: int | None = None
        """The milestone that ended the training early."""
        self.rates: list[DecidedRate] = []
        self.decided = 0
        """Number of the last decision about the rate, as callbacks count them."""
        self.leased_to = 0
        """If callbacks may decide, no coordinator has leased a step at or past this one."""
        self._leased_before = 0  # an earlier coordinator's `leased_to`
        self.ends = BatchEnds(policy.size if isinstance(policy, Auto) else 1)
        """Completed batches that callbacks have not received."""
        if self._steps_per_epoch:
            evaluations.handled = 0

    def step_completed(self, step: StepResult) -> None:
        """Record a step that every shard has."""
        if self._steps_per_epoch:
            self.ends.step_completed(step)

    # --- milestones ---

    def next_milestone(self, target: int) -> ReachedMilestone | None:
        """Return the first milestone after the handled one, reached or not; None: there is none up to `target`."""
        handled = max(0, self.handled)
        after = self._milestone_after(handled)
        if after > target:
            return None
        first = bisect_right(self._epochs, handled, key=self._end_of)
        stop = bisect_right(self._epochs, after, key=self._end_of)
        result = self._evaluations.result_of(after)
        return ReachedMilestone(
            after,
            first,
            [self._figures.loss_of(epoch) for epoch in range(first, stop)],
            result is not None,
            {} if result is None else result.metrics or {},
            "" if result is None else result.weights,
            0 if result is None else result.judged_steps,
            [self._rate_at_end_of(epoch) for epoch in range(first, stop)],
            epoch_metrics=[self._figures.metrics_of(epoch) for epoch in range(first, stop)],
            epoch_sums=[self._figures.sums_of(epoch) for epoch in range(first, stop)],
        )

    def _milestone_after(self, steps: int) -> int:
        """Return the first milestone after this number of steps; `NO_LIMIT` if there is none."""
        epoch = bisect_right(self._epochs, steps, key=self._end_of)
        ends = self._end_of(self._epochs[epoch]) if epoch < len(self._epochs) else NO_LIMIT
        due = self._evaluations.due_after(steps)
        return min(ends, NO_LIMIT if due is None else due)

    def reached(self, lowest_incomplete: int, target: int) -> ReachedMilestone | None:
        """Return the next milestone, if all its steps are complete and its evaluation has its result."""
        milestone = self.next_milestone(target)
        if milestone is None or milestone.after_steps > lowest_incomplete:
            return None
        return None if self._evaluations.is_open(milestone.after_steps) else milestone

    def is_judged(self, lowest_incomplete: int) -> bool:
        """Tell whether the next milestone lacks only its evaluation's result."""
        after = self._milestone_after(max(0, self.handled))
        return after <= lowest_incomplete and self._evaluations.is_open(after)

    def told(self, target: int) -> bool:
        """Tell whether callbacks have handled everything up to `target`; True without a follower."""
        if not self._steps_per_epoch:
            return True
        return self.handled >= 0 and not self.ends and self._milestone_after(self.handled) > target

    def lease_limit(self, target: int, frontier: int) -> int:
        """Return the first step that must wait for callbacks; `frontier` is the first that was never leased."""
        # If callbacks may decide, the very first step waits for them. Any step waits that is too far ahead of the last
        # handled milestone.
        if not self._steps_per_epoch:
            return NO_LIMIT
        if self.decides and self.handled < 0:
            return 0
        if self._limit[:2] != (self.handled, target):
            limit = self._milestone_after(max(0, self.handled))
            for _ in range(self._ahead):
                limit = self._milestone_after(limit) if limit < target else limit
            self._limit = (self.handled, target, limit if limit < target else NO_LIMIT)
        return min(self._limit[2], frontier) if len(self.ends) >= ENDS_MAX else self._limit[2]

    def handle(self, after_steps: int) -> None:
        """Record that callbacks have handled everything up to a milestone."""
        self.handled = self._evaluations.handled = max(self.handled, after_steps)
        self._figures.forget([epoch for epoch in self._figures.epochs() if self._end_of(epoch) <= self.handled])

    # --- learning rates ---

    def decide(
        self,
        learning_rate: float,
        number: int,
        after_steps: int,
        frontier: int,
        *,
        between: bool = False,
        planned: Sequence[tuple[int, float]] = (),
    ) -> list[DecidedRate]:
        """Set the rate of the steps from `frontier` on, and the `planned` ones of later epochs; return these rates."""
        # Return none if this decision or a later one was applied before. An earlier coordinator may have leased steps
        # past `frontier`: then the rate holds from there on. If training waits at milestones, these steps end at
        # `after_steps`, or at the next milestone if callbacks decided `between` the two.
        if number <= self.decided:
            return []
        leased = self._leased_before
        if not self._ahead:
            leased = min(leased, self._milestone_after(after_steps)) if between else after_steps
        first = self._policy.boundary(max(frontier, leased))
        due = [(0, learning_rate), *((self._end_of(epoch - 1), rate) for epoch, rate in planned)]
        begun = bisect_right(due, first, key=lambda one: one[0]) - 1  # earlier planned rates are too late
        new = [DecidedRate(max(first, step), rate, after_steps) for step, rate in due[begun:]]
        kept = self.rates[: bisect_right(self.rates, first, key=lambda rate: rate.first_step)]
        if len(kept) + len(new) > RATES_MAX:
            raise ConfigurationError(
                f"the learning rate changes more than {RATES_MAX:,} times in this run, which is the most"
            )
        self.rates = kept + new
        self.decided = number
        return new

    def rate_of(self, step: int) -> float:
        """Return a step's decided learning rate, as leases encode it; 0: the job's own."""
        decided = self._decided_for(step)
        return 0.0 if decided is None else decided.learning_rate or SMALLEST_RATE

    def governs(self, rate: DecidedRate) -> bool:
        """Tell whether a rate governs any step: no later decision replaced it from its first step on."""
        return self._decided_for(rate.first_step) is rate

    def _rate_at_end_of(self, epoch: int) -> float:
        decided = self._decided_for(min(self._steps_total, (epoch + 1) * self._steps_per_epoch) - 1)
        return math.nan if decided is None else decided.learning_rate

    def _decided_for(self, step: int) -> DecidedRate | None:
        governs = bisect_right(self.rates, step, key=lambda rate: rate.first_step)
        return self.rates[governs - 1] if governs else None

    def leases(self, step: int) -> bool:
        """Record that a step is being leased; return whether `leased_to` must be stored first."""
        if not self.decides or step < self.leased_to:
            return False
        self.leased_to = step + LEASED_AHEAD
        return True

    def saved(self) -> dict[str, Any]:
        """Return decisions, and batches that callbacks have not received, as fields of `Saved`."""
        return {
            "learning_rates": tuple(self.rates),
            "rates_decided": self.decided,
            "leased_to": self.leased_to,
            "stopped_by": self.stopped_by,
            **self.ends.saved(),
        }

    def resume(self, saved: Saved) -> None:
        """Restore decisions, and batches that callbacks have not received."""
        self.rates, self.decided = list(saved.learning_rates), saved.rates_decided
        self.leased_to = self._leased_before = saved.leased_to
        self.stopped_by = saved.stopped_by
        self.ends.resume(saved)

    def _end_of(self, epoch: int) -> int:
        """Return the number of steps after which an epoch has ended: in rounds, after its last step's round."""
        last = min(self._steps_total, (epoch + 1) * self._steps_per_epoch)
        return min(self._steps_total, self._policy.boundary(last))
