"""InProcessTraining: a run in this process, from the declared job to weights and report.

The coordinator's core makes the same decisions as on a cluster: leases, evaluations, skipped and failed steps, and the
end of the job. Steps run in a worker's loop (`parashard_worker.loop`), which calls core and shard directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import threadpoolctl

from parashard._proto import coordinator_pb2 as pb
from parashard.api.callback_follower import CallbackFollower
from parashard.api.fits import FitCall
from parashard.api.in_process.leasing import Interruption, LocalCoordinator, LocalLeasing
from parashard.api.in_process.state import BegunRun, State, begin_or_resume
from parashard.api.strategies import InProcessStrategy, TPUStrategy
from parashard.display.live import JobView
from parashard.errors import JobFailed, ParashardError, RetryLater, StoreFailed
from parashard.figures import count
from parashard.job.load import as_toml
from parashard.launch.run_control import CallbackFailed
from parashard.launch.run_folders import keep_origin, read_report
from parashard.launch.runs import Run
from parashard.launch.stopping import resume_command
from parashard.plan.variables import Float32s, as_exported
from parashard.process.backoff import retry_pause_s
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.cuda_faults import GpuFault, fault_of
from parashard.process.durable import disk_failed, sync_upwards, write_durably
from parashard.process.resources import EVERY_STEP, keep_freed_memory
from parashard.process.run_files import JOB_FILE
from parashard.store import open_store
from parashard_coordinator.core.callback_progress import CallbackOptions
from parashard_coordinator.core.calls import JobState, LeaseAnswer, LeaseCall
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.evaluations import evaluation_steps
from parashard_coordinator.core.job_record import DueCheckpoint, JobRecord
from parashard_coordinator.core.results import follow, job_ends
from parashard_coordinator.core.saved import Saved
from parashard_coordinator.endpoints.history import HistoryFile
from parashard_coordinator.endpoints.service import follow_call, follow_reply
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.run.job_start import new_job_record
from parashard_coordinator.run.report import audited, report, save_preprocessing, save_report, save_weights
from parashard_worker.device import Gpu, open_device
from parashard_worker.loading import task_of
from parashard_worker.loop import StepLoop, keep_evaluated

NAME = "fit"
LOOK_S = 0.25  # between periodic work: updating the view, checkpoints
HISTORY_S = 1.0
RECORDS_S = 2.0


def train(
    call: FitCall, run: Run, view: JobView, follower: CallbackFollower, strategy: InProcessStrategy
) -> dict[str, Any]:
    """Train to the end on a strategy's device, and return the report."""
    assert run.declared is not None, "the run of a script"
    if isinstance(strategy, TPUStrategy):
        from parashard.api.in_process.sharded import check

        check(call.model, run.job)
    keep_freed_memory(EVERY_STEP)
    try:
        begun = begin_or_resume(run.job, run.declared, open_store(run.store_url), resume=run.resume)
        keep_origin(run.folder, run.loaded)
        write_durably(run.folder / JOB_FILE, as_toml(run.job).encode())
        sync_upwards(run.folder)
        with Interruption() as stop, threadpoolctl.threadpool_limits(strategy.threads or None):
            return InProcessTraining(run, begun, call, view, follower, strategy, stop).run()
    except OSError as error:
        if disk_failed(error):
            raise StoreFailed(
                f"run directory {run.folder}: {why_failed(error)}; make room and go on with it"
            ) from error
        raise


class InProcessTraining:
    """One run in progress."""

    def __init__(
        self,
        run: Run,
        begun: BegunRun,
        call: FitCall,
        view: JobView,
        follower: CallbackFollower,
        strategy: InProcessStrategy,
        stop: Interruption,
    ) -> None:
        resolved = begun.resolved
        job = resolved.job
        self._begun = begun
        self._run_dir = run.folder
        self._view = view
        self._follower = follower
        self._stop = stop
        self._round_steps = job.consistency.policy.bound
        device = open_device(job.cluster.device, NAME)
        self._task = task_of(job, resolved.steps, resolved.plan, call.model, call.source, device)
        self._sharded: ShardedSteps | None = None
        if isinstance(strategy, TPUStrategy):
            from parashard.api.in_process.sharded import ShardedSteps

            self._sharded = ShardedSteps(self._task, strategy.replicas)
        self._status = StatusView(job.job.name, str(job.consistency.policy))
        self._state = State(begun)  # before the record, which needs the current plan
        self._core = Core(_record(begun, follower, resume=run.resume))
        self._history = HistoryFile(run.folder, lambda text, over: None)
        self._leasing: LocalLeasing | None = None
        self._look_s = self._history_s = 0.0
        self._records_s = time.monotonic() + RECORDS_S
        self._stored = -1  # number of the core's decisions that are stored
        self._records = BestEffort("the run's records", lambda text, over: self._view.say(text))
        self._saved: Saved | None = None
        self._milestone = 0  # complete steps at which callbacks have the next event

    def run(self) -> dict[str, Any]:
        """Train, and return the report."""
        job, now_s = self._core.job, time.monotonic()
        try:
            self._core.announced(0, self._state.announcement(), now_s)
            device = self._task.device
            worker = self._core.register_worker(NAME, device.fingerprint(), device.name, "", now_s)
            coordinator = LocalCoordinator(
                self._lease, self._follow, self._look, self._is_over, self._follower.callbacks.wants_steps
            )
            self._leasing = leasing = LocalLeasing(
                coordinator, worker.name, worker.incarnation, self._round_steps, self._stop, reads_on=self._reads_on()
            )
            loop = StepLoop(self._task, self._state.client, leasing, depth=0, keep=self._keep, computes=self._sharded)
            self._save_records()
            loop.run(self._is_over)
            self._look(now=True)
            if job.complete and (report := self._finished()) is not None:
                return report
            if job.over:
                raise self._failed()
        except KeyboardInterrupt:
            self._stop.asked = True
        except CallbackFailed as failed:
            self._stop.asked = True
            self._view.say(f"stopping: {failed}")
            raise failed.error from None
        finally:
            if self._stop.asked and not job.over:
                self._save_stopped()
            self._state.close()
        raise KeyboardInterrupt(self._stopped_line())

    def _reads_on(self) -> Callable[[int], bool]:
        """Return a predicate: whether to prefetch the next step's examples while a GPU computes a step."""
        # Not if callbacks run in between, which may change the script's arrays; sharded steps are read together.
        steps, job = self._task.steps, self._begun.resolved.job
        together = self._sharded is not None or self._follower.callbacks.wants_steps
        if together or not isinstance(self._task.device, Gpu):
            return lambda step: False
        pauses = set(evaluation_steps(steps.total, steps.steps_per_epoch, job.evaluation.every_epochs))
        return lambda step: (step + 1) % steps.steps_per_epoch != 0 and step + 1 not in pauses

    def _is_over(self) -> bool:
        job = self._core.job
        return job.over or job.complete or self._stop.asked

    def _lease(self, call: LeaseCall) -> LeaseAnswer:
        """Pass a report to the core and return its grants; store the core's decisions."""
        job = self._core.job
        for result in call.evaluated:
            if result.error:
                job.fail(f"{result.error}; the evaluation after step {result.after_step:,} failed")
        answer = self._core.lease(call, time.monotonic())
        if self._sharded is not None and answer.granted:
            self._sharded.granted([grant.step for grant in answer.granted if not grant.skip])
        waits = self._records.error and time.monotonic() < self._records_s
        if job.decisions != self._stored and not waits:
            self._save_records()
        return answer

    def _keep(self, evaluation: int, values: Mapping[str, Float32s]) -> str:
        """Store the weights of an evaluation."""
        run, here = self._begun, self._state.client.on_host(values)
        return keep_evaluated(run.records.store.url, run.run_id, run.resolved.plan.variables, evaluation, here)

    # --- callbacks ---

    def _follow(self) -> bool:
        """Pass new events to the callbacks, if there are any; return whether they handled a milestone."""
        job, progress = self._core.job, self._core.job.callback_progress
        told = self._follower.callbacks.wants_steps or job.state is not JobState.RUNNING
        if not told and job.leases.lowest_incomplete < self._milestone:
            return False
        before = progress.handled
        with suppress(RetryLater):  # before the first lease
            self._follower.look(lambda request: follow_reply(follow(self._core.job, follow_call(request))))
        ahead = progress.next_milestone(job.leases.target)
        self._milestone = 0 if ahead is None else ahead.after_steps
        return progress.handled > before

    # --- time ---

    def _look(self, *, now: bool = False) -> None:
        """Update the view and start a checkpoint if one is due; at most every `LOOK_S` unless `now`."""
        now_s = time.monotonic()
        if now_s < self._look_s and not now:
            return
        self._look_s = now_s + LOOK_S
        core = self._core
        core.announced(0, self._state.announcement(), now_s)
        round_ = core.job.rounds.round_to_save(core.job.leases.lowest_incomplete, now_s)
        if round_ is not None:
            self._state.save_soon(round_)
            core.job.rounds.round_announced()
        if now_s >= self._records_s:
            self._save_records()
        kept = now_s >= self._history_s
        if kept or type(self._view) is not JobView:
            status = self._present_status(now_s)
            self._view.show(status)
            if kept:
                self._history_s = now_s + HISTORY_S
                self._history.add(status)

    def _present_status(self, now_s: float) -> pb.GetStatusReply:
        self._status.saw(0, self._state.record())
        return self._status.message(self._core.job, now_s)

    # --- the end ---

    def _finished(self) -> dict[str, Any] | None:
        """Store the final state, retrying while the disk is full; return the report, or None if asked to stop."""
        job, failures = self._core.job, 0
        while not self._stop.asked:
            try:
                return self._store_end()
            except StoreFailed as error:
                failures += 1
                job.warn_end_waits(f"the job waits: weights and report cannot be stored: {error}")
                self._view.say(job.reason)
            until_s = time.monotonic() + retry_pause_s(failures)
            while time.monotonic() < until_s and not self._stop.asked:
                time.sleep(LOOK_S)
                self._look()
        return None

    def _store_end(self) -> dict[str, Any]:
        """Store the final checkpoint, weights and report; return the report."""
        job, run = self._core.job, self._begun
        due = job.due_checkpoint()
        assert due is not None, "the job is complete"
        name = due.stored or self._state.finish(due.steps, due.round or 0)
        job.set_final_checkpoint(due._replace(stored=name))
        model = run.records.model(name)
        figures = self._report(due, model.steps_applied) | audited(run.resolved, model)
        figures["checkpoint"] = name
        save_weights(self._run_dir, as_exported(model.variables, model.plan.variables), run.run_id)
        save_preprocessing(self._run_dir, run.resolved.spec.preprocessing)
        save_report(self._run_dir, figures)
        self._history.add(self._present_status(time.monotonic()))
        run.records.keep_results(self._run_dir)
        job.mark_done()
        self._save_records()
        return read_report(self._run_dir)

    def _report(self, due: DueCheckpoint | None, steps_saved: Sequence[int]) -> dict[str, Any]:
        now_s = time.monotonic()
        self._present_status(now_s)
        if due is not None:
            job_ends(self._core.job)
        return report(self._core.job, self._begun.resolved, self._status, now_s, due, steps_saved)

    def _failed(self) -> JobFailed:
        """Save the current state and return the job's failure; the user's own error is its cause."""
        self._save_progress()
        failure = JobFailed(self._core.job.reason)
        error = None if self._leasing is None else self._leasing.error
        if error is not None and not isinstance(error, ParashardError):
            failure.__cause__ = error
        else:
            failure.__suppress_context__ = True
        return failure

    def _save_stopped(self) -> None:
        self._view.say("stopping: the state is saved")
        self._core.job.stop("interrupted")
        self._save_progress()

    def _save_progress(self) -> None:
        """Save the last applied round and a report; on a full disk the earlier checkpoint stays the newest."""
        if self._leasing is not None:
            self._leasing.report()  # applied steps that were not reported yet
        with suppress(StoreFailed, OSError):
            try:
                self._state.save()
            except Exception as error:
                if fault_of(error) is not GpuFault.LOST_CONTEXT:
                    raise
                self._view.say("the state since the last checkpoint is lost with the GPU's context")
            self._save_records()
            save_report(self._run_dir, self._report(None, [self._state.saved_steps]))

    def _stopped_line(self) -> str:
        steps, total = self._state.saved_steps, self._task.steps.total
        return f"stopped at step {count(steps)} of {count(total)} (saved). Continue: {resume_command(self._run_dir)}"

    def _save_records(self) -> None:
        """Store records that the checkpoint lacks: evaluations, a stop, counts; if that fails, retry later (P21)."""
        decisions, saved = self._core.job.decisions, self._core.job.saved()
        if saved == self._saved or self._records.attempt(lambda: self._begun.records.save(saved)):
            self._stored, self._saved = decisions, saved
        self._records_s = time.monotonic() + max(RECORDS_S, retry_pause_s(self._records.failures))


def _record(run: BegunRun, follower: CallbackFollower, *, resume: bool) -> JobRecord:
    """Return the job's state, restored from the run's records."""
    callbacks = follower.callbacks
    options = CallbackOptions(True, callbacks.decides, callbacks.ahead, callbacks.uses_weights)
    job = new_job_record(run.resolved, run.run_id, run.records.incarnation, options)
    job.report_data(run.resolved.summary(), run.resolved.warnings)
    saved = run.records.load_saved()
    if saved is not None:
        job.resume(saved)
    if resume:
        job.reset_for_resume()
    return job
