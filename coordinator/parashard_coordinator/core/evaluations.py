"""Evaluations: when the model is evaluated on the held-out examples, and on which weights.

Pure. An evaluation is leased to a worker like a step, and names its weights by the shards' incarnations and the number
of steps. In `sync:N` it names the round that starts from them, and that round is not leased until the result is in:
the weights would be gone. In `async` and `ssp` steps go on, and the result says how many were in the weights.
Implements rule P25 of docs/protocol.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.policies import NO_LIMIT, LeasingPolicy
from parashard_coordinator.core.training_figures import nullable, numbers

if TYPE_CHECKING:
    from parashard_coordinator.core.saved import Saved

ATTEMPTS_MAX = 5
SLOW_S = 60.0  # an evaluation held for longer causes a warning
RESULTS_KEPT = 100  # the newest results keep their metrics; earlier ones only until reported and handled by callbacks


@dataclass(slots=True)
class Evaluation:
    """One evaluation, named by the number of steps after which it is due."""

    after_step: int
    round: int | None
    holder: str | None = None
    granted_s: float = 0.0
    incarnations: tuple[int, ...] = ()  # of the shards whose weights are evaluated, as of `granted_s`
    failures: int = 0
    metrics: dict[str, float] | None = None
    weights: str = ""  # their file in the checkpoint store; empty: they were not stored
    judged_steps: int = 0  # steps in the weights, >= after_step; 0: exactly `after_step`, as in rounds


class Evaluations:
    """All evaluations of a job, in order.

    Invariant: each scheduled evaluation is in exactly one of `_open`, `_done` and `_forgotten`, or was passed.

    One is due after each number of complete steps in `after_steps`, rounded up to the next boundary of the policy.
    """

    def __init__(self, after_steps: list[int], policy: LeasingPolicy, steps_total: int) -> None:
        self._policy = policy
        self._judges = bool(after_steps)
        self._due = sorted({min(steps_total, policy.boundary(step)) for step in after_steps})
        self._open = [Evaluation(step, policy.round_after(step)) for step in self._due]  # without a result, in order
        self._held: dict[int, Evaluation] = {}
        self._done: dict[int, Evaluation] = {}  # the newest results, by `after_step`
        self._forgotten = IntervalSet()  # `after_step` of evaluations with a result whose metrics are dropped
        self._unreported: set[int] = set()  # `after_step` of results in `_done` that are not reported yet
        self.handled: float = math.inf
        """Callbacks have handled results up to this number of steps; later results are kept for them."""

    @property
    def latest(self) -> Evaluation | None:
        """The kept result after the most steps; None if there is none, or if a rollback discarded all."""
        return self._done[max(self._done)] if self._done else None

    @property
    def finished(self) -> bool:
        """Every evaluation has its result."""
        return not self._open

    def lease_limit(self) -> int:
        """Return the first step that must wait for a result (rounds only)."""
        if not self._open or self._open[0].round is None:
            return NO_LIMIT
        return self._open[0].after_step

    def is_due(self, lowest_incomplete: int) -> bool:
        """Tell whether an evaluation can be leased now."""
        return self._first_due(lowest_incomplete) is not None

    def grant(
        self, worker: str, lowest_incomplete: int, incarnations: tuple[int, ...], now_s: float = 0.0
    ) -> list[Evaluation]:
        """Lease the first evaluation that is due and not leased, on the weights of these incarnations."""
        evaluation = self._first_due(lowest_incomplete)
        if evaluation is None:
            return []
        evaluation.holder, evaluation.incarnations, evaluation.granted_s = worker, incarnations, now_s
        self._held[evaluation.after_step] = evaluation
        return [evaluation]

    def _first_due(self, lowest_incomplete: int) -> Evaluation | None:
        for evaluation in self._open:
            if evaluation.after_step > lowest_incomplete:
                break
            if evaluation.holder is None:
                return evaluation
        return None

    def renew(self, worker: str, held: list[int]) -> None:
        """Free a worker's evaluations that are not in `held`."""
        for evaluation in [e for e in self._held.values() if e.holder == worker and e.after_step not in held]:
            self._free(evaluation)

    def slowest(self, now_s: float) -> tuple[str, int, float] | None:
        """Return the evaluation held longest, if for over SLOW_S: the worker, `after_step`, and its age in seconds."""
        held = min(self._held.values(), key=lambda e: e.granted_s, default=None)
        if held is None or held.holder is None or now_s - held.granted_s <= SLOW_S:
            return None
        return held.holder, held.after_step, now_s - held.granted_s

    def due_after(self, step: int) -> int | None:
        """Return the first scheduled evaluation after `step`, or None."""
        index = bisect_right(self._due, step)
        return self._due[index] if index < len(self._due) else None

    def is_open(self, after_step: int) -> bool:
        """Tell whether an evaluation is scheduled and has no result."""
        return self._find(after_step) is not None

    def result_of(self, after_step: int) -> Evaluation | None:
        """Return an evaluation with its result, or None if the result is not kept."""
        return self._done.get(after_step)

    def finish(self, after_step: int, metrics: Mapping[str, float], weights: str = "", judged_steps: int = 0) -> bool:
        """Record a result for the present weights; return whether it is the first one for them."""
        evaluation = self._find(after_step)
        if evaluation is None:
            return False
        self._end(evaluation, metrics, weights, judged_steps)
        self._unreported.add(after_step)
        return True

    def unreported(self) -> list[Evaluation]:
        """Return results that were not returned before, in order."""
        # A result waits for all earlier ones, unless more than `RESULTS_KEPT` results are waiting.
        first_open = self._open[0].after_step if self._open else math.inf
        ready = sorted(after_step for after_step in self._unreported if after_step < first_open)
        if len(self._unreported) - len(ready) > RESULTS_KEPT:
            ready = sorted(self._unreported)
        self._unreported.difference_update(ready)
        reported = [self._done[after_step] for after_step in ready]
        self._forget_oldest()
        return reported

    def restore_result(
        self, after_step: int, metrics: Mapping[str, float], weights: str = "", judged_steps: int = 0
    ) -> None:
        """Restore a result of an earlier coordinator, if its evaluation is still scheduled."""
        evaluation = self._find(after_step)
        if evaluation is not None:
            self._end(evaluation, metrics, weights, judged_steps)
            self._forget_oldest()

    def saved(self) -> dict[str, Any]:
        """Return the results as fields of `Saved`."""
        return {
            "evaluations": {after_step: nullable(metrics) for after_step, metrics in self.results().items()},
            "evaluated": tuple(self._forgotten.intervals()),
            "evaluated_weights": {after_step: e.weights for after_step, e in self._done.items() if e.weights},
            "judged_steps": self.judged_steps(),
        }

    def resume(self, saved: Saved) -> None:
        """Restore the results of an earlier coordinator; before any lease."""
        for after_step, metrics in saved.evaluations.items():
            weights, judged_steps = saved.evaluated_weights.get(after_step, ""), saved.judged_steps.get(after_step, 0)
            self.restore_result(after_step, numbers(metrics), weights, judged_steps)
        forgotten = IntervalSet(saved.evaluated)
        for evaluation in self._open:
            if evaluation.after_step in forgotten:
                self._forget(evaluation.after_step)
        self._open = [evaluation for evaluation in self._open if evaluation.after_step not in forgotten]

    def shard_returned(self, lowest_incomplete: int) -> list[Evaluation]:
        """Discard results after more steps than the shards have now, and free all leases; return the former."""
        for evaluation in list(self._held.values()):
            self._free(evaluation)
        later = self._due[bisect_right(self._due, lowest_incomplete) :]
        gone = [after_step for after_step in later if self._has_result(after_step)]
        for after_step in gone:
            self._done.pop(after_step, None)
            self._unreported.discard(after_step)
        self._forgotten = self._forgotten.intersection(IntervalSet([(0, lowest_incomplete + 1)]))
        again = [self._add(after_step) for after_step in gone]
        self._open.sort(key=lambda e: e.after_step)
        return again

    def fail(self, after_step: int, reason: str) -> str | None:
        """Count a failed attempt; return why the job must stop, or None."""
        evaluation = self._find(after_step)
        if evaluation is None:
            return None
        self._free(evaluation)
        evaluation.failures += 1
        if evaluation.failures >= ATTEMPTS_MAX:
            return f"{reason}; the evaluation after step {evaluation.after_step:,} failed {ATTEMPTS_MAX} times"
        return None

    def results(self) -> dict[int, dict[str, float]]:
        """Return the metrics of the kept results, by `after_step`."""
        return {after_step: dict(e.metrics or {}) for after_step, e in self._done.items()}

    def drop_passed(self, steps: int) -> list[Evaluation]:
        """Drop and return the evaluations of rounds whose weights are gone: a shard has moved past them."""
        missed = [e for e in self._open if e.round is not None and e.after_step < steps]
        for evaluation in missed:
            self._free(evaluation)
            self._open.remove(evaluation)
        return missed

    def stop_at(self, target: int) -> None:
        """Drop the evaluations beyond an early stop's target, and schedule one there if the job has any."""
        if not self._judges:
            return
        for evaluation in [e for e in self._open if e.after_step > target]:
            self._free(evaluation)
            self._open.remove(evaluation)
        del self._due[bisect_right(self._due, target) :]
        if self._due[-1:] != [target]:
            self._due.append(target)
            self._forgotten.discard(target)
        if not self._has_result(target) and self._find(target) is None:
            self._add(target)

    def _add(self, after_step: int) -> Evaluation:
        evaluation = Evaluation(after_step, self._policy.round_after(after_step))
        self._open.append(evaluation)
        return evaluation

    def _has_result(self, after_step: int) -> bool:
        return after_step in self._done or after_step in self._forgotten

    def _forget_oldest(self) -> None:
        """Drop the metrics of old results that are reported and handled by callbacks."""
        heard = [after_step for after_step in self._done if after_step <= self.handled]
        reported = sorted(after_step for after_step in heard if after_step not in self._unreported)
        for after_step in reported[:-RESULTS_KEPT]:
            del self._done[after_step]
            self._forget(after_step)

    def _forget(self, after_step: int) -> None:
        """Mark a result as forgotten, with all steps since the previous evaluation, so that neighbours merge."""
        before = bisect_left(self._due, after_step)
        self._forgotten.add_range(self._due[before - 1] + 1 if before else 0, after_step + 1)

    def judged_steps(self) -> dict[int, int]:
        """Return the number of steps in the evaluated weights, by `after_step`; only without rounds."""
        return {after_step: e.judged_steps for after_step, e in self._done.items() if e.judged_steps}

    def _end(self, evaluation: Evaluation, metrics: Mapping[str, float], weights: str, judged_steps: int) -> None:
        self._free(evaluation)
        self._open.remove(evaluation)
        evaluation.metrics, evaluation.weights = dict(metrics), weights
        evaluation.judged_steps = judged_steps if evaluation.round is None else 0
        self._done[evaluation.after_step] = evaluation

    def _find(self, after_step: int) -> Evaluation | None:
        return next((e for e in self._open if e.after_step == after_step), None)

    def _free(self, evaluation: Evaluation) -> None:
        self._held.pop(evaluation.after_step, None)
        evaluation.holder = None


def evaluation_steps(steps_total: int, steps_per_epoch: int, every_epochs: float) -> list[int]:
    """Return the numbers of complete steps at which to evaluate: every `every_epochs` (0: never), and at the end."""
    periodic = []
    if every_epochs > 0:
        interval = max(1.0, every_epochs * steps_per_epoch)  # at most once per step
        periodic = [round(interval * i) for i in range(1, int(steps_total / interval) + 1)]
    return sorted({step for step in periodic if step < steps_total} | {steps_total})
