"""Apply losses, evaluations and callbacks' decisions to a job: warnings with advice, targets, learning rates, stops.

Pure. `parashard_coordinator.core.evaluations` has the results, `parashard_coordinator.core.learning` judges the
training loss, `parashard_coordinator.core.callback_progress` has the callbacks' progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parashard.errors import ConfigurationError, NotReady
from parashard.figures import metric, metric_name
from parashard_coordinator.core.callback_progress import ENDS_AT_ONCE, DecidedRate
from parashard_coordinator.core.calls import EvaluationResult, FailureKind, FollowAnswer, FollowCall, JobState
from parashard_coordinator.core.evaluations import Evaluation
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.learning import Change, in_words
from parashard_coordinator.core.progress import Staleness

HELD_OUT = "held-out "  # prefix of the key of a metric's problem


def take_result(job: JobRecord, result: EvaluationResult) -> None:
    """Record a worker's result of an evaluation, which may end the job."""
    after_step, metrics = result.after_step, result.metrics
    if tuple(result.incarnations) != job.shards.incarnations():
        job.add_event(
            f"a result of the evaluation after step {after_step:,} is void: a shard has another incarnation by now"
        )
    elif result.error:
        if not job.over:
            job.add_event(f"the evaluation after step {after_step:,} failed: {result.error}")
        given_up = job.evaluations.fail(after_step, result.error)
        if result.kind is FailureKind.WRONG_RESULT:
            job.fail(f"{result.error}; the evaluation after step {after_step:,} failed", must_be_fixed=True)
        elif given_up:
            job.fail(given_up, must_be_fixed=True)
    elif job.evaluations.finish(after_step, metrics, result.weights, result.judged_steps):
        job.decisions += 1
        for one in job.evaluations.unreported():
            metrics_then = sorted((one.metrics or {}).items())
            shown = ", ".join(f"{metric_name(name)} {metric(value)}" for name, value in metrics_then)
            later = one.judged_steps > one.after_step
            of_which = f", of the weights after {one.judged_steps:,} steps" if later else ""
            job.add_event(f"step {one.after_step:,}: {f'held-out {shown}' if shown else 'no metrics'}{of_which}")
            _check_finite(job, one)
        _check_targets(job, metrics)


def _check_finite(job: JobRecord, evaluation: Evaluation) -> None:
    for name, value in (evaluation.metrics or {}).items():
        named = f"held-out {metric_name(name)}"
        if math.isfinite(value):
            job.resolve(f"{HELD_OUT}{name}", f"{named} is finite again after step {evaluation.after_step:,}")
        else:
            job.warn(f"{HELD_OUT}{name}", f"{named} is {in_words(value)} after step {evaluation.after_step:,}")


def _check_targets(job: JobRecord, metrics: Mapping[str, float]) -> None:
    reached = ""
    for name, bound, largest in job.options.targets():
        if name not in metrics:
            found = ", ".join(sorted(metrics)) or "none"
            job.warn(
                f"target {name}",
                f"evaluation.target_{name} cannot be reached: the model's evaluations have no {name}; "
                f"their metrics: {found}",
            )
        elif (metrics[name] >= bound) if largest else (metrics[name] <= bound):
            reached = f"held-out {metric_name(name)} {metric(metrics[name])} reached the target {bound}"
    if reached:
        job.stop_at_frontier(reached)


def judged_again(steps: list[int]) -> str:
    """Return the event for evaluations that are repeated because a shard lost their weights."""
    if len(steps) == 1:
        return f"the evaluation after step {steps[0]:,} is done again: its weights were lost"
    between = f"steps {min(steps):,} to {max(steps):,}"
    return f"{len(steps):,} evaluations, after {between}, are done again: their weights were lost"


def loss_of_step(job: JobRecord, step: int, loss: float | None) -> None:
    """Record the loss of a step that every shard has; report problems that begin or end."""
    _tell(job, job.learning.step_completed(step, loss, fresh=_is_fresh(job), done=_done_share(job)), step)


def job_ends(job: JobRecord) -> None:
    """Judge the loss at the end of the job, before the report is written."""
    if not job.over:
        _tell(job, job.learning.ended(job.leases.target), job.leases.target - 1)


def staleness_seen(job: JobRecord, staleness: Staleness) -> None:
    """Record the staleness so far; add it to warnings that lack it, and at the end update all of them."""
    job.staleness = staleness
    for change, step, said in list(job.loss_problems.values()):
        if job.leases.finished or (not said and _is_known(job)):
            _warn(job, change, step)


def _tell(job: JobRecord, changes: Sequence[Change], step: int) -> None:
    for change in changes:
        if change.over:
            job.loss_problems.pop(change.key, None)
            job.resolve(change.key, change.text)
        else:
            _warn(job, change, step)


def _is_known(job: JobRecord) -> bool:
    """Tell whether the shards have reported at least half as many pushes as steps; they report once a second."""
    return 0 < job.progress.steps <= 2 * job.staleness.pushes


def _warn(job: JobRecord, change: Change, step: int) -> None:
    is_known = _is_known(job)
    job.loss_problems[change.key] = change, step, is_known
    has_rounds = job.policy.round_after(0) is not None
    causes = [str(Staleness() if has_rounds else job.staleness)] if is_known or has_rounds else []
    rate = job.options.learning_rate_at(step, job.callback_progress.rate_of(step))
    causes += [] if rate is None else [f"learning rate {rate:.3g}"]
    because = f" ({', '.join(causes)})" if causes else ""
    advice = job.options.advice.against_rise if change.rose else job.options.advice.against_standstill
    job.warn(change.key, f"{change.text}{because}; {advice}")


def _is_fresh(job: JobRecord) -> bool:
    """Tell whether gradients are computed on the newest weights: by a single worker, in rounds, or without a lag."""
    if job.controller is not None:
        return job.controller.lag == 0
    return job.policy.round_after(0) is not None or (job.options.fresh_alone and len(job.workers.by_name) == 1)


def _done_share(job: JobRecord) -> float:
    """Return the share of the steps that is complete; a half if the job's length is open."""
    if job.leases.finished:
        return 1.0
    return 0.5 if job.scheduled is not None else len(job.leases.complete) / (job.leases.target + 1)


UNUSED_RATE = "unused-rate"  # a problem's key
RATES_SHOWN = 4


def follow(job: JobRecord, call: FollowCall) -> FollowAnswer:
    """Apply the callbacks' decisions at the last milestone that they handled; return the next one."""
    progress = job.callback_progress
    if job.state is JobState.STARTING:
        raise NotReady("not every shard is up")
    rate = call.learning_rate
    for one in [] if rate is None else [rate, *(planned for _, planned in call.planned)]:
        if not 0.0 <= one < math.inf:
            raise ConfigurationError(f"a learning rate must be finite and not below 0, found {one!r}")
    if (rate is not None or call.stop_reason) and not progress.decides:
        raise ConfigurationError("callbacks decide nothing in this run: it was started without --callbacks=decide")
    if call.handled > progress.handled:
        job.leases.advance_frontier(
            call.handled - 1
        )  # an earlier coordinator reported it, so all steps before it were leased
    all_leased = job.leases.leased_so_far() >= job.leases.target  # then a decision has no step left to govern
    if rate is not None and not (job.over or all_leased):
        frontier = job.leases.leased_so_far()
        decided = progress.decide(
            rate, call.decision, call.handled, frontier, between=call.between, planned=call.planned
        )
        if decided:
            job.decisions += 1
            job.add_event(f"{_rates_in_words(decided)}: callbacks decided it after step {call.handled:,}")
    elif rate is not None and call.decision > progress.decided and call.handled < job.leases.target:
        job.warn(UNUSED_RATE, f"the learning rate {metric(rate)} came when every step was leased, and is not used")
    if call.stop_reason and job.state is JobState.RUNNING and progress.stopped_by is None and not all_leased:
        progress.stopped_by = call.handled
        job.decisions += 1
        job.stop_at_frontier(call.stop_reason)
    progress.handle(call.handled)
    progress.ends.want(call.wants_steps)
    target = job.leases.target
    ends, seen = progress.ends.since(call.steps_seen if call.coordinator == job.options.incarnation else 0)
    milestone = progress.reached(job.leases.lowest_incomplete, target)
    if len(ends) == ENDS_AT_ONCE:
        milestone = None  # callbacks get all its steps first
    elif milestone is not None and job.awaits_reports and job.figures.missing_in(milestone.epochs):
        milestone = None  # workers will repeat reports of steps that an earlier coordinator has not stored
    return FollowAnswer(
        job.options.incarnation,
        job.state,
        milestone,
        ends,
        seen,
        target,
        progress.rates[-1] if progress.rates else None,
        progress.stopped_by,
    )


def _rates_in_words(rates: Sequence[DecidedRate]) -> str:
    """Describe learning rates with their first steps."""
    shown = [f"{metric(rate.learning_rate)} from step {rate.first_step:,} on" for rate in rates[:RATES_SHOWN]]
    more = len(rates) - len(shown)
    return f"the learning rate is {', '.join(shown)}" + (f" (and {more:,} more changes)" if more else "")
