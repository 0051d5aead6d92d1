"""Results of evaluations: what they show of the weights, and whether a target is reached.

Pure. `parashard_coordinator.core.evaluations` has the results; called by `parashard_coordinator.core.core`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from parashard.figures import metric, metric_name
from parashard_coordinator.core.calls import EvaluationResult, FailureKind
from parashard_coordinator.core.early_stop import stop_at_frontier
from parashard_coordinator.core.evaluations import Evaluation
from parashard_coordinator.core.job_record import JobRecord

HELD_OUT = "held-out "  # a metric's problem's key, with its name


def take_result(job: JobRecord, result: EvaluationResult) -> None:
    """Take a worker's result of an evaluation; what it shows may end the job."""
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
            job.resolved(f"{HELD_OUT}{name}", f"{named} is finite again after step {evaluation.after_step:,}")
        else:
            what = "NaN" if math.isnan(value) else "infinite"
            job.warn(f"{HELD_OUT}{name}", f"{named} is {what} after step {evaluation.after_step:,}")


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
        stop_at_frontier(job, reached)


def judged_again(steps: list[int]) -> str:
    """Return the event of evaluations, by the steps before them, whose weights a shard lost."""
    if len(steps) == 1:
        return f"the evaluation after step {steps[0]:,} is done again: its weights were lost"
    between = f"steps {min(steps):,} to {max(steps):,}"
    return f"{len(steps):,} evaluations, after {between}, are done again: their weights were lost"
