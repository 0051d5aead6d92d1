"""Following: what callbacks are told of a job, and the learning rates that they decided.

Pure. A *milestone* is a number of steps at which epochs have ended, or an evaluation is due, or both. It is named by
that number and follows from the job alone, so a coordinator that is started again tells the same ones, and who follows
says with one number how far it is. A learning rate is a property of steps (rule P37 of docs/protocol.md): a decision
governs the first step that was never leased, and all after it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parashard.errors import ConfigurationError
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.policies import LeasingPolicy
from parashard_coordinator.core.training_figures import TrainingFigures

ENDS_KEPT = 1 << 14
"""Completed steps that are remembered for who asks for them."""
ENDS_AT_ONCE = 4096
RATES_MAX = 10_000
LEASED_AHEAD = 1024
"""Steps that may be leased between two records of how far that has gone (`async` and `ssp`)."""
_NO_LIMIT = 1 << 62


class Rate(NamedTuple):
    """A learning rate of the steps from `first_step` on, which the milestone at `after_steps` decided."""

    first_step: int
    learning_rate: float
    after_steps: int


class Milestone(NamedTuple):
    """A milestone that is reached: the epochs that ended, with their losses, and the evaluation's result."""

    after_steps: int
    first_epoch: int
    epoch_losses: Sequence[float]
    evaluated: bool
    metrics: Mapping[str, float]
    weights: str
    judged_steps: int = 0

    @property
    def epochs(self) -> range:
        """The epochs that ended."""
        return range(self.first_epoch, self.first_epoch + len(self.epoch_losses))


class StepEnd(NamedTuple):
    """A completed step and its loss; NaN: it was skipped."""

    step: int
    loss: float


class Following:
    """The milestones of one job, and the decisions about its learning rate.

    Invariant: no step at or past `rates[-1].first_step` was leased before that decision was stored.

    Parameters
    ----------
    steps_total : int
        S.
    steps_per_epoch : int
        0: nobody follows the job, and nothing is noted.
    figures : TrainingFigures
        What the epochs' steps add up to.
    policy : LeasingPolicy
        Knows where weights can be judged: in rounds a milestone is the end of one.
    evaluations : Evaluations
        When they are due, and their results.
    decides : bool
        Whether callbacks may decide. Nothing is leased then before they have begun, and in rounds nothing past a
        milestone until it is handled.
    """

    def __init__(
        self,
        steps_total: int,
        steps_per_epoch: int,
        figures: TrainingFigures,
        policy: LeasingPolicy,
        evaluations: Evaluations,
        *,
        decides: bool = False,
    ) -> None:
        self._steps_total = steps_total
        self._steps_per_epoch = steps_per_epoch
        self._figures = figures
        self._policy = policy
        self._evaluations = evaluations
        self.decides = decides
        self._has_rounds = policy.round_of(0) is not None
        self._epochs = range(-(-steps_total // steps_per_epoch)) if steps_per_epoch else range(0)
        self.handled = -1
        """The last milestone that callbacks have handled; 0: they have begun; -1: not heard of yet."""
        self.stopped_by: int | None = None
        """The milestone that ended the training early."""
        self.rates: list[Rate] = []
        self.leased_to = 0
        """No coordinator has leased a step at or past this one (`async` and `ssp`, where callbacks may decide)."""
        self._leased_before = 0  # what an earlier coordinator left of that
        self._ended = IntervalSet()
        self._ends: deque[StepEnd] = deque(maxlen=ENDS_KEPT)
        self._ends_total = 0

    # --- what happens ---

    def step_completed(self, step: int, loss: float | None) -> None:
        """Take note of a step that every shard has now; once, whatever is computed again."""
        if self._steps_per_epoch and self._ended.add(step):
            self._ends.append(StepEnd(step, math.nan if loss is None else loss))
            self._ends_total += 1

    def ends_since(self, seen: int) -> tuple[list[StepEnd], int, int]:
        """Return the completed steps after the first `seen`, how many that makes, and how many are forgotten."""
        first_kept = self._ends_total - len(self._ends)
        missed = max(0, first_kept - seen)
        start = max(seen, first_kept) - first_kept
        some = [self._ends[i] for i in range(start, min(len(self._ends), start + ENDS_AT_ONCE))]
        return some, seen + missed + len(some), missed

    # --- milestones ---

    def next_milestone(self, target: int) -> Milestone | None:
        """Return the first milestone after what is handled, reached or not; None: there is none up to `target`."""
        handled = max(0, self.handled)
        first = bisect_right(self._epochs, handled, key=self._end_of)
        ends = self._end_of(self._epochs[first]) if first < len(self._epochs) else _NO_LIMIT
        due = self._evaluations.due_after(handled)
        after = min(ends, _NO_LIMIT if due is None else due)
        if after > target:
            return None
        stop = bisect_right(self._epochs, after, key=self._end_of)
        result = self._evaluations.result_of(after)
        return Milestone(
            after,
            first,
            [self._figures.loss_of(epoch) for epoch in range(first, stop)],
            result is not None,
            {} if result is None else result.metrics or {},
            "" if result is None else result.weights,
            0 if result is None else result.judged_steps,
        )

    def reached(self, lowest_incomplete: int, target: int) -> Milestone | None:
        """Return the next milestone, if all its steps are complete and its evaluation has its result."""
        milestone = self.next_milestone(target)
        if milestone is None or milestone.after_steps > lowest_incomplete:
            return None
        return None if self._evaluations.is_open(milestone.after_steps) else milestone

    def lease_limit(self, target: int) -> int:
        """Return the first step that must wait for callbacks: the very first one, and in rounds that of a milestone."""
        if not self.decides:
            return _NO_LIMIT
        if self.handled < 0:
            return 0
        if not self._has_rounds:
            return _NO_LIMIT
        milestone = self.next_milestone(target)
        return _NO_LIMIT if milestone is None else milestone.after_steps

    def handle(self, after_steps: int) -> None:
        """Take note that everything up to a milestone is handled."""
        self.handled = max(self.handled, after_steps)
        self._figures.forget([epoch for epoch in self._figures.epochs() if self._end_of(epoch) <= self.handled])

    # --- learning rates ---

    def decide(self, learning_rate: float, after_steps: int, frontier: int) -> Rate | None:
        """Let a milestone set the learning rate of the steps from `frontier` on; None: it has decided before.

        In `async` and `ssp` an earlier coordinator may have leased more than this one knows: then from there on.
        """
        if self.rates and after_steps <= self.rates[-1].after_steps:
            return None
        if len(self.rates) >= RATES_MAX:
            raise ConfigurationError(
                f"the learning rate was changed {RATES_MAX:,} times in this run, which is the most"
            )
        decided = Rate(max(frontier, self._leased_before), learning_rate, after_steps)
        self.rates.append(decided)
        return decided

    def rate_of(self, step: int) -> float:
        """Return the learning rate of a step; 0: the job's own."""
        governs = bisect_right(self.rates, step, key=lambda rate: rate.first_step)
        return self.rates[governs - 1].learning_rate if governs else 0.0

    def leases(self, step: int) -> bool:
        """Take note that a step is being leased; return whether that has to be stored first."""
        if not self.decides or self._has_rounds or step < self.leased_to:
            return False
        self.leased_to = step + LEASED_AHEAD
        return True

    def resume(self, rates: Sequence[Rate], leased_to: int, stopped_by: int | None) -> None:
        """Take over what an earlier coordinator decided."""
        self.rates, self.stopped_by = list(rates), stopped_by
        self.leased_to = self._leased_before = leased_to

    def _end_of(self, epoch: int) -> int:
        """Return after how many steps an epoch has ended: in rounds, after that of its last step."""
        last = min(self._steps_total, (epoch + 1) * self._steps_per_epoch)
        return min(self._steps_total, self._policy.boundary(last))
