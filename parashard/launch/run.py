"""`parashard run`: checks before a run, the run, and its end: signals, exit code, report, weights."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from parashard._proto import coordinator_pb2 as pb
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, ParashardError, Unreachable
from parashard.job.load import LoadedJob, as_toml
from parashard.launch.hosts import open_hosts
from parashard.launch.local_cluster import LocalCluster
from parashard.launch.ray_cluster import RayCluster
from parashard.launch.ray_settings import Ray
from parashard.launch.run_control import RunControl, RunFollower
from parashard.launch.run_folders import errors_of, keep_origin, read_report
from parashard.launch.running import Running
from parashard.launch.runs import Run, child_variables
from parashard.launch.starting import Starter
from parashard.launch.stopping import report_of_saved, saved_in, stopped_line, with_continuation
from parashard.models.declaration import write_declaration
from parashard.process import cuda
from parashard.process.addresses import own_host
from parashard.process.best_effort import why_failed
from parashard.process.durable import sync_upwards, write_durably
from parashard.process.run_files import NEW_JOB_FILE, PREPROCESSING_FILE, WEIGHTS_FILE, beside
from parashard.process.shell import ExitCode
from parashard.protocol.rpc import check_reachable
from parashard.security.given_credentials import check_host

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
UNBEGUN = "interrupted before the run began"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: an exit code, the report (empty where there is none) and, after a failure, why."""

    exit_code: int
    report: dict[str, Any]
    reason: str
    run_dir: Path
    accepted: bool = True
    """The coordinator had accepted the job: there is a run."""
    copy: Path | None = None
    """Where a copy of the final weights is, if one was asked for."""
    raised: BaseException | None = None
    """The exception of a callback, which ended the run."""

    @property
    def is_refused(self) -> bool:
        """The job file, the data or the model is invalid, and no run has begun."""
        return self.exit_code == ExitCode.CONFIGURATION and not self.accepted

    @property
    def is_unbegun(self) -> bool:
        """The job was refused, or interrupted before its run began: its folder is of no use."""
        return self.exit_code in (ExitCode.CONFIGURATION, INTERRUPTED) and not self.accepted


def run_job(
    run: Run,
    view: JobView,
    *,
    cluster: LocalCluster | None = None,
    follower: RunFollower | None = None,
    control: RunControl | None = None,
) -> Outcome:
    """Run a job to its end; when this returns, all its processes have ended."""
    # The caller holds the lock of the run's folder (`parashard.launch.run_folders.locked_run`). With a `control` a
    # program calls this in its own thread, stops the run by it, and handles signals itself.
    run_dir = run.folder
    _check(run)
    if run.output is not None:
        _check_output(run.output)
    cluster = _prepared(run, cluster, view.say)
    # They end the run as Ctrl-C does: the report is written, the terminal restored.
    signals = _EndingSignals(() if control is not None else ENDING_SIGNALS)
    try:
        starter = _starter(run, cluster, view.say, signals)
    except KeyboardInterrupt:
        return Outcome(INTERRUPTED, {}, UNBEGUN, run_dir, accepted=False)
    running = Running(run, cluster, view, follower, control, starter)
    try:
        running.start_coordinator()
        state, reason = running.until_over()
        exit_code: int = ExitCode.DONE if state == pb.JOB_STATE_DONE else running.failure_code
    except KeyboardInterrupt:
        view.say("stopping: shards save their state")
        running.tell_stop("interrupted")
        exit_code, reason = INTERRUPTED, UNBEGUN
    except ParashardError as error:
        if isinstance(error, Unreachable):  # the starter cannot go on: the processes save their state
            running.tell_stop(str(error))
        exit_code, reason = running.failure_code, str(error)
    except OSError as error:  # of the run directory, at the start: later errors of the disk are handled
        exit_code, reason = running.failure_code, f"run directory {run_dir}: {why_failed(error)}"
    finally:
        signals.ignore()  # the cleanup must not be interrupted
        view.close()
        try:
            _end(starter, cluster, run.job.cluster.grace_s)
        finally:
            signals.restore()
            with suppress(OSError):
                (run_dir / NEW_JOB_FILE).unlink(missing_ok=True)
    report = read_report(run_dir) if running.accepted else {}
    if report.get("state") == "done":  # even if something failed after the end of the job
        exit_code, reason = ExitCode.DONE, report["reason"]
    elif running.accepted:
        saved = saved_in(run.store_url)
        report = report_of_saved(run_dir, report, saved)
        reason = (
            stopped_line(run_dir, saved, running.status.steps_complete, running.status.steps_total)
            if exit_code == INTERRUPTED
            else with_continuation(run_dir, report, reason)
        )
    if exit_code == ExitCode.DONE and run.output is not None:
        exit_code, reason = _copied(run_dir, run.output, reason)
    copy = run.output if exit_code == ExitCode.DONE else None
    return Outcome(int(exit_code), report, reason, run_dir, running.accepted, copy, running.raised)


def _check(run: Run) -> None:
    """Refuse a job that this launcher cannot run."""
    if run.declared is None and run.job.model.kind == "script":
        raise ConfigurationError(
            f"{run.loaded.path} is of a script, which has its data and model: run the script, or `parashard resume RUN`"
        )
    launcher = run.job.cluster.launcher
    if not run.job.cluster.is_launched:
        raise ConfigurationError(
            f'cluster.launcher is "{launcher}": something else than `parashard run` starts the processes; start them '
            "yourself (python -m parashard_coordinator, python -m parashard_server, parashard worker), or choose by "
            "--on: local, ssh:HOSTFILE, or ray[:ADDRESS]"
        )
    if launcher.startswith("ssh:") and run.declared is not None:
        raise ConfigurationError(
            f'cluster.launcher is "{launcher}": by ssh only a job file is run; a script starts its processes on its '
            "own machine, and `parashard worker --connect` joins from others"
        )
    if launcher.partition(":")[0] == "ray" and run.start_thread is not None:
        raise ConfigurationError(
            f'cluster.launcher is "{launcher}": a worker there is the script run again, which a notebook and '
            'workers_as="threads" do not have; write a script'
        )
    host = own_host(run.job.cluster.listens_on)
    check_host(host, run.job.cluster.insecure, run.credentials)
    check_reachable(host)
    _check_devices(run.loaded)


def _end(starter: Starter, cluster: LocalCluster, grace_s: float) -> None:
    """End all processes, the coordinator last, even if ending the others fails."""
    try:
        if starter is not cluster:
            starter.end(grace_s)
    finally:
        cluster.end(grace_s)


def _starter(run: Run, cluster: LocalCluster, tell: Callable[[str], None], signals: _EndingSignals) -> Starter:
    """Return the starter of shards and workers, after it has connected to all hosts."""
    kind, _, where = run.job.cluster.launcher.partition(":")
    if kind == "local":
        return cluster
    try:
        if kind == "ray":
            return RayCluster(run, run.ray or Ray(where or None), tell)
        return open_hosts(run, Path(where), tell)
    except BaseException:
        cluster.end(0.0)
        signals.restore()
        raise


class _EndingSignals:
    """Signal handlers that end a run in an orderly way, until `restore`; none if a program has its own."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._before: dict[signal.Signals, Any] = {}
        for number in numbers:
            self._before[number] = signal.signal(number, self._interrupt_once)

    def ignore(self) -> None:
        """Ignore these signals from now on."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt_once(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt at the first signal; ignore later ones while report and summary are written."""
        self.ignore()
        raise KeyboardInterrupt


def _prepared(run: Run, cluster: LocalCluster | None, tell: Callable[[str], None]) -> LocalCluster:
    """Write the job's file and declaration durably, and return the cluster with what its children need."""
    with errors_of(run.folder):
        write_durably(run.folder / NEW_JOB_FILE, as_toml(run.job).encode())
        keep_origin(run.folder, run.loaded)
        if run.declared is not None:
            write_declaration(run.folder, run.declared)
        cluster = cluster or LocalCluster(run.folder)
        sync_upwards(run.folder)  # it is new, and its parent may be
    cluster.variables = child_variables(run.job, os.environ, jax="jax" in sys.modules)
    cluster.script, cluster.start_thread, cluster.tell = run.script, run.start_thread, tell
    return cluster


def _check_devices(loaded: LoadedJob) -> None:
    """Refuse a missing CUDA device before any process starts; other hosts check theirs."""
    options = loaded.job.cluster
    if options.launcher != "local":
        return
    for key, asked in (("cluster.device", options.device), ("cluster.shard_device", options.shard_device)):
        try:
            cuda.check(asked)
        except ConfigurationError as error:
            raise ConfigurationError(f'{loaded.origins[key]}: {key} = "{asked}": {error}') from None


def _copied(run_dir: Path, output: Path, reason: str) -> tuple[ExitCode, str]:
    """Copy a finished job's weights; return the exit code of the run and its reason."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run_dir / WEIGHTS_FILE, output)
        if (run_dir / PREPROCESSING_FILE).exists():
            shutil.copyfile(run_dir / PREPROCESSING_FILE, beside(output))
    except OSError as error:
        why = f"the job is done; --output {output}: {why_failed(error)}; the weights are {run_dir / WEIGHTS_FILE}"
        return ExitCode.FAILED, why
    return ExitCode.DONE, reason


def _check_output(output: Path) -> None:
    """Refuse an unwritable output path before the training; its folders are made with the copy, not now."""
    if output.is_dir():
        raise ConfigurationError(f"--output {output}: this is a folder; allowed: a file")
    place = output if output.exists() else next(folder for folder in output.absolute().parents if folder.exists())
    if place is not output and not place.is_dir():
        raise ConfigurationError(f"--output {output}: cannot be written: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise ConfigurationError(f"--output {output}: cannot be written: {place} may not be changed")
