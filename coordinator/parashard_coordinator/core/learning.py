"""Learning: the training loss of a job, and its problems: not finite, running away, or not falling. Pure.

Each problem begins once, and ends when the loss has recovered. `parashard_coordinator.core.loss_curve` judges the whole
curve; this module judges the latest steps, and gives advice by consistency policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from parashard.figures import metric, percent
from parashard.job.policy import Policy
from parashard_coordinator.core.loss_curve import Curve, LossProblem, finding

LOSS_SMOOTHING = 0.05  # weight of the newest step in the smoothed loss
RUNAWAY_FACTOR = 4.0  # a loss runs away if, smoothed, it exceeds this many times its best
RUNAWAY_SHARE = 0.5  # and this share of the first loss: four times a negligible loss is still negligible
RUNAWAY_AFTER_STEPS = 20  # the first steps are not judged
RECOVERED_STEPS = 20  # consecutive finite losses that end the problem of a loss that was not finite
JUDGED_EVERY = 16  # steps
JUDGED_SHARE, JUDGED_STEPS = 0.25, 1000  # share of the job or steps before its whole curve is judged: warm-ups are long
FELL_JUDGEMENTS = 6  # consecutive judgements by which the loss falls that end the problem that it did not
WARNINGS_MAX = 5
NOT_FINITE, RISES, NOT_FALLING = "loss-not-finite", "loss-rises", "loss-not-falling"  # problems' keys


class Change(NamedTuple):
    """A problem that begins, or that is over, with the text to report."""

    key: str
    text: str
    over: bool = False
    rose: bool = True  # the loss got worse; else it does not move


class Learning:
    """The training loss of one job."""

    def __init__(self, classes: int = 0, *, continued: bool = False) -> None:
        self.loss = math.nan
        self.curve = Curve()
        self._classes, self._continued = classes, continued
        self._steps = 0
        self._best_loss = math.inf
        self._first_loss = 0.0
        self._told = 0
        self._finite_due = 0  # finite steps until the warning of a loss that was not finite ends; 0: there is none
        self._recovered_below: float | None = None  # the loss at which the warning of a runaway loss ends
        self._finding: LossProblem | None = None
        self._fell = 0  # consecutive judgements by which the loss falls

    def resume(self, losses: Sequence[float], curve: Sequence[Sequence[float]]) -> None:
        """Restore earlier coordinators' losses and curve."""
        if losses:
            self.loss, self._first_loss, self._best_loss = losses
            self._continued |= not curve  # an earlier version stored no curve
        self.curve.resume(curve)

    def losses(self) -> tuple[float, ...]:
        """Return the smoothed loss, the first and the best one; empty before the first step."""
        seen = not math.isnan(self.loss)
        return (self.loss, self._first_loss, min(self._best_loss, self.loss)) if seen else ()

    def step_completed(self, step: int, loss: float | None, *, fresh: bool = True, done: float = 1.0) -> list[Change]:
        """Record a step's loss; return the problems that begin or end."""
        # A skipped step has no loss, and a program's own loop may omit it. `fresh`: gradients are computed on the
        # newest weights. `done` is the share of the job's steps that are complete.
        self._steps += 1
        return (self._look(step, loss, fresh=fresh) if loss is not None else []) + self._judge(step, done)

    def ended(self, step: int) -> list[Change]:
        """Judge the whole curve as the job ends: it may end early, or under another coordinator than its last step."""
        return self._judge(step, 1.0)

    def _look(self, step: int, loss: float, *, fresh: bool) -> list[Change]:
        """Add a loss; return the problems that begin or end with it."""
        if not math.isfinite(loss):
            stands = self._finite_due > 0
            what = f"training diverged: loss became {in_words(loss)} at step {step:,}"
            changes = [] if stands else self._begin(NOT_FINITE, what)
            self._finite_due = RECOVERED_STEPS if stands or changes else 0
            return changes
        if math.isnan(self.loss):
            self._first_loss = abs(loss)
        if not fresh:
            self.curve.staleness_begins()
        self.loss = loss if math.isnan(self.loss) else self.loss + LOSS_SMOOTHING * (loss - self.loss)
        self.curve.add(loss)
        return self._not_finite_is_over(step) + self._rise(step)

    def _not_finite_is_over(self, step: int) -> list[Change]:
        if not self._finite_due:
            return []
        self._finite_due -= 1
        recovered = f"the training loss has been finite for {RECOVERED_STEPS} steps, at step {step:,}"
        return [] if self._finite_due else [Change(NOT_FINITE, recovered, over=True)]

    def _rise(self, step: int) -> list[Change]:
        if self._recovered_below is not None:
            if self.loss > self._recovered_below:
                return []
            self._recovered_below = None
            back = f"the training loss has come back to {metric(self.loss)}, at step {step:,}"
            return [Change(RISES, back, over=True)]
        self._best_loss = min(self._best_loss, self.loss)
        bound = max(RUNAWAY_FACTOR * abs(self._best_loss), RUNAWAY_SHARE * self._first_loss) + 0.1
        if self._steps <= RUNAWAY_AFTER_STEPS or self.loss <= bound:
            return []
        best = metric(self._best_loss)
        what = f"training diverges: loss has risen to {metric(self.loss)} at step {step:,}, best {best}"
        changes = self._begin(RISES, what)
        self._recovered_below = bound / 2 if changes else None
        return changes

    def _judge(self, step: int, done: float) -> list[Change]:
        """Judge the whole curve every JUDGED_EVERY steps, and at the end."""
        is_early = done < JUDGED_SHARE and self._steps < JUDGED_STEPS
        if done < 1.0 and (is_early or self._steps % JUDGED_EVERY):
            return []
        found, before = finding(self.curve, classes=self._classes, continued=self._continued), self._finding
        runs_away = self._recovered_below is not None  # reported already
        self._fell = 0 if found is not None else self._fell + 1
        if found is not None and not runs_away and (before is None or done >= 1.0):
            changes = self._begin(NOT_FALLING, f"the training loss {found.text}", rose=found.rose, last=done >= 1.0)
            self._finding = found if changes else None
            return changes
        if before is not None and found is None and (self._fell >= FELL_JUDGEMENTS or done >= 1.0):
            self._finding = None
            return [Change(NOT_FALLING, f"the training loss falls, at step {step:,}", over=True)]
        return []

    def _begin(self, key: str, text: str, *, rose: bool = True, last: bool = False) -> list[Change]:
        if self._told >= WARNINGS_MAX and not last:
            return []
        self._told += 1
        return [Change(key, text, rose=rose)]


def in_words(value: float) -> str:
    """Return a word for a number that is not finite."""
    return "NaN" if math.isnan(value) else "infinite"


HIDEABLE_MIN = 0.1  # share of a step that a pipeline could hide; less is not worth it


class Advice(NamedTuple):
    """Advice against a loss that rises, and against one that stands still."""

    against_rise: str = "lower optimizer.learning_rate or set optimizer.clip_norm"
    against_standstill: str = "try a lower and a higher optimizer.learning_rate, and check labels, inputs and loss"


def advice_for(policy: Policy, *, pipeline_depth: int, workers: int, clips: bool) -> Advice:
    """Return the advice: first against staleness, if there may be any, then about the learning rate."""
    clipping = "lower" if clips else "set"
    rises = f"lower optimizer.learning_rate or {clipping} optimizer.clip_norm"
    stands = Advice().against_standstill
    fresher = _fresher(policy, pipeline_depth, workers)
    return Advice(f"{fresher}{rises}", f"{fresher}{stands}")


def pipeline_advice(policy: Policy, pipeline_depth: int, hideable_share: float) -> str:
    """Return the gain and cost of a pipeline in words; "" if the gain is small or there is a pipeline already."""
    if policy.kind not in ("async", "ssp") or pipeline_depth or hideable_share <= HIDEABLE_MIN:
        return ""
    hides = percent(hideable_share)
    return f"cluster.pipeline_depth = 1 would hide up to {hides} of a step, and make each gradient a step staler"


def _fresher(policy: Policy, pipeline_depth: int, workers: int) -> str:
    """Return advice against staleness, as the beginning of a sentence."""
    if policy.kind not in ("async", "ssp"):
        return ""
    if pipeline_depth:
        return "first set cluster.pipeline_depth = 0; then "
    if workers < 2:
        return ""
    smaller = " or a smaller K" if policy.kind == "ssp" and policy.bound else ""
    return f'use consistency.policy = "auto"{smaller}, or '
