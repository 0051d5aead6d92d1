"""Core: the coordinator's decisions, as functions of (state, call, now).

Pure: no gRPC, no clock, no disk, no randomness. Applies the calls of shards, workers and launchers to the state of the
job (`parashard_coordinator.core.job_record`); `results` and `auto_jobs` handle losses, evaluations, callbacks and
`auto`. `parashard_coordinator.endpoints.service` translates calls, and `parashard_coordinator.exclusive_core` holds a
lock around this object.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parashard.errors import ConfigurationError, JobFailed, MalformedFrame, QueueFull
from parashard.figures import counted
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.auto_jobs import at_most, depth, next_batches, refill, sharing, steer, steered
from parashard_coordinator.core.callback_progress import StepResult
from parashard_coordinator.core.calls import (
    Announcement,
    CompletedStep,
    FailedStep,
    FailureKind,
    JobState,
    LeaseAnswer,
    LeaseCall,
)
from parashard_coordinator.core.draining import Answer
from parashard_coordinator.core.evaluations import Evaluation
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.core.leases import Grant
from parashard_coordinator.core.membership import WorkerRecord
from parashard_coordinator.core.results import judged_again, loss_of_step, take_result
from parashard_coordinator.core.supervision import Exit, Orders, PodEnd, ProcessName

WORKERS_MAX = 4096
SHARD_SILENCE_SHOWN_S = 3.0
CALLBACKS_WAIT_SHOWN_S = 10.0
NO_WORKER = "no worker"
SLOW = "slow"
SLOW_RETRY_S = 1.0  # a slow worker's retry interval: its call is not held, since no step that others free is for it
ALL_CALLS = 1 << 30


class Core:
    """Decides for one job."""

    def __init__(self, job: JobRecord) -> None:
        self.job = job
        self._shard_seen_s: dict[int, float] = {}
        self._began_s = math.inf  # time of the first tick or `supervise` call
        self._slow_told = False
        self._callbacks_s: float | None = None  # time of the last `_check_callbacks`
        self._callbacks_waited_s = 0.0

    # --- shards ---

    def announced(self, shard: int, announcement: Announcement, now_s: float) -> None:
        """Apply a shard's announcement; a new incarnation replaces all earlier knowledge of the shard."""
        job = self.job
        held_stop = announcement.held.stop()
        furthest = max(held_stop, announcement.applied.stop())
        if furthest > job.options.steps_total:
            raise MalformedFrame(f"shard {shard} holds step {furthest - 1}; this job has {job.options.steps_total}")
        earlier = job.last_incarnation(shard)
        registration, skipped = announcement.registration, announcement.skipped
        is_new = job.shards.register(shard, registration)
        self._shard_seen_s[shard] = now_s
        held = job.leases.acknowledged_steps(announcement.applied, announcement.held, skipped)
        job.rounds.note_progress(shard, announcement._replace(held=held))
        job.leases.advance_frontier(held_stop - 1)
        if is_new:
            self.shard_answered(shard)
            # A process that rolled back to a round has a new incarnation: that is no restart.
            process = announcement.first_incarnation or registration.incarnation
            job.shard_restarts += 0 < earlier < process
            begun = "started" if not earlier else "restarted" if earlier < process else "reconnected"
            lost = job.leases.shard_registered(shard, held)
            restored = announcement.restored or "initial values"
            what = f"shard-{shard} {begun} ({registration.address}): {restored}"
            job.add_event(what + _recomputed(lost))
        else:
            for step in job.leases.confirm(shard, held):
                job.add_event(f"every shard has step {step:,} already; it is not tried again")
        self._has_skipped(shard, announcement.applied, announcement.skipped, new_incarnation=is_new)
        begins = job.state is JobState.STARTING and job.shards.all_registered
        if begins:
            job.change_state(JobState.RUNNING, "every shard is up")
            is_new = True
            if job.early_stop:
                job.change_state(JobState.DRAINING, job.early_stop)
        if job.rounds.decide_rollback(job.leases.held_by_shard):
            round_ = job.rounds.returning_to
            if round_ is None:
                job.add_event("every shard stands at the same round again")
            else:
                job.add_event(f"warning: a shard lost steps that others have applied; all return to round {round_}")
        job.leases.complete_committed(job.rounds.committed())
        if is_new and job.state is not JobState.STARTING and job.ending is None:
            complete = job.leases.lowest_incomplete
            if begins and list(job.shards.incarnations()) != job.earlier_incarnations:
                # The stored result may be of other final weights: the record may predate a shard's restart.
                complete = min(complete, job.leases.target - 1)
            again = [evaluation.after_step for evaluation in job.evaluations.shard_returned(complete)]
            job.decisions += len(again)  # or a successor would attribute an old result to the present weights
            if again:
                job.add_event(judged_again(again))
        self._drop_passed_evaluations()

    def shard_answered(self, shard: int) -> None:
        """Record that a shard answers the coordinator; its announcements alone do not prove that."""
        self.job.silent_shards.discard(shard)
        self.job.ended_shards.discard(shard)
        self.job.resolve(_silence_of(shard), f"shard-{shard} answers again")

    def shard_silent(self, shard: int, silent_s: float, error: str) -> None:
        """Record that a shard's present incarnation does not answer."""
        job = self.job
        if silent_s > SHARD_SILENCE_SHOWN_S and shard not in job.silent_shards:
            job.silent_shards.add(shard)
            job.warn(_silence_of(shard), f"shard-{shard} does not answer; training is paused until it does ({error})")

    # --- workers ---

    def register_worker(
        self, name: str, fingerprint: str, device: str, http_address: str, now_s: float, token: int = 0
    ) -> WorkerRecord:
        """Register a worker; an earlier incarnation under its name loses its leases."""
        job = self.job
        if job.state is JobState.FAILED:
            raise JobFailed(f"the job has failed: {job.reason}")
        before = job.workers.worker_of(token)
        known = job.workers.by_name
        if before is None and len(known) >= WORKERS_MAX and job.workers.name_for(name) not in known:
            # A name is never forgotten, or its incarnations would begin again. A worker with a new name cannot
            # change that; its launcher must not give up on the whole job.
            raise QueueFull(f"the job has had {WORKERS_MAX} workers of different names already; a known name may join")
        job.decisions += not job.workers.fingerprint  # the first worker's arithmetic becomes the job's
        earlier = known.get(job.workers.name_for(name))
        worker = job.workers.register(name, fingerprint, device, http_address, now_s, token)
        if worker is before:
            return worker  # the same process again, which lost our answer
        if earlier is not None and earlier.live:
            self._died(earlier, "another process has its name", now_s)
        job.leases.end(worker.name)
        job.evaluations.renew(worker.name, [])
        job.supervision.joined(worker.name, restarted=worker.restarted)
        job.resolve(NO_WORKER)
        first = "joined" if job.options.incarnation > 1 else "started"  # an earlier coordinator may have known it
        job.add_event(f"{worker.name} {'restarted' if worker.restarted else first} ({device})")
        return worker

    def lease(self, call: LeaseCall, now_s: float) -> LeaseAnswer:
        """Process a worker's report, renew the leases that it lists, and grant new ones."""
        job = self.job
        worker = job.workers.record_call(call.worker, call.incarnation, call.sequence, now_s)
        job.resolve(NO_WORKER)
        worker.phases_s.update(call.phases_s)
        worker.gpu_memory = call.gpu_memory
        job.leases.times.waited(worker.name, worker.phases_s["lease"])
        for step in call.completed:
            self._completed(worker, step, now_s)
        steer(job, worker, call.drifts, now_s)
        for failed in call.failed:
            self._failed(worker, FailedStep(*failed), now_s)
        for result in call.evaluated:
            take_result(job, result)
        job.tell_warnings(worker.name, call.warnings)
        job.evaluations.renew(call.worker, list(call.held_evaluations))
        revoked = job.leases.renew(call.worker, call.held, now_s)
        worker.computing = tuple(call.computing)
        if call.leaving:
            self._left(worker, "gave its leases back")
            return self._answer(worker, [], [], revoked, "the worker leaves")
        return self.grant(worker, call.want, now_s, revoked, steps_only=call.steps_only)

    def grant(
        self, worker: WorkerRecord, want: int, now_s: float, revoked: Sequence[int] = (), *, steps_only: bool = False
    ) -> LeaseAnswer:
        """Grant up to `want` steps, or instead an evaluation if one is due, unless `steps_only`."""
        job = self.job
        if job.state is JobState.STARTING:
            return self._answer(worker, [], [], revoked, "not every shard is up")
        if job.over or not want:
            return self._answer(worker, [], [], revoked, job.reason)
        if job.ending is not None:
            return self._answer(worker, [], [], revoked, "every step is in; the report follows")
        evaluations: list[Evaluation] = []
        if job.rounds.returning_to is None and not steps_only:
            lowest = job.leases.lowest_incomplete
            if job.evaluations.is_due(lowest):
                evaluations = job.evaluations.grant(worker.name, lowest, job.shards.incarnations(), now_s)
        if evaluations:
            return self._answer(worker, [], evaluations, revoked, "")
        want, why_none, is_slow = at_most(job, worker, want, now_s)
        if not want:
            answer = self._answer(worker, [], [], revoked, why_none)
            return answer._replace(may_wait=False, retry_after_s=SLOW_RETRY_S) if is_slow else answer
        most = min(want, job.options.lease_batch)
        limit = self._lease_limit()
        granted = job.leases.grant(worker.name, most, sharing(job, now_s), now_s, limit, next_batches(job))
        if granted and job.progress.first_lease_s is None:
            job.progress.first_lease_s = now_s
        job.decisions += any([job.callback_progress.leases(grant.step) for grant in granted])
        granted = [grant._replace(learning_rate=job.callback_progress.rate_of(grant.step)) for grant in granted]
        return self._answer(worker, steered(job, granted), [], revoked, "" if granted else self.job.why_no_step)

    def openings(self, now_s: float) -> int:
        """Return an upper bound on how many waiting calls can be answered now."""
        job = self.job
        if job.over:
            return ALL_CALLS
        if job.state is JobState.STARTING or job.ending is not None:
            return 0
        if job.rounds.returning_to is None and job.evaluations.is_due(job.leases.lowest_incomplete):
            return ALL_CALLS  # a call that accepts only steps cannot take the evaluation
        return job.leases.openings(now_s, self._lease_limit(), next_batches(job))

    def tick(self, now_s: float) -> None:
        """End the leases of workers that were silent for the lease time, and report slow steps and callbacks."""
        self._begin(now_s)
        for worker in self.job.workers.silent(now_s):
            silent = f"was silent for {now_s - worker.last_seen_s:.1f} s"
            self._died(worker, silent, now_s)
            self._left(worker, silent)
        if now_s - self._began_s > self.job.options.lease_ttl_s:
            self.job.awaits_reports = False
        self._check_slow(now_s)
        self._check_callbacks(now_s)

    # --- operators and the launcher ---

    def scale(self, workers: int) -> None:
        """Set how many workers the launcher keeps alive."""
        job = self.job
        if not 0 <= workers <= WORKERS_MAX:
            raise ConfigurationError(f"workers must be from 0 to {WORKERS_MAX}, found {workers}")
        if workers != job.workers_wanted:
            job.add_event(f"scaled from {job.workers_wanted} to {counted(workers, 'worker')}")
        job.workers_wanted = workers
        job.scale_requests += 1
        job.decisions += 1

    def supervise(self, exits: Sequence[Exit], running: Sequence[ProcessName], now_s: float) -> Orders:
        """Record processes that ended, end their leases, and return which processes to start, stop and kill."""
        job = self.job
        self._begin(now_s)
        for exit_ in job.supervision.new_exits(exits):
            if not job.over:
                self._exited(exit_, now_s)
        if job.over:
            return Orders()
        orders = job.supervision.orders(running, job.workers_wanted, now_s, self._seen_s, self._began_s)
        for process in orders.kill:
            silence_s = job.supervision.silence_s(process, self._seen_s(process))
            job.add_event(f"{process} is silent for {silence_s:.0f} s: it is killed")
        return orders

    def pod_ended(self, end: PodEnd) -> None:
        """Record a pod's end; its leases expire by time, since another pod may have its name by now."""
        job = self.job
        if job.over:
            return
        job.add_event(str(end))
        fatal = job.supervision.pod_ended(end)
        if fatal:
            job.fail(fatal)

    def pods_unwatched(self) -> None:
        """Count a failure of the pod watch, which restarts by itself."""
        self.job.supervision.pod_watch_errors += 1

    def create_checkpoint(self, request: int, *, stop: bool = False) -> Answer:
        """Request a drained checkpoint, or return its progress; `stop`: the job stops once it is stored."""
        job = self.job
        if job.over and not job.draining.knows(request):
            raise JobFailed(f"the job is {job.state.name.lower()}: {job.reason}")
        if not job.draining.knows(request):
            job.draining.stops |= stop
        if job.draining.target is None and not job.draining.knows(request):
            job.add_event("leasing pauses for a drained checkpoint")
        return job.draining.asked(request, job.leases.leased_so_far())

    def drain_further(self, step: int) -> None:
        """Drain at a later step: a shard has applied one that this coordinator did not know to be leased."""
        # An early stop moves up with it: a step that one shard has applied, all must apply.
        job = self.job
        job.leases.advance_frontier(step - 1)
        if step > job.leases.target:
            job.leases.target = step
            job.evaluations.stop_at(step)
            job.decisions += 1
            job.add_event(f"the early stop moves up to step {step:,}, which a shard has applied already")

    def checkpoint_ended(self, answer: Answer) -> None:
        """Resume leasing after a drain, whether its checkpoint succeeded or failed, or stop if that was requested."""
        job, stops = self.job, self.job.draining.stops
        job.draining.ended(answer)
        stored = f"checkpoint {answer.checkpoint} is stored: {answer.steps:,} steps on every shard"
        job.add_event(f"warning: the checkpoint failed: {answer.error}" if answer.error else stored)
        if stops and not answer.error:
            job.stop(f"stopped at the drained checkpoint {answer.checkpoint}: {answer.steps:,} steps on every shard")

    # --- inside ---

    def _completed(self, worker: WorkerRecord, done: CompletedStep, now_s: float) -> None:
        job = self.job
        shards = job.shards.acknowledged(done.incarnations)
        loss = None if done.skipped else done.loss
        given_up = done.step in job.leases.skips and not done.skipped
        if done.step < job.leases.target and not given_up:
            worker.steps_complete += job.figures.count(done.step, done.examples, loss, done.metrics)
        job.log_epochs()
        newly = job.leases.acknowledge(worker.name, done.step, shards, now_s, skipped=done.skipped)
        if done.step in job.leases.complete:  # also one that was reported only to an earlier coordinator
            job.callback_progress.step_completed(StepResult(done.step, loss, done.examples, done.metrics))
        if not newly:
            return
        job.supervision.step_completed()
        if not done.skipped:
            job.failures.succeeded()
        job.progress.step_completed(worker.name, done.examples, now_s)
        loss_of_step(job, done.step, loss)

    def _failed(self, worker: WorkerRecord, failed: FailedStep, now_s: float) -> bool:
        """Count a failed attempt, and stop the job if `Failures` decides so; return whether the attempt counts."""
        job = self.job
        skip, before = job.options.skip_bad_steps, job.leases.any_succeeded
        result = job.leases.fail(worker.name, failed.step, now_s, skip=skip)
        if result is None:
            return False
        examples = job.options.examples_of(failed.step)
        if failed.kind is FailureKind.DEATH:
            job.add_event(f"{failed.reason} (attempt {result.attempts} of {job.options.max_attempts}){examples}")
        else:
            job.add_event(f"{worker.name} failed at step {failed.step:,}{examples}: {failed.reason}")
        verdict = job.failures.failed(failed, result, examples, any_succeeded=before)
        if verdict is not None:
            where = f"{worker.name}: " if failed.kind is FailureKind.MODEL else ""  # its log has the whole traceback
            job.fail(f"{where}{verdict.reason}", must_be_fixed=verdict.must_be_fixed)
        elif result.given_up:
            job.decisions += 1
            named = job.failures.named(failed, any_succeeded=before)
            tried = f"after {result.attempts} attempts"
            job.add_event(f"warning: step {failed.step:,} is skipped {tried}{examples}: {named}")
        return True

    def _died(self, worker: WorkerRecord, why: str, now_s: float) -> bool:
        """Count a death as a failed attempt at each step that the worker was computing; return whether any counts."""
        job = self.job
        computing, worker.computing = worker.computing, ()
        reasons = [
            FailedStep(s, f"computing step {s:,} ended {worker.name}: {why}", FailureKind.DEATH) for s in computing
        ]
        counted = [self._failed(worker, failed, now_s) for failed in reasons]
        job.leases.mark_suspect(job.leases.held_by(worker.name))
        return any(counted)

    def _has_skipped(
        self, shard: int, applied: IntervalSet, skipped: IntervalSet, *, new_incarnation: bool = False
    ) -> None:
        job = self.job
        for step in job.skipped.update(shard, applied, skipped, new_incarnation=new_incarnation):
            job.add_event(
                f"warning: step {step:,} was given up when some shards had applied it: those keep its gradient, the "
                "others have none (partly_skipped)"
            )

    def shards_saved(self, parts: Sequence[tuple[IntervalSet, IntervalSet]]) -> None:
        """Record the applied and the skipped steps in the checkpoints of all shards, by shard."""
        for shard, (applied, skipped) in enumerate(parts):
            self._has_skipped(shard, applied, skipped)

    def _check_slow(self, now_s: float) -> None:
        """Warn about the lease that is held longest, if it is far too long."""
        job = self.job
        if job.over:
            return
        slowest, what = job.leases.slowest(now_s), "step"
        if slowest is None:
            slowest, what = job.evaluations.slowest(now_s), "the evaluation after step"
        if slowest is None:
            job.resolve(SLOW)
            self._slow_told = False
        elif not self._slow_told or SLOW in job.problems:  # if `problems` is full, warn once only
            worker, number, held_s = slowest
            job.warn(SLOW, f"{worker} has been at {what} {number} for {held_s:.0f} s")
            self._slow_told = True

    def _check_callbacks(self, now_s: float) -> None:
        """Report, once, that training has waited long for callbacks; waiting for an evaluation does not count."""
        job, since_s = self.job, self._callbacks_s
        self._callbacks_s = now_s
        waits = job.state is JobState.RUNNING and job.callbacks_limit <= job.leases.leased_so_far() < job.steps_due
        waits = waits and not job.callback_progress.is_judged(job.leases.lowest_incomplete)
        if waits and since_s is not None and self._callbacks_waited_s < CALLBACKS_WAIT_SHOWN_S:
            self._callbacks_waited_s += now_s - since_s
            if self._callbacks_waited_s >= CALLBACKS_WAIT_SHOWN_S:
                job.add_event(f"training has waited {CALLBACKS_WAIT_SHOWN_S:.0f} s for callbacks so far: they are slow")

    def _exited(self, exit_: Exit, now_s: float) -> None:
        job = self.job
        job.add_event(f"{exit_.process} ended: {exit_.reason}")
        worker = job.workers.by_name.get(str(exit_.process))
        accounted = False
        if worker is not None and worker.live:
            accounted = self._died(worker, exit_.reason, now_s)
            self._left(worker, "ended")
        if exit_.process.role == "shard":
            job.ended_shards.add(exit_.process.index)
        was_up = worker is not None or (exit_.process.role == "shard" and job.last_incarnation(exit_.process.index) > 0)
        fatal = job.supervision.ended(
            exit_,
            job.workers_wanted,
            now_s,
            was_up=was_up,
            accounted=accounted,
            shards_up=job.shards.all_registered,
        )
        if fatal:
            job.fail(fatal)

    def _left(self, worker: WorkerRecord, why: str) -> None:
        job = self.job
        job.workers.mark_left(worker)
        steps = job.leases.end(worker.name)
        job.evaluations.renew(worker.name, [])
        job.add_event(f"{worker.name} {why}{_recomputed(len(steps))}")
        if not job.workers.live and job.state is JobState.RUNNING:
            job.warn(NO_WORKER, "no worker is up; training is paused until one joins")

    def _lease_limit(self) -> int:
        """Return the first step that must wait: for a result, callbacks, the schedule, a drain or a rollback."""
        job = self.job
        drain = job.drain_target
        limit = min(job.evaluations.lease_limit(), job.rounds.lease_limit(), job.callbacks_limit, job.steps_due)
        return limit if drain is None else min(limit, drain)

    def _begin(self, now_s: float) -> None:
        """Record when this coordinator began: earlier silence does not count against a process."""
        self._began_s = min(self._began_s, now_s)
        self.job.progress.begin(now_s)

    def _seen_s(self, process: ProcessName) -> float | None:
        """Return when a process gave its last sign of life, if it ever did."""
        worker = self.job.workers.by_name.get(str(process))
        seen_s = worker.last_seen_s if worker is not None else None
        if process.role == "shard":
            seen_s = self._shard_seen_s.get(process.index)
        return seen_s

    def _drop_passed_evaluations(self) -> None:
        """Give up evaluations of rounds that a shard has passed: they exist only if the store lost their results."""
        job = self.job
        if not job.shards.all_registered or job.rounds.returning_to is not None:
            return
        for missed in job.evaluations.drop_passed(job.rounds.passed()):
            job.add_event(f"warning: the evaluation after step {missed.after_step:,} was missed: its weights are gone")

    def _answer(
        self,
        worker: WorkerRecord,
        granted: Sequence[Grant],
        evaluations: Sequence[Evaluation],
        revoked: Sequence[int],
        reason: str,
    ) -> LeaseAnswer:
        job = self.job
        return LeaseAnswer(
            granted,
            evaluations,
            revoked,
            job.state,
            job.shards.view,
            reason,
            stored=worker.stored,
            stores_evaluated=job.options.callbacks.store_evaluated,
            ahead=refill(job, worker),
            depth=depth(job, worker),
        )


def _silence_of(shard: int) -> str:
    return f"shard-{shard} is silent"


def _recomputed(steps: int) -> str:
    return f"; {counted(steps, 'step')} will be recomputed" if steps else ""
