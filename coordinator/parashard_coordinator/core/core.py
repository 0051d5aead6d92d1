"""Core: the coordinator's decisions, all of them, as functions of (state, call, now).

Pure: no gRPC, no clock, no disk, no randomness. Here is what every call does; what is known of the job, and how it
stands, is `parashard_coordinator.core.core_state`. `parashard_coordinator.api.service` translates calls and holds a
lock around this object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from parashard.display.figures import counted, metric, metric_name
from parashard.errors import ConfigurationError, JobFailed, MalformedFrame, QueueFull
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import (
    Announcement,
    CompletedStep,
    EvaluationResult,
    FailedStep,
    FailureKind,
    JobState,
    LeaseAnswer,
    LeaseCall,
)
from parashard_coordinator.core.core_state import CoreState
from parashard_coordinator.core.draining import Answer
from parashard_coordinator.core.evaluations import Evaluation
from parashard_coordinator.core.launchers import Exit, Orders, ProcessName
from parashard_coordinator.core.leases import Grant
from parashard_coordinator.core.membership import Worker
from parashard_coordinator.core.rounds import Standing
from parashard_coordinator.kubernetes.ledger import PodEnd

WORKERS_MAX = 4096
SHARD_SILENCE_SHOWN_S = 3.0
NO_WORKER = "no worker"
SLOW = "slow"
HELD_OUT = "held-out "  # a metric's problem's key, with its name


class Core(CoreState):
    """One job's coordination; its parameters are the course's."""

    # --- shards ---

    def announced(self, shard: int, says: Announcement, now_s: float) -> None:
        """Take in a shard's life, and what it says of itself; a new life replaces all that was believed of it (P3)."""
        held_stop = says.held.stop()
        furthest = max(held_stop, says.applied.stop())
        if furthest > self.options.steps_total:
            raise MalformedFrame(f"shard {shard} holds step {furthest - 1}; this job has {self.options.steps_total}")
        earlier = self._last_life(shard)
        is_new = self.shards.register(shard, says.life)
        self._shard_seen_s[shard] = now_s
        self._silent_shards.discard(shard)
        self.resolved(_silence_of(shard))
        held = self.leases.trusted(says.applied, says.held, says.skipped)
        standing = Standing(says.applied, held, says.returnable, says.life.incarnation, says.skipped)
        self.rounds.stands(shard, standing)
        self.leases.reach(held_stop - 1)
        if is_new:
            # The same process has a new life where it was told to return to a round: that is no restart.
            process = says.first_incarnation or says.life.incarnation
            self.shard_restarts += 0 < earlier < process
            begun = "started" if not earlier else "restarted" if earlier < process else "reconnected"
            lost = self.leases.shard_registered(shard, held)
            what = f"shard-{shard} {begun} ({says.life.address}): {says.restored or 'initial values'}"
            self._event(what + _recomputed(lost))
        else:
            for step in self.leases.confirm(shard, held):
                self._event(f"every shard has step {step} already; it is not tried again")
        self._has_skipped(shard, says.applied, says.skipped, new_life=is_new)
        begins = self.state is JobState.STARTING and self.shards.all_registered
        if begins:
            self._become(JobState.RUNNING, "every shard is up")
            is_new = True
            if self.early_stop:
                self._become(JobState.DRAINING, self.early_stop)
        if self.rounds.look(self.leases.held_by_shard):
            round_ = self.rounds.returning_to
            if round_ is None:
                self._event("every shard stands at the same round again")
            else:
                self._event(f"warning: a shard lost steps that others have applied; all return to round {round_} (P12)")
        self.leases.committed(self.rounds.committed())
        if is_new and self.state is not JobState.STARTING and self.ending is None:
            complete = self.leases.lowest_incomplete
            if begins and list(self.shards.incarnations()) != self._earlier_lives:
                # What the final weights were may not be known: the record may be from before a shard's return.
                complete = min(complete, self.leases.target - 1)
            for again in self.evaluations.shard_returned(complete):  # P25
                self.decisions += 1  # or a successor would take the result for one of the weights that there are
                self._event(f"the evaluation after step {again.after_step} is done again: its weights were lost")
        self._drop_passed_evaluations()

    def shard_silent(self, shard: int, silent_s: float, error: str) -> None:
        """Take note of a shard that does not answer."""
        if silent_s > SHARD_SILENCE_SHOWN_S and shard not in self._silent_shards:
            self._silent_shards.add(shard)
            self.warn(
                _silence_of(shard), f"shard-{shard} does not answer; the job stands still until it does ({error})"
            )

    # --- workers ---

    def register_worker(
        self, name: str, fingerprint: str, device: str, http_address: str, now_s: float, token: int = 0
    ) -> Worker:
        """Take in a worker; an earlier life under its name loses its leases."""
        if self.state is JobState.FAILED:
            raise JobFailed(f"the job has failed: {self.reason}")
        before = self.workers.life_of(token)
        known = self.workers.by_name
        if before is None and len(known) >= WORKERS_MAX and self.workers.name_for(name) not in known:
            # A name is never forgotten, or its incarnations would begin again (P3). Who comes next can do nothing about
            # it; what it is started by must not give up on the whole job.
            raise QueueFull(f"the job has had {WORKERS_MAX} workers of different names already; a known name may join")
        self.decisions += not self.workers.fingerprint  # the first one's arithmetic is the job's from now on (P13)
        earlier = known.get(self.workers.name_for(name))
        worker = self.workers.register(name, fingerprint, device, http_address, now_s, token)
        if worker is before:
            return worker  # the same process again, which lost our answer
        if earlier is not None and earlier.live:
            self._died(earlier, "another process has its name", now_s)
        self.leases.end(worker.name)
        self.evaluations.renew(worker.name, [])
        self.supervision.joined(worker.name, worker.restarts)
        self.resolved(NO_WORKER)
        first = "joined" if self.options.incarnation > 1 else "started"  # an earlier coordinator may have known it
        self._event(f"{worker.name} {'restarted' if worker.restarts else first} ({device})")
        return worker

    def lease(self, call: LeaseCall, now_s: float) -> LeaseAnswer:
        """Take a worker's report, renew what it lists, and grant what it may have."""
        worker = self.workers.heard(call.worker, call.incarnation, call.sequence, now_s)
        self.resolved(NO_WORKER)
        for phase, seconds in call.phases_s.items():
            worker.phases_s[phase] = seconds
        for step in call.completed:
            self._completed(worker, step, now_s)
        for failed in call.failed:
            self._failed(worker, FailedStep(*failed), now_s)
        for result in call.evaluated:
            self._evaluated(result)
        self.evaluations.renew(call.worker, list(call.held_evaluations))
        revoked = self.leases.renew(call.worker, call.held, now_s)
        worker.computing = tuple(call.computing)
        if call.leaving:
            self._left(worker, "gave its leases back")
            return self._answer([], [], revoked, "the worker leaves")
        return self.grant(worker, call.want, now_s, revoked)

    def grant(self, worker: Worker, want: int, now_s: float, revoked: Sequence[int] = ()) -> LeaseAnswer:
        """Grant up to `want` steps, and an evaluation if one is due."""
        if self.state is JobState.STARTING:
            return self._answer([], [], revoked, "not every shard is up")
        if self.over or not want:
            return self._answer([], [], revoked, self.reason)
        if self.ending is not None:
            return self._answer([], [], revoked, "every step is in; the report follows")
        evaluations: list[Evaluation] = []
        if self.rounds.returning_to is None:
            lives = self.shards.incarnations()
            evaluations = self.evaluations.grant(worker.name, self.leases.lowest_incomplete, lives, now_s)
        if evaluations:
            return self._answer([], evaluations, revoked, "")
        granted = self.leases.grant(
            worker.name,
            min(want, self.options.lease_batch),
            len(self.workers.live),
            now_s,
            self._lease_limit(),
        )
        if granted and self.progress.first_lease_s is None:
            self.progress.first_lease_s = now_s
        return self._answer(granted, [], revoked, "" if granted else self._why_nothing())

    def tick(self, now_s: float) -> None:
        """End the leases of workers that have been silent for the lease time, and tell of a step that takes long."""
        self._begin(now_s)
        for worker in self.workers.silent(now_s):
            silent = f"was silent for {now_s - worker.last_seen_s:.1f} s"
            self._died(worker, silent, now_s)
            self._left(worker, silent)
        self._check_slow(now_s)

    # --- operators and the launcher ---

    def scale(self, workers: int) -> None:
        """Set how many workers the launcher keeps alive.

        Raises
        ------
        ConfigurationError
            If the number is out of bounds; nothing has changed.
        """
        if not 0 <= workers <= WORKERS_MAX:
            raise ConfigurationError(f"workers must be from 0 to {WORKERS_MAX}, found {workers}")
        if workers != self.workers_wanted:
            self._event(f"scaled from {self.workers_wanted} to {counted(workers, 'worker')}")
        self.workers_wanted = workers
        self.scale_requests += 1
        self.decisions += 1

    def supervise(self, exits: Sequence[Exit], running: Sequence[ProcessName], now_s: float) -> Orders:
        """Take note of processes that ended, their leases with them, and say what to start and stop."""
        self._begin(now_s)
        for exit_ in self.supervision.unheard(exits):
            if not self.over:
                self._exited(exit_, now_s)
        if self.over:
            return Orders()
        orders = self.supervision.orders(running, self.workers_wanted, now_s, self._seen_s, self._began_s)
        for process in orders.kill:
            silence_s = self.supervision.silence_s(process, self._seen_s(process))
            self._event(f"{process} lives and has given no sign of it for {silence_s:.0f} s: it is killed")
        return orders

    def pod_ended(self, end: PodEnd) -> None:
        """Take note of a pod's end; its leases end by time, since another pod may have its name by now."""
        if self.over:
            return
        self._event(str(end))
        fatal = self.supervision.pod_ended(end)
        if fatal:
            self.fail(fatal)

    def pods_unwatched(self) -> None:
        """Take note that following the pods broke off with an error; it begins again by itself."""
        self.supervision.pod_watch_errors += 1

    def scaled(self, what: str) -> None:
        """Take note of what became of a change of the number of workers."""
        self._event(what)

    def create_checkpoint(self, request: int) -> Answer:
        """Ask for a drained checkpoint, or how far it is.

        Raises
        ------
        JobFailed
            If the job is over: its last checkpoint is there, or there will be none.
        """
        if self.over:
            raise JobFailed(f"the job is {self.state.name.lower()}: {self.reason}")
        if self.draining.target is None and not self.draining.knows(request):
            self._event("leasing pauses for a drained checkpoint")
        return self.draining.asked(request, self.leases.leased_so_far())

    def drain_further(self, step: int) -> None:
        """Drain at a later step: a shard has applied one that this coordinator did not know to be leased.

        An early stop moves up with it: what a shard has applied, all must.
        """
        self.leases.reach(step - 1)
        if step > self.leases.target:
            self.leases.target = step
            self.evaluations.stop_at(step)
            self.decisions += 1
            self._event(f"the early stop moves up to step {step}, which a shard has applied already")

    def checkpoint_ended(self, answer: Answer) -> None:
        """Lease on after a drain, whatever became of its checkpoint."""
        self.draining.ended(answer)
        stored = f"checkpoint {answer.checkpoint} is stored: {answer.steps:,} steps on every shard"
        self._event(f"warning: the checkpoint failed: {answer.error}" if answer.error else stored)

    # --- inside ---

    def _completed(self, worker: Worker, done: CompletedStep, now_s: float) -> None:
        shards = self.shards.acknowledged(done.incarnations)
        if not self.leases.acknowledge(worker.name, done.step, shards, now_s, skipped=done.skipped):
            return
        worker.steps_complete += 1
        self.supervision.step_completed()
        if not done.skipped:
            self.failures.succeeded()
        loss = None if done.skipped else done.loss
        for change in self.progress.step_completed(worker.name, done.step, done.examples, loss, now_s):
            stale = f" (staleness p95 {self.staleness_p95} pushes)" if self.staleness_p95 else ""
            tell = self.resolved if change.over else self.warn
            tell(change.key, f"{change.text}{stale}")

    def _failed(self, worker: Worker, failed: FailedStep, now_s: float) -> bool:
        """Count a failed attempt, and stop the job if that is what it means; return whether it counts."""
        skip, before = self.options.skip_bad_steps, self._any_succeeded
        result = self.leases.fail(worker.name, failed.step, now_s, skip=skip)
        if result is None:
            return False
        examples = self.options.examples_of(failed.step)
        if failed.kind is FailureKind.DEATH:
            self._event(f"{failed.reason} (attempt {result.attempts} of {self.options.max_attempts}){examples}")
        else:
            self._event(f"{worker.name} failed at step {failed.step}{examples}: {failed.reason}")
        verdict = self.failures.failed(failed, result, examples, any_succeeded=before)
        if verdict is not None:
            self.fail(verdict.reason, must_be_fixed=verdict.must_be_fixed)
        elif result.given_up:
            self.decisions += 1
            named = self.failures.named(failed, any_succeeded=before)
            self._event(f"warning: step {failed.step} is skipped after {result.attempts} attempts{examples}: {named}")
        return True

    def _died(self, worker: Worker, why: str, now_s: float) -> bool:
        """Count a death as a failed attempt at the step that the worker was computing (P26); return whether it was."""
        computing, worker.computing = worker.computing, ()
        reasons = [
            FailedStep(s, f"computing step {s} ended {worker.name}: {why}", FailureKind.DEATH) for s in computing
        ]
        counted = [self._failed(worker, failed, now_s) for failed in reasons]
        self.leases.suspect(self.leases.held_by(worker.name))
        return any(counted)

    @property
    def _any_succeeded(self) -> bool:
        """Some step has been completed with its gradient."""
        return len(self.leases.complete) > sum(step in self.leases.complete for step in self.leases.skips)

    def _has_skipped(self, shard: int, applied: IntervalSet, skipped: IntervalSet, *, new_life: bool = False) -> None:
        for step in self.skipped.says(shard, applied, skipped, new_life=new_life):
            self._event(
                f"warning: step {step} was given up when some shards had applied it: those keep its gradient, the "
                "others have none (partly_skipped)"
            )

    def shards_saved(self, parts: Sequence[tuple[IntervalSet, IntervalSet]]) -> None:
        """Take note of the applied and the skipped steps in the checkpoints of all shards, by shard."""
        for shard, (applied, skipped) in enumerate(parts):
            self._has_skipped(shard, applied, skipped)

    def _evaluated(self, result: EvaluationResult) -> None:
        after_step, metrics = result.after_step, result.metrics
        if tuple(result.incarnations) != self.shards.incarnations():  # P25
            self._event(f"a result of the evaluation after step {after_step} is void: a shard has another life by now")
        elif result.error:
            if not self.over:
                self._event(f"the evaluation after step {after_step} failed: {result.error}")
            given_up = self.evaluations.fail(after_step, result.error)
            if given_up:
                self.fail(given_up, must_be_fixed=True)
        elif self.evaluations.finish(after_step, metrics):
            self.decisions += 1
            for one in self.evaluations.untold():
                metrics_then = sorted((one.metrics or {}).items())
                shown = ", ".join(f"{metric_name(name)} {metric(value)}" for name, value in metrics_then)
                self._event(f"step {one.after_step:,}: {f'held-out {shown}' if shown else 'no metrics'}")
                self._check_finite(one)
            self._check_targets(metrics)

    def _check_slow(self, now_s: float) -> None:
        """Tell what the job waits for, of all leases the one that is held longest."""
        if self.over:
            return
        slowest, what = self.leases.slowest(now_s), "step"
        if slowest is None:
            slowest, what = self.evaluations.slowest(now_s), "the evaluation after step"
        if slowest is None:
            self.resolved(SLOW)
            self._slow_told = False
        elif not self._slow_told or SLOW in self.problems:  # without room there it is told once, too
            worker, number, held_s = slowest
            self.warn(SLOW, f"{worker} has been at {what} {number} for {held_s:.0f} s")
            self._slow_told = True

    def _check_finite(self, evaluation: Evaluation) -> None:
        for name, value in (evaluation.metrics or {}).items():
            named = f"held-out {metric_name(name)}"
            if math.isfinite(value):
                self.resolved(f"{HELD_OUT}{name}", f"{named} is finite again after step {evaluation.after_step:,}")
            else:
                what = "NaN" if math.isnan(value) else "infinite"
                self.warn(f"{HELD_OUT}{name}", f"{named} is {what} after step {evaluation.after_step:,}")

    def _check_targets(self, metrics: Mapping[str, float]) -> None:
        reached = ""
        for name, bound, largest in self.options.targets():
            if name not in metrics:
                found = ", ".join(sorted(metrics)) or "none"
                self.warn(
                    f"target {name}",
                    f"evaluation.target_{name} cannot be reached: the model's evaluations have no {name}; "
                    f"their metrics: {found}",
                )
            elif (metrics[name] >= bound) if largest else (metrics[name] <= bound):
                reached = f"held-out {metric_name(name)} {metric(metrics[name])} reached the target {bound}"
        if reached and self.state is JobState.RUNNING and not self.leases.finished:  # P8
            target = self.leases.stop_at_frontier()
            self.evaluations.stop_at(target)
            self.early_stop = reached
            self.decisions += 1
            self._become(JobState.DRAINING, f"{reached}; finishing {target:,} of {self.options.steps_total:,} steps")

    def _exited(self, exit_: Exit, now_s: float) -> None:
        self._event(f"{exit_.process} ended: {exit_.reason}")
        worker = self.workers.by_name.get(str(exit_.process))
        accounted = False
        if worker is not None and worker.live:
            accounted = self._died(worker, exit_.reason, now_s)
            self._left(worker, "ended")
        was_up = worker is not None or (exit_.process.role == "shard" and self._last_life(exit_.process.index) > 0)
        fatal = self.supervision.ended(exit_, self.workers_wanted, now_s, was_up=was_up, accounted=accounted)
        if fatal:
            self.fail(fatal)

    def _left(self, worker: Worker, why: str) -> None:
        worker.live = False
        steps = self.leases.end(worker.name)
        self.evaluations.renew(worker.name, [])
        self._event(f"{worker.name} {why}{_recomputed(len(steps))}")
        if not self.workers.live and self.state is JobState.RUNNING:
            self.warn(NO_WORKER, "no worker is up; the job stands still until one is")

    def _lease_limit(self) -> int:
        """Return the first step that must wait: for a result, for a drain, or for shards that return."""
        drain = self.drain_target
        limit = min(self.evaluations.lease_limit(), self.rounds.lease_limit())
        return limit if drain is None else min(limit, drain)

    def _begin(self, now_s: float) -> None:
        """Note when this coordinator began: nobody was silent before, since there was nobody to hear it (P22)."""
        self._began_s = min(self._began_s, now_s)

    def _seen_s(self, process: ProcessName) -> float | None:
        """Return when a process gave its last sign of life, if it ever did."""
        worker = self.workers.by_name.get(str(process))
        seen_s = worker.last_seen_s if worker is not None else None
        if process.role == "shard":
            seen_s = self._shard_seen_s.get(process.index)
        return seen_s

    def _drop_passed_evaluations(self) -> None:
        """Give up evaluations of rounds that every shard has left: only a store that lost its results has such."""
        if not self.shards.all_registered or self.rounds.returning_to is not None:
            return
        for missed in self.evaluations.passed(self.rounds.passed()):
            self._event(f"warning: the evaluation after step {missed.after_step} was missed: its weights are gone")

    def _why_nothing(self) -> str:
        if self.leases.finished:
            rest = "the report follows" if self.evaluations.finished else "an evaluation is under way"
            return f"every step is in; {rest}"
        if self.rounds.returning_to is not None:
            return f"the shards return to round {self.rounds.returning_to}"
        drain = self.drain_target
        if drain is not None and drain <= self.leases.limit():
            return "leasing pauses for a checkpoint"
        if self.evaluations.lease_limit() <= self.leases.lowest_incomplete:
            return "waiting for an evaluation's result"
        return self.policy.reason(self.leases.lowest_incomplete)

    def _answer(
        self, granted: Sequence[Grant], evaluations: Sequence[Evaluation], revoked: Sequence[int], reason: str
    ) -> LeaseAnswer:
        return LeaseAnswer(granted, evaluations, revoked, self.state, self.shards.view, reason)


def _silence_of(shard: int) -> str:
    return f"shard-{shard} is silent"


def _recomputed(steps: int) -> str:
    return f"; {counted(steps, 'step')} will be recomputed" if steps else ""
