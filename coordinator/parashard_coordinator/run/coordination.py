"""Coordination: the main loop around the core of one job: clock, store, polling of shards, end of the job.

Every decision is the core's. The loop ticks it, carries out its commands to shards (roll back, save a round, save a
drained checkpoint), and writes the weights and the report at the end. `parashard_coordinator.run.decisions` stores the
state for a successor. The loop reads the state that it acts on in one call under the lock of the core, since other
threads change the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import (
    DamagedCheckpoint,
    Fenced,
    InvalidRequest,
    ParashardError,
    PeerFailed,
    RetryLater,
    StaleRequest,
    StoreFailed,
)
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import Plan
from parashard.plan.variables import as_exported
from parashard.process import failpoints
from parashard.process.addresses import Port
from parashard.process.backoff import retry_pause_s
from parashard.process.best_effort import BestEffort
from parashard.process.logs import log
from parashard.process.shell import Stop
from parashard.security.credentials import Credentials
from parashard.telemetry.http import HttpPort, Metrics
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.draining import Answer, LastReads
from parashard_coordinator.core.job_record import DueCheckpoint
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.core.progress import Staleness
from parashard_coordinator.core.results import job_ends, staleness_seen
from parashard_coordinator.endpoints.history import HistoryFile
from parashard_coordinator.endpoints.page import history_json, status_pages
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView, coordinator_families
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run.decisions import DecisionStore
from parashard_coordinator.run.report import audited, report, save_preprocessing, save_report, save_weights
from parashard_coordinator.run.resolve import ResolvedJob
from parashard_coordinator.run.store import RunStore, SavedModel
from parashard_coordinator.shards import DiskTroubles, ShardChannels, ShardControl

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

TICK_S = 0.05
LOOK_S = 1.0
SAVE_S = 2.0
AGAIN_S = 0.2
DAMAGED_RETURNS_MAX = 50  # a shard drops a damaged round from its list, except its first one
INVALID_ANSWERS_S_MAX = 60.0  # how long a shard may give invalid answers to the last checkpoint until the job fails


class _Moment(NamedTuple):
    """The state of the job at one moment, for the main loop."""

    state: JobState
    over: bool
    all_registered: bool
    view: int


def _moment(core: Core, now_s: float) -> _Moment:
    return _Moment(core.job.state, core.job.over, core.job.shards.all_registered, core.job.shards.view)


def _ticked(core: Core, now_s: float) -> _Moment:
    core.tick(now_s)
    return _moment(core, now_s)


class _Commands(NamedTuple):
    """Commands to incarnations: rollbacks (by shard), and a round to save."""

    registrations: list[ShardRegistration]
    returns: dict[int, tuple[ShardRegistration, int]]
    cut_round: int | None


def _commands(core: Core, now_s: float) -> _Commands | None:
    if not core.job.shards.all_registered:
        return None
    registrations = core.job.shards.registrations()
    returns = {shard: (registrations[shard], round_) for shard, round_ in core.job.rounds.out_of_round()}
    return _Commands(registrations, returns, core.job.rounds.round_to_save(core.job.leases.lowest_incomplete, now_s))


class Coordination:
    """One job in progress. From now on the core's decisions are stored before they are visible to other processes."""

    def __init__(
        self,
        core: ExclusiveCore,
        resolved: ResolvedJob,
        plan: Plan,
        job: pb.GetJobReply,
        run_dir: Path,
        run_store: RunStore,
        channels: ShardChannels,
        tracer: Tracer | None = None,
    ) -> None:
        self._core = core
        self._resolved = resolved
        self._plan = plan
        self._run_id = job.run_id
        self._run_dir = run_dir
        self._run_store = run_store
        settings = resolved.job
        self._status = StatusView(settings.job.name, settings.consistency_in_words)
        self.service = CoordinatorService(core, job, self._status, tracer)
        self._shards = ShardControl(self._run_id, run_store.incarnation, plan.version, channels)
        self._invalid_since_s: float | None = None
        self._end_failures = 0  # consecutive, of the store and of the run directory
        self._returns_failed = 0  # consecutive, of rollbacks of shards
        self._again_s = 0.0  # when to retry commands that wait for a shard
        self._return_s = 0.0  # when to retry rollbacks
        self._damaged_returns = 0
        self._parts: dict[int, str] = {}  # folders of the parts of the latest drained checkpoint, by shard
        self._last_reads = LastReads()
        self._save_s = 0.0  # when to retry saving the state for a later coordinator
        self._history = HistoryFile(run_dir, self._note_of("history"))
        self._decisions = DecisionStore(core, run_store, self._note_of("records"))
        self._failed_report = BestEffort("the failed job's report", self._note_of("failed-report"))
        self._troubles = DiskTroubles()

    def http_port(
        self,
        host: str,
        port: Port,
        refused: Mapping[str, Callable[[], int]],
        credentials: Credentials | None = None,
        advertise: str | None = None,
    ) -> HttpPort:
        """Return the port that serves metrics, probes and the status page."""
        metrics = Metrics("coordinator", credentials, refused)
        metrics.add(partial(coordinator_families, self._core, self._status))
        coordinator = self._run_store.incarnation

        def history(since: int) -> dict[str, Any]:
            return self._history.look(lambda timeline: history_json(timeline, since, self._run_id, coordinator))

        pages = status_pages(self._present_status, history)

        def not_ready(core: Core, now_s: float) -> str:
            return "" if core.job.shards.all_registered else core.job.reason

        http = HttpPort(host, port, metrics, lambda: self._core.run_exclusive(not_ready), pages, advertise=advertise)
        self._status.http_address = http.address
        return http

    def run(self, stop: Stop) -> JobState:
        """Run the job until it is over or a stop is requested, then save it for a successor; return its state."""
        history = self._history
        next_look_s = 0.0
        moment = self._core.run_exclusive(_moment)
        view = saved_view = moment.view
        while not moment.over and not stop.wait(TICK_S):
            moment = self._core.run_exclusive(_ticked)
            now_s = time.monotonic()
            if moment.all_registered and (now_s >= next_look_s or view != moment.view):
                view, next_look_s = moment.view, now_s + LOOK_S
                self._look()
                history.add(self._present_status())
            if now_s >= self._save_s or saved_view != moment.view:  # each registered incarnation must be recorded
                saved_view = moment.view
                self._decisions.save_if_changed()
                self._save_s = now_s + max(SAVE_S, retry_pause_s(self._decisions.failures))
            self._command_shards()
            if now_s >= self._again_s:
                self._save_what_is_due()
                self._again_s = now_s + max(AGAIN_S, retry_pause_s(self._end_failures))
            moment = self._core.run_exclusive(_moment)
        if moment.all_registered:
            self._look()
        history.add(self._present_status())
        self._decisions.save_if_changed()
        if moment.state is JobState.FAILED:
            self._failed_report.attempt(self._save_failed_report)
        return moment.state

    def linger(self) -> None:
        """Retry writing a failed job's report, if the last attempt failed."""
        if self._failed_report.error:
            self._failed_report.attempt(self._save_failed_report)

    def _save_failed_report(self) -> None:
        self._decisions.check_claim()
        save_report(self._run_dir, self._report(None))
        self._run_store.keep_results(self._run_dir)

    def _note_of(self, key: str) -> Callable[[str, bool], None]:
        """Return a callback that reports that something cannot be written, or can again."""

        def note(text: str, over: bool) -> None:
            self._core.run_exclusive(lambda core, _: core.job.resolve(key, text) if over else core.job.warn(key, text))

        return note

    # --- shards ---

    def _look(self) -> bool:
        """Poll every shard's record; return whether all of them answered."""
        registrations = self._core.run_exclusive(lambda core, _: core.job.shards.registrations())
        silent = self._shards.look(registrations, self._status.saw, time.monotonic())
        changed = [
            change
            for shard, record in self._status.records().items()
            if (change := self._troubles.changed(shard, record.figures, time.monotonic())) is not None
        ]
        staleness = Staleness.of(self._status.staleness())

        def note(core: Core, now_s: float) -> None:
            staleness_seen(core.job, staleness)
            for key, text, over in changed:
                core.job.resolve(key, text) if over else core.job.warn(key, text)
            for shard, incarnation in enumerate(core.job.shards.incarnations()):
                silence = silent.get(shard)
                if silence is None:
                    core.shard_answered(shard)
                elif silence.incarnation == incarnation:  # else another one has registered since
                    core.shard_silent(shard, silence.silent_s, str(silence.error))

        self._core.run_exclusive(note)
        return not silent

    def _command_shards(self) -> None:
        """Send rollbacks, and the round that all shards save next."""
        commands = self._core.run_exclusive(_commands)
        if commands is None:
            return
        if commands.returns and time.monotonic() >= self._return_s:
            for shard, error in self._shards.roll_back(commands.returns).items():
                self._returns_failed += isinstance(error, StoreFailed)
                log.warning("not-returned", shard=shard, error=str(error))
                self._check_newest(error)
                # It will register again, or is unreachable, or cannot claim an incarnation on a full disk.
                self._return_s = time.monotonic() + max(AGAIN_S, retry_pause_s(self._returns_failed))
                self._damaged_returns += isinstance(error, DamagedCheckpoint)
            if self._damaged_returns > DAMAGED_RETURNS_MAX:
                reason = "the shards cannot return to a common round: the checkpoints of it are damaged"
                self._core.run_exclusive(lambda core, _: core.job.fail(reason))
        if commands.cut_round is not None:
            for shard, error in self._shards.name_round(commands.registrations, commands.cut_round).items():
                log.warning("round-not-named", shard=shard, round=commands.cut_round, error=str(error))
            self._core.run_exclusive(lambda core, _: core.job.rounds.round_announced())

    def _save_what_is_due(self) -> None:
        due = self._core.run_exclusive(lambda core, _: core.job.due_checkpoint())
        if due is not None and not due.final:
            self._save_drained(due)
        elif due is not None:
            self._finish(due)

    def _save_drained(self, due: DueCheckpoint) -> None:
        """Take a requested drained checkpoint."""
        try:
            id_ = self._checkpoint_of_all(due)
        except (RetryLater, StaleRequest, Fenced) as error:  # a shard is unreachable; leasing stays paused
            self._check_newest(error)
            why = str(error)
            log.info("drained-checkpoint-waits", error=why)
            given_up = self._core.run_exclusive(
                lambda core, now_s: core.job.draining.failed(why, core.job.shards.view, now_s)
            )
            if given_up is None:
                return
            answer = given_up
        except ParashardError as error:
            answer = Answer(error=str(error), steps=due.steps)
        else:
            if not id_:
                return
            answer = Answer(checkpoint=id_, steps=due.steps)
        self._core.run_exclusive(lambda core, _: core.checkpoint_ended(answer))

    def _checkpoint_of_all(self, due: DueCheckpoint) -> str:
        """Have all shards save the same steps, and store the manifest; return its id, or "" to retry."""
        steps = due.steps
        saved = self._shards.save(due.registrations, due.round, self._last_reads.damaged)
        self._parts = {shard: said.part.name for shard, said in enumerate(saved)}
        self._core.run_exclusive(lambda core, _: core.shards_saved([(shard.applied, shard.skipped) for shard in saved]))
        whole = IntervalSet([(0, steps)])
        if any(shard.applied != whole for shard in saved):
            furthest = max(shard.applied.stop() for shard in saved)
            if furthest <= steps:
                lacking = "a shard's own record lacks steps that it acknowledged"
                self._core.run_exclusive(lambda core, _: core.job.fail(lacking))
                return ""
            # An earlier coordinator leased later steps than this one knows.
            self._core.run_exclusive(lambda core, _: core.drain_further(furthest))
            return ""
        failpoints.hit("coordinator.checkpoint.parts")
        if due.final and not self._records_stored():
            return ""
        id_ = self._run_store.add_job_manifest(
            self._run_id, self._resolved.digest, self._plan, steps, [shard.part for shard in saved], final=due.final
        )
        failpoints.hit("coordinator.checkpoint.manifest")
        return id_

    # --- the end ---

    def _finish(self, due: DueCheckpoint) -> None:
        """Store the last checkpoint, the final weights, the report and the history; then the job is done."""
        # The manifest of that checkpoint commits the end: every coordinator writes weights and report from it. The
        # weights are the checkpoint's, because a shard may still receive a step past an early stop that an earlier
        # coordinator leased. An absent shard and a failing store or disk are retried without a bound.
        due, model = self._final_model(due)
        if model is None:
            return
        resolved = self._resolved
        self._look()
        figures = self._report(due, model.steps_applied) | audited(resolved, model)
        figures["checkpoint"] = due.stored
        self._decisions.check_claim()
        try:
            save_weights(self._run_dir, as_exported(model.variables, model.plan.variables), self._run_id)
            save_preprocessing(self._run_dir, resolved.spec.preprocessing)
            failpoints.hit("coordinator.finish.weights")
            save_report(self._run_dir, figures)
            failpoints.hit("coordinator.finish.report")
            del model  # the weights are read again when they are stored
            self._history.add(self._present_status())
            self._run_store.keep_results(self._run_dir)
        except StoreFailed as error:
            self._end_waits(f"weights and report cannot be stored: {error}")
            return
        self._end_failures = 0
        self._core.run_exclusive(lambda core, _: core.job.mark_done())

    def _report(self, final: DueCheckpoint | None, steps_saved: Sequence[int] = ()) -> dict[str, Any]:
        def reported(core: Core, now_s: float) -> dict[str, Any]:
            if final is not None:
                job_ends(core.job)
            return report(core.job, self._resolved, self._status, now_s, final, steps_saved)

        return self._core.run_exclusive(reported)

    def _final_model(self, due: DueCheckpoint) -> tuple[DueCheckpoint, SavedModel | None]:
        """Return the last checkpoint and its model; a model of None: retry."""
        try:
            if not due.stored:
                due = due._replace(stored=self._checkpoint_of_all(due))
                if not due.stored:
                    return due, None
                last = due
                self._core.run_exclusive(lambda core, _: core.job.set_final_checkpoint(last))
            return due, self._run_store.model(due.stored)
        except DamagedCheckpoint as error:
            log.warning("last-checkpoint-damaged", error=str(error))
            self._core.run_exclusive(lambda core, _: core.job.discard_final_checkpoint())  # another one is taken
            given_up = self._last_reads.failed(self._parts, str(error))
            if given_up:
                self._core.run_exclusive(lambda core, _: core.job.fail(given_up))
        except StoreFailed as error:
            self._end_waits(f"the last checkpoint cannot be stored: {error}")
        except (InvalidRequest, PeerFailed, Fenced) as error:
            self._check_newest(error)
            self._answered_invalidly(
                f"the last checkpoint cannot be stored: {error}; --resume goes on from the one before it"
            )
        except ParashardError as error:
            self._invalid_since_s = None
            log.info("end-waits", error=str(error))
        return due, None

    def _records_stored(self) -> bool:
        """Store the state for a successor before the last manifest, which ends the job for the successor, too."""
        # After the shards, which free space when they save. A successor would undo a stop that is not stored.
        self._decisions.save_if_changed()
        if self._decisions.error:
            self._end_waits(f"the coordinator's records cannot be stored: {self._decisions.error}")
        return not self._decisions.error

    def _check_newest(self, refusal: ParashardError) -> None:
        """Raise `Superseded` if `refusal` is `Fenced` because of a later coordinator, not of a later shard."""
        if isinstance(refusal, Fenced):
            self._decisions.check_claim()

    def _end_waits(self, reason: str) -> None:
        """Wait before a retry while a store or a disk fails, without a bound; report the reason."""
        self._end_failures += 1
        log.info("end-not-stored", reason=reason, failures=self._end_failures)
        self._core.run_exclusive(lambda core, _: core.job.warn_end_waits(f"the job waits: {reason}"))

    def _answered_invalidly(self, reason: str) -> None:
        """Log an invalid answer, to retry; fail the job if a shard has given these for INVALID_ANSWERS_S_MAX."""
        log.warning("end-not-stored", reason=reason)
        self._invalid_since_s = self._invalid_since_s or time.monotonic()
        if time.monotonic() - self._invalid_since_s > INVALID_ANSWERS_S_MAX:
            self._core.run_exclusive(lambda core, _: core.job.fail(reason))

    def _present_status(self) -> pb.GetStatusReply:
        return self.service.GetStatus(pb.GetStatusRequest(), None)
