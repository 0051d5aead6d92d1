"""The in-memory state of a job at its start, from the resolved job. Called by coordinators and in-process training."""

from __future__ import annotations

from functools import partial

from parashard.job.schema import Job
from parashard_coordinator.core.callback_progress import NO_CALLBACKS, CallbackOptions
from parashard_coordinator.core.calls import CoreSettings
from parashard_coordinator.core.evaluations import Evaluations, evaluation_steps
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.learning import advice_for
from parashard_coordinator.core.policies import leasing_policy
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.supervision import LocalLauncher
from parashard_coordinator.run.resolve import ResolvedJob


def new_job_record(
    resolved: ResolvedJob,
    run_id: str,
    incarnation: int,
    callbacks: CallbackOptions = NO_CALLBACKS,
    *,
    open_: bool = False,
) -> JobRecord:
    """Return the state of a job at its start."""
    job, steps = resolved.job, resolved.steps
    policy = leasing_policy(job.consistency.policy)
    after = evaluation_steps(steps.total, steps.steps_per_epoch, job.evaluation.every_epochs)
    evaluations = Evaluations(after if resolved.spec.held_out else [], policy, steps.total)
    launcher = None
    if job.cluster.is_launched:
        launcher = LocalLauncher(job.cluster.shards, job.cluster.restart_backoff_s, job.cluster.max_restarts)
    advice = advice_for(
        job.consistency.policy,
        pipeline_depth=job.cluster.pipeline_depth,
        workers=job.cluster.workers,
        clips=job.optimizer.clip_norm is not None,
    )
    options = CoreSettings(
        run_id=run_id,
        incarnation=incarnation,
        job_digest=resolved.digest,
        steps_total=steps.total,
        open=open_,
        shards=job.cluster.shards,
        workers=job.cluster.workers,
        lease_batch=job.cluster.lease_batch,
        lease_ttl_s=job.cluster.lease_ttl_s,
        silence_s=job.cluster.silence_s,
        start_s=job.cluster.start_s,
        speculate_after=job.cluster.speculate_after,
        max_attempts=job.job.max_attempts,
        skip_bad_steps=job.job.on_bad_step == "skip",
        target_accuracy=job.evaluation.target_accuracy,
        target_loss=job.evaluation.target_loss,
        target_mean_squared_error=job.evaluation.target_mean_squared_error,
        same_arithmetic=job.consistency.policy.kind == "sync" and not job.cluster.allow_mixed,
        examples_of=_call_in_words if open_ else steps.examples_in_words,
        steps_per_epoch=steps.steps_per_epoch,
        first_epoch=job.job.first_epoch or 0,
        callbacks=callbacks,
        advice=advice,
        learning_rate_at=partial(_learning_rate_at, job, steps.total),
        classes=resolved.spec.classes,
        fresh_alone=not job.cluster.pipeline_depth,
        continued=bool(job.job.updates_before or job.job.first_epoch),
    )
    rounds = Rounds()
    if job.consistency.policy.kind == "sync":
        rounds = Rounds(job.cluster.shards, job.consistency.policy.bound, steps.total, job.checkpoint.every_s)
    return JobRecord(options, policy, evaluations, launcher, rounds)


def _learning_rate_at(job: Job, steps_total: int, step: int, decided: float) -> float:
    """Return the learning rate of a step's update: the decided rate or the job's own, times the schedule's factor."""
    policy = job.consistency.policy
    together = 1 if policy.kind in ("async", "ssp") else policy.bound  # steps per update
    before = job.job.updates_before
    if before is None:
        before = (job.job.first_epoch or 0) * (steps_total // job.job.epochs) // together
    schedule = job.optimizer.schedule.resolved(before - (-steps_total // together))
    return (decided or job.optimizer.learning_rate) * schedule.factor(before + step // together + 1)


def _call_in_words(step: int) -> str:
    """Describe a step of a job of open length as a call of its program, to append to an error message."""
    return f" (call {step:,} of coordinator.schedule, counted from 0)"
