"""Warnings of the training loss: what it does, the staleness, the learning rate in force, and what to change.

Pure. `parashard_coordinator.core.learning` decides what is wrong; called by the core with each step, and by the main
loop with each look at the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.learning import Change
from parashard_coordinator.core.staleness import Staleness


def loss_of_step(job: JobRecord, step: int, loss: float | None) -> None:
    """Take note of the loss of a step that every shard has, and tell what is wrong with it, or is over."""
    _tell(job, job.learning.step_completed(step, loss, fresh=_is_fresh(job), done=_done_share(job)), step)


def job_ends(job: JobRecord) -> None:
    """Tell what is wrong with the loss at the end, before the report says it."""
    if not job.over:
        _tell(job, job.learning.ended(job.leases.target), job.leases.target - 1)


def staleness_seen(job: JobRecord, staleness: Staleness) -> None:
    """Take note of the staleness so far: warnings that lack it say it now, and all of them at the end."""
    job.staleness = staleness
    for change, step, said in list(job.loss_problems.values()):
        if job.leases.finished or (not said and _is_known(job)):
            _warn(job, change, step)


def _tell(job: JobRecord, changes: Sequence[Change], step: int) -> None:
    for change in changes:
        if change.over:
            job.loss_problems.pop(change.key, None)
            job.resolved(change.key, change.text)
        else:
            _warn(job, change, step)


def _is_known(job: JobRecord) -> bool:
    """Tell whether the shards have told of the staleness of most pushes; they tell once a second."""
    return 0 < job.progress.steps <= 2 * job.staleness.pushes


def _warn(job: JobRecord, change: Change, step: int) -> None:
    is_known = _is_known(job)
    job.loss_problems[change.key] = change, step, is_known
    has_rounds = job.policy.round_of(0) is not None
    causes = [str(Staleness() if has_rounds else job.staleness)] if is_known or has_rounds else []
    rate = job.options.learning_rate_at(step, job.callback_progress.rate_of(step))
    causes += [] if rate is None else [f"learning rate {rate:.3g}"]
    because = f" ({', '.join(causes)})" if causes else ""
    advice = job.options.advice.against_rise if change.rose else job.options.advice.against_standstill
    job.warn(change.key, f"{change.text}{because}; {advice}")


def _is_fresh(job: JobRecord) -> bool:
    """Gradients are computed on the newest weights: by one worker alone, or in rounds or batches without a lag."""
    if job.controller is not None:
        return job.controller.lag == 0
    return job.policy.round_of(0) is not None or (job.options.fresh_alone and len(job.workers.by_name) == 1)


def _done_share(job: JobRecord) -> float:
    """Return which share of the steps is complete; a half, where it is not known how many there will be."""
    if job.leases.finished:
        return 1.0
    return 0.5 if job.scheduled is not None else len(job.leases.complete) / (job.leases.target + 1)
