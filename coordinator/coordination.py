"""Coordination: the shell around the core of one job: its clock, its store, its look at the shards, its end.

Every decision is the core's. This ticks, carries out what the core wants of shards (return to a round, save one, save
all of them drained), stores what must outlive the process, and writes the weights and the report at the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import structlog

from coordinator.calls import JobState
from coordinator.commands import ShardCommands
from coordinator.core import Core
from coordinator.draining import Answer, LastReads
from coordinator.history import History
from coordinator.metrics import CoordinatorCollector
from coordinator.page import status_page
from coordinator.report import audited, report, save_preprocessing, save_report, save_weights
from coordinator.resolve import ResolvedJob
from coordinator.run_store import RunStore
from coordinator.saved import Saved
from coordinator.service import CoordinatorService
from coordinator.shard_stubs import ShardStubs
from coordinator.staleness import quantile
from coordinator.status import StatusView
from coordinator.troubles import ShardTroubles
from coordinator.watch import ShardWatch
from parashard import failpoints
from parashard.backoff import retry_pause_s
from parashard.claims import newest_claim
from parashard.errors import (
    DamagedCheckpoint,
    Fenced,
    InvalidRequest,
    NotReady,
    ParashardError,
    PeerFailed,
    Redo,
    RetryLater,
    StoreFailed,
    Superseded,
)
from parashard.intervals import IntervalSet
from parashard.partition import Plan
from parashard.process import ExitCode, Stop
from parashard.security.credentials import Credentials
from parashard.side_effects import SideEffect
from parashard.telemetry.http import HttpPort, new_registry
from parashard.telemetry.refusals import RefusedPeers
from parashard.trouble import STEADY_S
from parashard.variables import Float32s
from protos import coordinator_pb2 as pb

TICK_S = 0.05
LOOK_S = 1.0
SAVE_S = 2.0
AGAIN_S = 0.2
DAMAGED_RETURNS_MAX = 50  # a shard says of a damaged round that it cannot return there; only its first one stays
SKIP_PATIENCE_S = 20.0
SKIP_PAUSE_S = 0.5
NONSENSE_PATIENCE_S = 60.0  # how long a shard may answer nonsense before the last checkpoint, and the job, is given up

log = structlog.get_logger("coordinator")


class Coordination:
    """One job in progress.

    Parameters
    ----------
    core : Core
        Its decisions.
    resolved : ResolvedJob
        What it is.
    plan : Plan
        Where its variables are.
    job : GetJobReply
        What every process is told.
    run_dir : Path
        Where history, weights and report go.
    run_store : RunStore
        Where what outlives this process goes.
    credentials : Credentials, optional
        Shown to shards.
    make_service : callable
        Makes the service; the one of a coordinator that traces comes in here.
    """

    def __init__(
        self,
        core: Core,
        resolved: ResolvedJob,
        plan: Plan,
        job: pb.GetJobReply,
        run_dir: Path,
        run_store: RunStore,
        credentials: Credentials | None = None,
        make_service: Callable[..., CoordinatorService] = CoordinatorService,
    ) -> None:
        self.core = core
        self._resolved = resolved
        self._plan = plan
        self._run_id = job.run_id
        self._run_dir = run_dir
        self._run_store = run_store
        settings = resolved.job
        self._status = StatusView(settings.job.name, str(settings.consistency.policy), core.options.shards)
        self.service = make_service(core, job, self._status, on_decision=self._save_decision)
        self._credentials = credentials
        stubs = ShardStubs(credentials)
        self._watch = ShardWatch(self._run_id, stubs)
        self._commands = ShardCommands(self._run_id, run_store.incarnation, plan.version, stubs)
        self._nonsense_since_s: float | None = None
        self._end_failures = 0  # of the store and of the run directory, in a row
        self._returns_failed = 0  # likewise, of shards that were to return
        self._again_s = 0.0  # when to try again what waits for a shard
        self._return_s = 0.0  # when to send shards back again
        self._damaged_returns = 0
        self._checkpoint = ""
        self._checkpoint_view = 0  # of the shards whose state that is
        self._parts: dict[int, str] = {}  # folders of the parts of the checkpoint that was taken last, by shard
        self._last_reads = LastReads()
        self._saved: Saved | None = None
        self._stored_skips = frozenset(core.leases.skips)
        self._stored_fingerprint = core.workers.fingerprint
        self._save_s = 0.0  # when to try again what a later coordinator needs
        self._history = History(run_dir, self._note_of("history"))
        self._records = SideEffect("the coordinator's records", self._note_of("records"), STEADY_S)
        self._failed_report = SideEffect("the failed job's report", self._note_of("failed-report"))
        self._troubles = ShardTroubles()

    def http_port(self, host: str, port: int, refused: RefusedPeers) -> HttpPort:
        """Return the port that serves metrics, probes and the status page."""
        registry = new_registry("coordinator", self._credentials)
        registry.register(refused)
        registry.register(CoordinatorCollector(self.core, self._present_status))
        page = {"/": lambda: (200, "text/html; charset=utf-8", status_page(self._present_status()))}
        http = HttpPort(host, port, registry, lambda: "" if self.core.shards.all_registered else self.core.reason, page)
        self._status.http_address = http.address
        return http

    def run(self, stop: Stop) -> None:
        """Lease until the job is over or a stop is asked for; then save what a later coordinator needs."""
        history = self._history
        next_look_s = 0.0
        view = saved_view = self.core.shards.view
        while not self.core.over and not stop.wait(TICK_S):
            self.service.run(lambda core, now_s: core.tick(now_s))
            now_s = time.monotonic()
            if self.core.shards.all_registered and (now_s >= next_look_s or view != self.core.shards.view):
                view, next_look_s = self.core.shards.view, now_s + LOOK_S
                self._look()
                history.add(self._present_status())
            if now_s >= self._save_s or saved_view != self.core.shards.view:  # a life that is forgotten is not counted
                saved_view = self.core.shards.view
                self._save_if_changed()
                self._save_s = now_s + max(SAVE_S, retry_pause_s(self._records.failures))
            self._command_shards()
            if now_s < self._again_s:
                continue
            if self.core.drained:
                self._save_drained()
            if self.core.complete:
                self._finish()
            self._again_s = now_s + max(AGAIN_S, retry_pause_s(self._end_failures))
        if self.core.shards.all_registered:
            self._look()
        history.add(self._present_status())
        self._save_if_changed()
        if self.core.state is JobState.FAILED:
            self._failed_report.attempt(self._save_failed_report)

    def linger(self) -> None:
        """Try again to write a failed job's report, where that did not go well."""
        if self._failed_report.error:
            self._failed_report.attempt(self._save_failed_report)

    def _save_failed_report(self) -> None:
        save_report(self._run_dir, report(self.core, self._resolved, self._status, time.monotonic()))
        self._run_store.keep_results(self._run_dir)

    def _note_of(self, key: str) -> Callable[[str, bool], None]:
        """Return what shows people that something cannot be written, or can again."""

        def note(text: str, over: bool) -> None:
            self.service.run(lambda core, _: core.resolved(key, text) if over else core.warn(key, text))

        return note

    # --- shards ---

    def _look(self) -> bool:
        """Ask every shard for its record; return whether all of them answered."""
        silent = self._watch.look(self.core.shards.lives(), self._status.saw, time.monotonic())
        changed = [
            change
            for shard, record in self._status.records().items()
            for change in self._troubles.changed(shard, record.figures, time.monotonic())
        ]
        p95 = quantile(self._status.staleness(), 0.95)

        def note(core: Core, now_s: float) -> None:
            core.staleness_p95 = p95
            for key, text, over in changed:
                core.resolved(key, text) if over else core.warn(key, text)
            for shard, silence in silent.items():
                core.shard_silent(shard, silence.silent_s, str(silence.error))

        self.service.run(note)
        return not silent

    def _command_shards(self) -> None:
        """Send shards back that have to return (P12), and name the round that all save next."""
        if not self.core.shards.all_registered:
            return
        lives = self.core.shards.lives()
        strayed = {shard: (lives[shard], round_) for shard, round_ in self.core.rounds.strayed()}
        if strayed and time.monotonic() >= self._return_s:
            for shard, error in self._commands.roll_back(strayed).items():
                self._returns_failed += isinstance(error, StoreFailed)
                log.warning("not-returned", shard=shard, error=str(error))
                self._check_newest(error)
                # It says by and by where it stands, or is away, or cannot claim an incarnation on a full disk.
                self._return_s = time.monotonic() + max(AGAIN_S, retry_pause_s(self._returns_failed))
                self._damaged_returns += isinstance(error, DamagedCheckpoint)
            if self._damaged_returns > DAMAGED_RETURNS_MAX:
                reason = "the shards cannot return to a common round: the checkpoints of it are damaged"
                self.service.run(lambda core, _: core.fail(reason))
        round_ = self.service.run(lambda core, now_s: core.rounds.due_cut(core.leases.lowest_incomplete, now_s))
        if round_ is not None:
            for shard, error in self._commands.name_round(lives, round_).items():
                log.warning("round-not-named", shard=shard, round=round_, error=str(error))
            self.service.run(lambda core, _: core.rounds.cut_named())

    def _save_drained(self) -> None:
        """Take the drained checkpoint that somebody waits for."""
        target = self.core.drain_target or 0
        try:
            id_ = self._checkpoint_of_all(target, final=False)
        except (RetryLater, Redo, Fenced) as error:  # a shard is away; leasing stays paused until it is back
            self._check_newest(error)
            why = str(error)
            log.info("drained-checkpoint-waits", error=why)
            given_up = self.service.run(lambda core, now_s: core.draining.failed(why, core.shards.view, now_s))
            if given_up is None:
                return
            answer = given_up
        except ParashardError as error:
            answer = Answer(error=str(error), steps=target)
        else:
            if not id_:
                return
            answer = Answer(checkpoint=id_, steps=target)
        self.service.run(lambda core, _: core.checkpoint_ended(answer))

    def _checkpoint_of_all(self, steps: int, *, final: bool) -> str:
        """Have all shards save the same steps, and store the manifest of that; return its id, or "" to try again."""
        core = self.core
        saved = self._commands.save(core.shards.lives(), core.policy.round_of(steps), self._last_reads.damaged)
        self._parts = {shard: said.part.name for shard, said in enumerate(saved)}
        self.service.run(lambda core, _: core.shards_saved([(shard.applied, shard.skipped) for shard in saved]))
        whole = IntervalSet([(0, steps)])
        if any(shard.applied != whole for shard in saved):
            furthest = max(shard.applied.stop() for shard in saved)
            if furthest <= steps:
                lacking = "a shard's own record lacks steps that it acknowledged"
                self.service.run(lambda core, _: core.fail(lacking))
                return ""
            # A lease of an earlier coordinator reached further than this one knew.
            self.service.run(lambda core, _: core.drain_further(furthest))
            return ""
        failpoints.hit("coordinator.checkpoint.parts")
        id_ = self._run_store.add_job_manifest(
            self._run_id, self._resolved.digest, self._plan, steps, [shard.part for shard in saved], final=final
        )
        failpoints.hit("coordinator.checkpoint.manifest")
        return id_

    # --- the end ---

    def _finish(self) -> None:
        """Store the last checkpoint, the final weights, the report and the history; then the job is done (P7).

        The weights are the checkpoint's: by an earlier coordinator's lease, a shard may still get a step past an early
        stop. Whatever is away meanwhile comes back, and this is tried again, and a store or a disk that fails is
        waited for (P21).
        """
        variables = self._final_variables()
        if variables is None:
            return
        core, resolved = self.core, self._resolved
        self._look()
        figures = report(core, resolved, self._status, time.monotonic())
        figures.update(audited(resolved, variables), state="done", reason=core.early_stop or "every step is in")
        # What each part of the checkpoint was checked to have; a record may be older, or the shard just away.
        figures["steps_applied"] = [core.leases.target] * core.options.shards
        figures["checkpoint"] = self._checkpoint
        try:
            save_weights(self._run_dir, variables, self._run_id)
            save_preprocessing(self._run_dir, resolved.spec.preprocessing)
            failpoints.hit("coordinator.finish.weights")
            save_report(self._run_dir, figures)
            failpoints.hit("coordinator.finish.report")
            del variables  # the weights are read again to be stored
            self._history.add(self._present_status())
            self._run_store.keep_results(self._run_dir)
        except StoreFailed as error:
            self._end_waits(f"weights and report cannot be stored: {error}")
            return
        self._end_failures = 0
        self.service.run(lambda core, _: core.done())

    def _final_variables(self) -> dict[str, Float32s] | None:
        """Return the last checkpoint's weights, once there is one; None to try again."""
        core = self.core
        self._save_if_changed()
        if self._records.error:  # a stop that a successor did not hear of would be undone
            self._end_waits(f"the coordinator's records cannot be stored: {self._records.error}")
            return None
        try:
            view = core.shards.view
            if view != self._checkpoint_view:  # steps may have been computed again since, and evaluated (P25)
                self._checkpoint, self._checkpoint_view = "", view
            self._checkpoint = self._checkpoint or self._checkpoint_of_all(core.leases.target, final=True)
            if not self._checkpoint:
                return None
            return self._run_store.weights(self._checkpoint)
        except DamagedCheckpoint as error:
            log.warning("last-checkpoint-damaged", error=str(error))
            self._checkpoint = ""  # another one is taken
            given_up = self._last_reads.failed(self._parts, str(error))
            if given_up:
                self.service.run(lambda core, _: core.fail(given_up))
        except StoreFailed as error:
            self._end_waits(f"the last checkpoint cannot be stored: {error}")
        except (InvalidRequest, PeerFailed, Fenced) as error:
            self._check_newest(error)
            self._nonsense(f"the last checkpoint cannot be stored: {error}; --resume goes on from the one before it")
        except ParashardError as error:
            self._nonsense_since_s = None
            log.info("end-waits", error=str(error))
        return None

    def _check_newest(self, refusal: ParashardError) -> None:
        """Raise a shard's refusal where a later coordinator has claimed the run (P23): else the shard is superseded."""
        if isinstance(refusal, Fenced):
            with suppress(StoreFailed):  # nobody knows now; the next refusal asks again
                newest = newest_claim(self._run_store.store, "coordinator")
                if newest > self._run_store.incarnation:
                    raise refusal

    def _end_waits(self, reason: str) -> None:
        """Wait, for as long as it takes, for a store or a disk that fails; people see why (P21)."""
        self._end_failures += 1
        log.info("end-not-stored", reason=reason, failures=self._end_failures)
        self.service.run(lambda core, _: core.waits(f"the job waits: {reason}"))

    def _nonsense(self, reason: str) -> None:
        """Go on to the next try, unless a shard has answered nonsense for long: that ends the job."""
        log.warning("end-not-stored", reason=reason)
        self._nonsense_since_s = self._nonsense_since_s or time.monotonic()
        if time.monotonic() - self._nonsense_since_s > NONSENSE_PATIENCE_S:
            self.service.run(lambda core, _: core.fail(reason))

    # --- what outlives this process ---

    def _save_if_changed(self) -> None:
        """Under the core's lock: a decision that is stored meanwhile is not to be replaced by what was before it."""

        def save(core: Core, _: float) -> None:
            saved = core.saved()
            if saved != self._saved:
                self._save(saved)

        self.service.run(save)

    def _save(self, saved: Saved) -> bool:
        if not self._records.attempt(lambda: self._run_store.save(saved)):
            return False
        self._saved, self._stored_skips, self._stored_fingerprint = saved, frozenset(saved.skips), saved.fingerprint
        return True

    def _save_decision(self, core: Core) -> None:
        """Store a decision before it acts (P7); under the core's lock, so that nothing else happens meanwhile.

        A store that fails stops no work (P21): a result, a stop or a scaling, which a later coordinator finds out
        again, is stored later. A step must not be skipped by one and computed by another: a store that fails for long
        then, and a later coordinator (P3), end this process: what was decided has not left it.

        Raises
        ------
        NotReady
            To a worker whose arithmetic would have become the job's (P13): it joins again.
        """
        deadline_s = time.monotonic() + SKIP_PATIENCE_S
        try:
            while not self._save(core.saved()):
                if core.leases.skips <= self._stored_skips:
                    break
                if time.monotonic() > deadline_s:
                    _give_up("skip-not-stored", self._records.error, ExitCode.RETRY)
                time.sleep(SKIP_PAUSE_S)
            else:
                return
        except Superseded as error:
            _give_up("superseded", str(error), ExitCode.FENCED)
        if core.options.same_arithmetic and core.workers.fingerprint != self._stored_fingerprint:
            core.workers.fingerprint = self._stored_fingerprint
            raise NotReady(f"the coordinator's store does not work: {self._records.error}")

    def _present_status(self) -> pb.GetStatusReply:
        return self.service.GetStatus(pb.GetStatusRequest(), None)


def _give_up(event: str, error: str, code: ExitCode) -> NoReturn:
    """End this process at once: what it decided must not act."""
    try:
        log.critical(event, error=error)
    finally:
        os._exit(code)  # P21
