"""Core: the coordinator's decisions, all of them, as functions of (state, call, now).

Pure: no gRPC, no clock, no disk, no randomness. Composes leases, membership, evaluations, progress and the launcher,
and knows how the job stands. `coordinator.service` translates calls and holds a lock around this object.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.evaluations import Evaluation, Evaluations
from coordinator.launchers import Exit, Launcher, Orders, ProcessName
from coordinator.leases import Grant, StepLeases
from coordinator.membership import ShardLife, Shards, Worker, Workers
from coordinator.policies import LeasingPolicy
from coordinator.progress import Progress
from parashard.errors import ConfigurationError, JobFailed, WrongRun
from parashard.intervals import IntervalSet

EVENTS_KEPT = 50
WORKERS_MAX = 4096
SHARD_SILENCE_SHOWN_S = 3.0
SHARD_SILENCE_MAX_S = 60.0  # a shard that hangs for so long ends the job: nobody else has its weights


class JobState(enum.Enum):
    """How a job stands; the values are the wire's."""

    STARTING = 1
    RUNNING = 2
    DRAINING = 3
    DONE = 4
    FAILED = 5


@dataclass(frozen=True)
class Options:
    """What the job file says about leasing and stopping."""

    run_id: str
    job_digest: str
    steps_total: int
    shards: int
    workers: int
    lease_batch: int = 16
    lease_ttl_s: float = 10.0
    speculate_after: float = 4.0
    max_attempts: int = 5
    skip_bad_steps: bool = False
    target_accuracy: float | None = None
    target_loss: float | None = None
    same_arithmetic: bool = False
    incarnation: int = 1  # of the coordinator


@dataclass(frozen=True)
class CompletedStep:
    """A step that every shard acknowledged, with the lives that did (by shard)."""

    step: int
    incarnations: list[int]
    loss: float
    examples: int
    skipped: bool = False


@dataclass(frozen=True)
class LeaseCall:
    """A worker's report, renewal and request."""

    worker: str
    incarnation: int
    sequence: int
    held: Sequence[int] = ()
    held_evaluations: Sequence[int] = ()
    completed: Sequence[CompletedStep] = ()
    failed: Sequence[tuple[int, str]] = ()
    evaluated: Sequence[tuple[int, Mapping[str, float], str]] = ()
    want: int = 0
    leaving: bool = False
    phases_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LeaseAnswer:
    """What a worker gets."""

    granted: Sequence[Grant]
    evaluations: Sequence[Evaluation]
    revoked: Sequence[int]
    state: JobState
    view: int
    reason: str
    retry_after_s: float = 0.02


class Core:
    """One job's coordination.

    Parameters
    ----------
    options : Options
        From the job file.
    policy : LeasingPolicy
        The job's consistency.
    evaluations : Evaluations
        When the held-out examples are judged.
    launcher : Launcher
        Who starts and stops processes.
    """

    def __init__(self, options: Options, policy: LeasingPolicy, evaluations: Evaluations, launcher: Launcher) -> None:
        self.options = options
        self.policy = policy
        self.leases = StepLeases(
            options.steps_total,
            options.shards,
            policy,
            speculate_after=options.speculate_after,
            max_attempts=options.max_attempts,
        )
        self.workers = Workers(options.lease_ttl_s, same_arithmetic=options.same_arithmetic)
        self.shards = Shards(options.shards)
        self.evaluations = evaluations
        self.progress = Progress()
        self.workers_wanted = options.workers
        self.state = JobState.STARTING if options.shards else JobState.RUNNING
        self.reason = "waiting for the shards" if options.shards else ""
        self.early_stop = ""
        self.worker_restarts = 0
        self.shard_restarts = 0
        self.worker_exits = 0
        self.skipped_steps = 0
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.events_total = 0
        self.new_events: list[str] = []
        self.staleness_p95 = 0  # as the shards last told
        self._launcher = launcher
        self._silent_shards: set[int] = set()  # of which a warning was given
        self._expected: set[str] = set()  # workers whose end was seen; their next life is no surprise

    # --- what the shell asks ---

    @property
    def over(self) -> bool:
        """The job is done or has failed."""
        return self.state in (JobState.DONE, JobState.FAILED)

    @property
    def complete(self) -> bool:
        """Every step and every evaluation is in: the report can be written."""
        return self.leases.finished and self.evaluations.finished and not self.over

    def done(self) -> None:
        """Record that the report is written."""
        self._become(JobState.DONE, self.early_stop or "every step is in")

    def fail(self, reason: str) -> None:
        """Stop the job; the first reason stays."""
        if not self.over:
            self._become(JobState.FAILED, reason)

    def check_run(self, run_id: str, job_digest: str | None = None) -> None:
        """Refuse a call that is meant for another run or another job (P2)."""
        if run_id != self.options.run_id:
            raise WrongRun(f"this coordinator runs {self.options.run_id}, the call names {run_id or '(none)'}")
        if job_digest is not None and job_digest != self.options.job_digest:
            raise WrongRun(f"the call's job digest {job_digest[:12]} is not this job's {self.options.job_digest[:12]}")

    # --- shards ---

    def register_shard(self, shard: int, life: ShardLife, applied: IntervalSet) -> None:
        """Take in a shard; what was believed of it is replaced (P3)."""
        self.shard_restarts += self.shards.life(shard) is not None
        self.shards.register(shard, life)
        self._silent_shards.discard(shard)
        lost = self.leases.shard_registered(shard, applied)
        self._event(f"shard-{shard} is up (incarnation {life.incarnation}) at {life.address}")
        if lost and self.policy.round_of(0) is not None:
            # The round that the others stand at needs weights that are gone: only a rollback would help (P12).
            self.fail(f"shard-{shard} came back without {lost} steps that it had; synchronous rounds cannot go on")
        if self.state is JobState.STARTING and self.shards.all_registered:
            self._become(JobState.RUNNING, "every shard is up")

    def shard_silent(self, shard: int, silent_s: float, error: str) -> None:
        """Take note of a shard that does not answer; one that is silent for too long ends the job."""
        if silent_s > SHARD_SILENCE_MAX_S:
            self.fail(f"shard-{shard} has not answered for {silent_s:.0f} s: {error}")
        elif silent_s > SHARD_SILENCE_SHOWN_S and shard not in self._silent_shards:
            self._silent_shards.add(shard)
            self._event(f"warning: shard-{shard} does not answer; the job stands still until it does ({error})")

    # --- workers ---

    def register_worker(self, name: str, fingerprint: str, device: str, http_address: str, now_s: float) -> Worker:
        """Take in a worker; an earlier life under its name loses its leases."""
        if self.state is JobState.FAILED:
            raise JobFailed(f"the job has failed: {self.reason}")
        if name not in self.workers.by_name and len(self.workers.by_name) >= WORKERS_MAX:
            raise ConfigurationError(f"the job has had {WORKERS_MAX} workers of different names already")
        worker = self.workers.register(name, fingerprint, device, http_address, now_s)
        self.leases.end(worker.name)
        self.evaluations.renew(worker.name, [])
        if worker.name in self._expected:
            self._expected.discard(worker.name)
        elif worker.restarts:  # nobody saw the earlier life end
            self.worker_restarts += 1
        self._event(f"{worker.name} is up (incarnation {worker.incarnation}) on {device}")
        return worker

    def lease(self, call: LeaseCall, now_s: float) -> LeaseAnswer:
        """Take a worker's report, renew what it lists, and grant what it may have."""
        worker = self.workers.heard(call.worker, call.incarnation, call.sequence, now_s)
        for phase, seconds in call.phases_s.items():
            worker.phases_s[phase] = seconds
        for step in call.completed:
            self._completed(worker, step, now_s)
        for number, reason in call.failed:
            self._failed(worker, number, reason)
        for number, metrics, error in call.evaluated:
            self._evaluated(number, metrics, error)
        self.evaluations.renew(call.worker, list(call.held_evaluations))
        revoked = self.leases.renew(call.worker, call.held, now_s)
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
        evaluations = self.evaluations.grant(worker.name, self.leases.lowest_incomplete)
        if evaluations:
            return self._answer([], evaluations, revoked, "")
        granted = self.leases.grant(
            worker.name,
            min(want, self.options.lease_batch),
            len(self.workers.live),
            now_s,
            self.evaluations.lease_limit(),
        )
        if granted and self.progress.first_lease_s is None:
            self.progress.first_lease_s = now_s
        return self._answer(granted, [], revoked, "" if granted else self._why_nothing())

    def tick(self, now_s: float) -> None:
        """End the leases of workers that have been silent for the lease time."""
        for worker in self.workers.silent(now_s):
            self._left(worker, f"was silent for {now_s - worker.last_seen_s:.1f} s")

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
            self._event(f"scaled from {self.workers_wanted} to {workers} workers")
        self.workers_wanted = workers

    def supervise(self, exits: Sequence[Exit], running: Sequence[ProcessName], now_s: float) -> Orders:
        """Take note of processes that ended, their leases with them, and say what to start and stop."""
        for exit_ in exits:
            if not self.over:
                self._exited(exit_, now_s)
        if self.over:
            return Orders()
        return self._launcher.orders(running, self.workers_wanted, now_s)

    # --- inside ---

    def _completed(self, worker: Worker, done: CompletedStep, now_s: float) -> None:
        shards = self.shards.acknowledged(done.incarnations)
        if not self.leases.acknowledge(worker.name, done.step, shards, now_s):
            return
        worker.steps_complete += 1
        self.skipped_steps += done.skipped
        self._launcher.step_completed()
        loss = None if done.skipped else done.loss
        warning = self.progress.step_completed(worker.name, done.examples, loss, now_s)
        if warning:
            self._event(f"warning: {warning} (at step {done.step}; staleness p95 {self.staleness_p95} pushes)")

    def _failed(self, worker: Worker, step: int, reason: str) -> None:
        self._event(f"{worker.name} failed at step {step}: {reason}")
        given_up = self.leases.fail(worker.name, step, reason, skip=self.options.skip_bad_steps)
        if given_up:
            self.fail(given_up)

    def _evaluated(self, number: int, metrics: Mapping[str, float], error: str) -> None:
        if error:
            given_up = self.evaluations.fail(number, error)
            self._event(f"an evaluation failed: {error}")
            if given_up:
                self.fail(given_up)
            return
        result = self.evaluations.finish(number, metrics)
        if result is None:
            return
        shown = ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
        self._event(f"evaluation after step {result.after_step}: {shown or 'nothing to judge'}")
        self._check_targets(metrics)

    def _check_targets(self, metrics: Mapping[str, float]) -> None:
        accuracy, loss = self.options.target_accuracy, self.options.target_loss
        reached = ""
        if accuracy is not None and metrics.get("accuracy", -1.0) >= accuracy:
            reached = f"target accuracy {accuracy} reached: {metrics['accuracy']:.4f}"
        if loss is not None and metrics.get("loss", float("inf")) <= loss:
            reached = f"target loss {loss} reached: {metrics['loss']:.4f}"
        if reached and self.state is JobState.RUNNING and not self.leases.finished:  # P8
            target = self.leases.stop_at_frontier()
            self.evaluations.stop_at(target)
            self.early_stop = reached
            self._become(JobState.DRAINING, f"{reached}; finishing {target} of {self.options.steps_total} steps")

    def _exited(self, exit_: Exit, now_s: float) -> None:
        self._event(f"{exit_.process} ended: {exit_.reason}")
        if exit_.process.role == "worker":
            self.worker_exits += 1
            worker = self.workers.by_name.get(str(exit_.process))
            if worker is not None and worker.live:
                self._left(worker, "ended")
        fatal = self._launcher.exited(exit_, now_s)
        if fatal:
            self.fail(fatal)
        elif exit_.process.role == "worker" and exit_.process.index < self.workers_wanted:
            self.worker_restarts += 1
            self._expected.add(str(exit_.process))
        elif exit_.process.role == "worker":  # scaled down; a later scaling up is no restart
            self._expected.add(str(exit_.process))

    def _left(self, worker: Worker, why: str) -> None:
        worker.live = False
        steps = self.leases.end(worker.name)
        self.evaluations.renew(worker.name, [])
        self._event(f"{worker.name} {why}; {len(steps)} steps are due again")
        if not self.workers.live and self.state is JobState.RUNNING:
            self._event("warning: no worker is heard of any more; the job stands still until one is")

    def _why_nothing(self) -> str:
        if self.leases.finished:
            rest = "the report follows" if self.evaluations.finished else "an evaluation is under way"
            return f"every step is in; {rest}"
        if self.evaluations.lease_limit() <= self.leases.lowest_incomplete:
            return "waiting for an evaluation's result"
        return self.policy.reason(self.leases.lowest_incomplete)

    def _answer(
        self, granted: Sequence[Grant], evaluations: Sequence[Evaluation], revoked: Sequence[int], reason: str
    ) -> LeaseAnswer:
        return LeaseAnswer(granted, evaluations, revoked, self.state, self.shards.view, reason)

    def _become(self, state: JobState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._event(f"{state.name.lower()}: {reason}")

    def _event(self, text: str) -> None:
        self.events.append(text)
        self.events_total += 1
        self.new_events.append(text)
