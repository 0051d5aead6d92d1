"""JobRecord: the in-memory state of one job: members, leases, progress, events, and the record for a successor.

Pure. Knows no calls: `parashard_coordinator.core.core` owns a record and applies calls to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parashard.errors import WrongRun
from parashard.figures import metric, metric_name
from parashard_coordinator.core.callback_progress import CallbackProgress
from parashard_coordinator.core.calls import CoreSettings, JobState
from parashard_coordinator.core.controller import Controller
from parashard_coordinator.core.draining import Draining
from parashard_coordinator.core.evaluations import Evaluations
from parashard_coordinator.core.failures import Failures, Problems, SkippedSteps
from parashard_coordinator.core.input_limits import EVENT_BYTES_MAX, readable
from parashard_coordinator.core.learning import NOT_FALLING, RISES, Change, Learning
from parashard_coordinator.core.leases import StepLeases
from parashard_coordinator.core.membership import (
    ENDED,
    ShardRegistration,
    Shards,
    Workers,
)
from parashard_coordinator.core.policies import Auto, LeasingPolicy
from parashard_coordinator.core.progress import Progress, Staleness
from parashard_coordinator.core.rounds import Rounds
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.core.supervision import CONFIGURATION, FAILED, LocalLauncher, Supervision
from parashard_coordinator.core.training_figures import TrainingFigures

EVENTS_KEPT = 50
END_WAITS = "end-waits"  # a problem's key
DATA_WARNINGS_SHOWN = 8
WARNINGS_MAX = 20  # of users' code, with different texts


class DueCheckpoint(NamedTuple):
    """A checkpoint of all shards that can be taken."""

    steps: int
    round: int | None  # in `sync:N` the round that starts after these steps
    registrations: tuple[ShardRegistration, ...]  # of shards that have exactly the first `steps` steps
    final: bool  # it ends the job
    metrics: Mapping[str, float] | None  # of the final one
    stored: str = ""  # id of the final one once it is stored: then the job ends with it, even if shards are lost


class JobRecord:
    """The state of one job, from its start to its end."""

    def __init__(
        self,
        options: CoreSettings,
        policy: LeasingPolicy,
        evaluations: Evaluations,
        launcher: LocalLauncher | None,
        rounds: Rounds,
    ) -> None:
        self.options = options
        self.controller = Controller(policy) if isinstance(policy, Auto) else None
        self.policy = policy
        self.leases = StepLeases(
            options.steps_total,
            options.shards,
            policy,
            speculate_after=options.speculate_after,
            max_attempts=options.max_attempts,
            retry_pause_s=options.retry_pause_s,
        )
        self.failures = Failures(
            options.max_attempts, skip=options.skip_bad_steps, against_divergence=options.advice.against_rise
        )
        self.skipped = SkippedSteps(options.shards)
        self.exit_code = FAILED
        """Exit code of the run if the job fails."""
        self.workers = Workers(
            options.lease_ttl_s,
            same_arithmetic=options.same_arithmetic,
            coordinator_incarnation=options.incarnation,
        )
        self.shards = Shards(options.shards, first_view=options.incarnation - 1 << 32)
        self.rounds = rounds
        self.draining = Draining()
        self.decisions = 0
        """Number of decisions so far that must be stored before they take effect."""
        self.evaluations = evaluations
        self.progress = Progress()
        self.learning = Learning(options.classes, continued=options.continued)
        self.figures = TrainingFigures(
            options.steps_total, options.steps_per_epoch, keeps_sums=options.callbacks.followed
        )
        self.callback_progress = CallbackProgress(
            options.steps_total, options.steps_per_epoch, self.figures, policy, evaluations, options.callbacks
        )
        self.awaits_reports = False
        """Workers may still repeat reports to an earlier coordinator that its stored record lacks."""
        self.workers_wanted = options.workers
        self.scale_requests = 0  # of the run, including requests for the same number
        self.state = JobState.STARTING if options.shards else JobState.RUNNING
        self.reason = "waiting for the shards" if options.shards else ""
        self.early_stop = ""
        self.scheduled: int | None = 0 if options.open else None
        """In a job of open length: steps below it may be leased; not stored, the launcher repeats it."""
        self.ending: DueCheckpoint | None = None  # the final checkpoint, once it is stored
        self.stopped = False  # by its user
        self.supervision = Supervision(launcher, options.silence_s, options.lease_ttl_s, options.start_s)
        self.shard_restarts = 0
        self.resumes = 0  # how often the user resumed the run
        self.earlier_incarnations = [0] * options.shards  # by shard, the last that an earlier coordinator knew
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.events_total = 0
        self.new_events: list[str] = []
        self.problems = Problems()
        self.warned: set[str] = set()  # texts of Python warnings in workers that were reported
        self.staleness = Staleness()  # from the shards' latest records
        self.loss_problems: dict[
            str, tuple[Change, int, bool]
        ] = {}  # present problems by key, with the step, and whether the warning names the staleness
        self.silent_shards: set[int] = set()
        self.ended_shards: set[int] = set()  # whose process ended according to the launcher, until they answer again

    # --- state ---

    @property
    def over(self) -> bool:
        """The job is done or has failed."""
        return self.state in (JobState.DONE, JobState.FAILED)

    @property
    def state_name(self) -> str:
        """The state in one word; a job that its user stopped has not failed."""
        return "stopped" if self.stopped else self.state.name.lower()

    @property
    def steps_due(self) -> int:
        """The number of steps to do: all, up to an early stop, or in a job of open length the scheduled ones."""
        return self.leases.target if self.scheduled is None else min(self.leases.target, self.scheduled)

    @property
    def complete(self) -> bool:
        """Every step and evaluation is complete, and callbacks have handled them: the last checkpoint can be taken."""
        in_ = self.leases.finished and self.evaluations.finished and self.shards.all_registered
        in_ = in_ and self.callback_progress.told(self.leases.target)
        if self.awaits_reports and self.figures.missing(0, self.leases.target):
            return False
        return in_ and self.rounds.returning_to is None and not self.over

    @property
    def drain_target(self) -> int | None:
        """The first step that a drain holds back from leasing; None without a drain."""
        # It moves up when a shard or a worker reports a later step that an earlier coordinator leased.
        asked = self.draining.target
        return None if asked is None else min(self.leases.target, max(asked, self.leases.leased_so_far()))

    @property
    def drained(self) -> bool:
        """Leasing is paused, and every shard has the same steps: a checkpoint of all of them can be taken."""
        target = self.drain_target
        steady = self.shards.all_registered and self.rounds.returning_to is None and not self.over
        return target is not None and steady and self.leases.lowest_incomplete >= target

    def due_checkpoint(self) -> DueCheckpoint | None:
        """Return the checkpoint of all shards that can be taken now: a requested one, or the last."""
        if self.ending is not None and not self.over:
            return self.ending if self.shards.all_registered else None  # the report includes their counters
        target = self.drain_target if self.drained else None
        final = target is None
        if final and not self.complete:
            return None
        steps = self.leases.target if target is None else target
        metrics = self.evaluations.results().get(steps) if final else None
        return DueCheckpoint(steps, self.policy.round_after(steps), tuple(self.shards.registrations()), final, metrics)

    @property
    def not_learned(self) -> str:
        """The problem of a training loss that rises or does not fall; "" if it falls or cannot be judged."""
        return self.problems.text(RISES) or self.problems.text(NOT_FALLING)

    @property
    def done_reason(self) -> str:
        """Why the job ends, once it is done."""
        reason = self.early_stop or "every step is in"
        return f"{reason}, but the model did not learn" if self.not_learned else reason

    @property
    def coordinator_restarts(self) -> int:
        """How often the coordinator was restarted, without resumes of the run."""
        return self.options.incarnation - 1 - self.resumes

    @property
    def shards_live(self) -> int:
        """How many shards have registered and are not known to have ended or to be silent."""
        return sum(map(self.shard_live, range(self.options.shards)))

    def shard_live(self, shard: int) -> bool:
        """Tell whether a shard has registered and is not known to have ended or to be silent."""
        gone = shard in self.silent_shards or shard in self.ended_shards
        return self.shards.registration(shard) is not None and not gone

    def set_final_checkpoint(self, last: DueCheckpoint) -> None:
        """Record that the job ends with a checkpoint that is stored: from now on nothing is leased or evaluated."""
        # Its manifest commits this decision for successors.
        self.ending = last
        if last.metrics is not None:  # a shard's restart may have discarded them meanwhile
            self.evaluations.restore_result(last.steps, last.metrics)

    def discard_final_checkpoint(self) -> None:
        """Discard the last checkpoint, which is damaged: the job goes on until another one is taken."""
        self.ending = None
        self.decisions += 1
        self.evaluations.shard_returned(self.leases.lowest_incomplete)

    def stop_at_frontier(self, why: str) -> None:
        """End the job with the steps leased so far (P8); no effect if it is not running or has all its steps."""
        if self.state is JobState.RUNNING and not self.leases.finished:
            self.leases.stop_at_frontier()
            self._stop_early(why)

    def open_steps(self, steps: int, *, closed: bool) -> None:
        """Allow leasing of the steps below `steps` in a job of open length; once `closed`, it ends with them."""
        if self.scheduled is None or self.over:
            return
        self.scheduled = max(self.scheduled, steps)
        if closed and not self.early_stop and self.state is JobState.RUNNING:
            self.leases.stop_at(max(self.scheduled, self.leases.leased_so_far()))
            self._stop_early("the schedule is closed")

    def _stop_early(self, why: str) -> None:
        """End the job at the lowered target of its leases."""
        target = self.leases.target
        self.evaluations.stop_at(target)
        self.early_stop = why
        self.decisions += 1
        of_all = "" if self.scheduled is not None else f" of {self.options.steps_total:,}"
        self.change_state(JobState.DRAINING, f"{why}; finishing {target:,}{of_all} steps")

    def mark_done(self) -> None:
        """Record that the report is written."""
        self.resolve(END_WAITS, "the last checkpoint, weights and report are stored")
        self.change_state(JobState.DONE, self.done_reason)

    def stop(self, reason: str) -> None:
        """End the job at its user's request; it can be resumed."""
        self.stopped |= not self.over
        self.fail(reason)

    def fail(self, reason: str, *, must_be_fixed: bool = False) -> None:
        """Fail the job; the first reason stays. `must_be_fixed`: its model or data, before another attempt."""
        if not self.over:
            self.exit_code = CONFIGURATION if must_be_fixed else FAILED
            self.change_state(JobState.FAILED, reason)

    def warn_end_waits(self, reason: str) -> None:
        """Warn that the end of the job waits, with the reason; there is no timeout."""
        self.reason = readable(reason, EVENT_BYTES_MAX)
        self.warn(END_WAITS, reason)

    def check_run(self, run_id: str, job_digest: str | None = None) -> None:
        """Refuse a call that is meant for another run or another job."""
        if run_id != self.options.run_id:
            raise WrongRun(f"this coordinator runs {self.options.run_id}, the call names {run_id or '(none)'}")
        if job_digest is not None and job_digest != self.options.job_digest:
            raise WrongRun(f"the call's job digest {job_digest[:12]} is not this job's {self.options.job_digest[:12]}")

    def report_data(self, data: str, warnings: Sequence[str]) -> None:
        """Report the job's data, and warnings about them."""
        self.add_event(f"data: {data}")
        for warning in warnings[:DATA_WARNINGS_SHOWN]:
            self.add_event(f"warning: {warning}")
        if len(warnings) > DATA_WARNINGS_SHOWN:
            self.add_event(f"warning: {len(warnings) - DATA_WARNINGS_SHOWN} more columns like these")

    # --- state for a successor ---

    def saved(self) -> Saved:
        """Return the state that a later coordinator cannot learn from the shards."""
        return Saved(
            target=self.leases.target,
            final=self.ending.stored if self.ending else "",
            early_stop=self.early_stop,
            lags=() if self.controller is None else tuple(self.controller.lags),
            drifts=() if self.controller is None else tuple(self.controller.drifts),
            skips=tuple(sorted(self.leases.skips)),
            worker_restarts=self.supervision.worker_restarts,
            shard_restarts=self.shard_restarts,
            workers=self.workers.known(self.supervision.ended_workers),
            shard_incarnations=tuple(self.last_incarnation(shard) for shard in range(self.options.shards)),
            rollbacks=self.rounds.rollbacks,
            speculative_leases=self.leases.speculative_leases,
            resumes=self.resumes,
            workers_wanted=self.workers_wanted,
            scale_requests=self.scale_requests,
            training_s=self.progress.training_s(),
            losses=self.learning.losses(),
            loss_curve=self.learning.curve.saved(),
            fingerprint=self.workers.fingerprint,
            **self.evaluations.saved(),
            **self.callback_progress.saved(),
            **self.figures.saved(),
        )

    def mark_stored(self) -> None:
        """Record that the present `saved()` is stored: workers need not report those steps again."""
        for worker in self.workers.by_name.values():
            worker.stored = worker.sequence

    def resume(self, saved: Saved, gap_s: float = 0.0) -> None:
        """Restore the decisions and counts that an earlier coordinator stored `gap_s` ago; before any call."""
        if saved.early_stop:
            self.early_stop = saved.early_stop
            self.leases.stop_at(saved.target)
            self.evaluations.stop_at(saved.target)
        self.evaluations.resume(saved)
        if saved.final:
            judged = self.evaluations.results().get(self.leases.target)
            self.ending = DueCheckpoint(self.leases.target, None, (), final=True, metrics=judged, stored=saved.final)
        self.leases.skips.update(saved.skips)
        self.figures.resume(saved)
        if self.controller is not None:
            self.controller.resume(saved.lags, saved.drifts)
        self.callback_progress.resume(saved)
        self.supervision.worker_restarts, self.shard_restarts = saved.worker_restarts, saved.shard_restarts
        self.workers.resume(saved.workers)
        self.supervision.ended_workers = {name for name, known in saved.workers.items() if known.state == ENDED}
        self.awaits_reports = bool(saved.workers)
        if len(saved.shard_incarnations) == self.options.shards:  # else the placement changed
            self.earlier_incarnations = list(saved.shard_incarnations)
        self.rounds.rollbacks, self.resumes = saved.rollbacks, saved.resumes
        self.leases.speculative_leases = saved.speculative_leases
        self.workers_wanted, self.scale_requests = saved.workers_wanted, saved.scale_requests
        self.workers.fingerprint = saved.fingerprint
        self.progress.resume(saved.training_s + (gap_s if saved.training_s else 0.0))
        self.learning.resume(saved.losses, saved.loss_curve)

    def reset_for_resume(self) -> None:
        """Reset incarnations and scaling after `resume`: the user has resumed the run."""
        self.resumes += 1
        self.workers_wanted, self.scale_requests = self.options.workers, 0  # the user's present setting
        self.earlier_incarnations = [0] * self.options.shards
        self.progress.goes_on = False
        self.workers.reset_for_resume()
        self.awaits_reports = False
        self.supervision.ended_workers.clear()

    @property
    def callbacks_limit(self) -> int:
        """The first step that must wait for callbacks."""
        return self.callback_progress.lease_limit(self.leases.target, self.leases.leased_so_far())

    @property
    def why_no_step(self) -> str:
        """The reason why no worker gets a step now, for people."""
        if self.leases.finished:
            if not self.evaluations.finished:
                return "every step is in; an evaluation is under way"
            told = self.callback_progress.told(self.leases.target)
            return f"every step is in; {'the report follows' if told else 'callbacks hear of the last ones'}"
        if self.rounds.returning_to is not None:
            return f"the shards return to round {self.rounds.returning_to}"
        drain = self.drain_target
        if drain is not None and drain <= self.leases.limit():
            return "leasing pauses for a checkpoint"
        lowest = self.leases.lowest_incomplete
        limits = (
            (self.steps_due, "nothing is scheduled"),
            (self.evaluations.lease_limit(), "waiting for an evaluation's result"),
            (
                self.callbacks_limit,
                f"waiting for {'an evaluation and ' * self.callback_progress.is_judged(lowest)}callbacks",
            ),
        )
        return next((why for limit, why in limits if limit <= lowest), self.policy.reason(lowest))

    # --- changes of state, and their events ---

    def last_incarnation(self, shard: int) -> int:
        """Return the last incarnation of a shard known to this coordinator or an earlier one; 0: none."""
        if shard not in range(self.options.shards):
            return 0
        registration = self.shards.registration(shard)
        return self.earlier_incarnations[shard] if registration is None else registration.incarnation

    def change_state(self, state: JobState, reason: str) -> None:
        """Enter a state, and report the reason."""
        self.state, self.reason = state, readable(reason, EVENT_BYTES_MAX)
        self.add_event(f"{self.state_name}: {reason}")

    def warn(self, key: str, text: str) -> None:
        """Report a problem once; status and screens show it until `resolve` ends it."""
        if self.problems.begin(key, readable(text, EVENT_BYTES_MAX)):
            self.add_event(f"warning: {text}")

    def resolve(self, key: str, text: str = "") -> None:
        """End a problem, if present, and report that with `text`, or else with the problem's own text."""
        warned = self.problems.end(key)
        if warned:
            self.add_event(f"resolved: {text or warned}")

    def tell_warnings(self, worker: str, texts: Sequence[str]) -> None:
        """Report Python warnings of a worker: each text once for all workers, at most `WARNINGS_MAX` texts."""
        for text in texts:
            if text not in self.warned and len(self.warned) < WARNINGS_MAX:
                self.warned.add(text)
                self.add_event(f"{worker}: {text}")

    def log_epochs(self) -> None:
        """Log the figures of the epochs that were completed since the last call."""
        for epoch in self.figures.ended:
            figures = self.figures.figures_of(epoch).items()
            shown = ", ".join(f"{metric_name(name)} {metric(value)}" for name, value in figures)
            self.new_events.append(readable(f"epoch {self.options.first_epoch + epoch}: {shown}", EVENT_BYTES_MAX))
        self.figures.ended.clear()

    def add_event(self, text: str) -> None:
        """Add an event to the log, the status and the live view."""
        text = readable(text, EVENT_BYTES_MAX)  # it may contain errors from shards
        self.events.append(text)
        self.events_total += 1
        self.new_events.append(text)
