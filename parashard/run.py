"""`parashard run`: start a local cluster, keep it as the coordinator asks, show how it goes, end with a summary."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from parashard.backoff import backoff_s
from parashard.coordinator_client import ADDRESS_FILE, CoordinatorClient
from parashard.errors import ConfigurationError, JobFailed, ParashardError, RetryLater
from parashard.job.load import LoadedJob, as_toml, load_job
from parashard.live import JobView
from parashard.local_cluster import Ended, LocalCluster
from parashard.process import ExitCode, check_host
from parashard.run_files import JOB_FILE, REPORT_FILE, WEIGHTS_FILE
from parashard.security.credentials import Credentials
from parashard.security.identity import Role, in_words
from protos import coordinator_pb2 as pb

NEW_JOB_FILE = "job.new.toml"  # until the coordinator has taken it
LOCK_FILE = "lock"
RUNS = Path("runs")
START_DEADLINE_S = 600.0  # it reads and hashes the data first; its death is noticed at once
SUPERVISE_S = 0.05
SHOW_S = 0.25
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass(frozen=True)
class Outcome:
    """How a run ended: an exit code, the report (empty where there is none) and, after a failure, why."""

    exit_code: int
    report: dict[str, Any]
    reason: str
    run_dir: Path


def new_run_dir(asked: Path | None, name: str) -> Path:
    """Create and return a run's own directory.

    Raises
    ------
    ConfigurationError
        If the directory that was asked for has something in it (P2), or cannot be made.
    """
    path = asked or RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigurationError(f"run directory {path} is not empty; every run has a directory of its own")
    except OSError as error:
        raise ConfigurationError(f"run directory {path}: {error.strerror}") from None
    return path.absolute()


def resumed_run_dir(asked: Path | None, name: str) -> Path:
    """Return the directory of a run that was stopped: the one that was asked for, or the job's newest under `runs/`.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    found = [asked] if asked is not None else sorted(RUNS.glob(f"{name}-*"), key=os.path.getmtime)
    kept = [path for path in found if (path / JOB_FILE).is_file()]
    if asked is None:
        kept = [path for path in kept if _job_name_in(path) == name]
    if not kept:
        raise ConfigurationError(
            f"--resume: {asked or f'no directory of a run of {name!r} under {RUNS}/'} has no {JOB_FILE} of a run"
        )
    return kept[-1].absolute()


def run_job(
    loaded: LoadedJob,
    run_dir: Path,
    view: JobView,
    *,
    init: Path | None,
    output: Path | None,
    resume: bool = False,
    from_checkpoint: str = "",
    cluster: LocalCluster | None = None,
    tls_dir: Path | None = None,
) -> Outcome:
    """Run a job to its end on this machine; when this returns, no process of it is left.

    Parameters
    ----------
    loaded : LoadedJob
        The job, and where its file lies (a user's model is looked up beside it).
    run_dir : Path
        Gets the resolved job file, logs, history, checkpoints, report and weights; empty unless `resume`.
    view : JobView
        Where to show how it goes.
    init, output : Path, optional
        Weights to start from; where to copy the final weights.
    resume : bool
        True: take up the run in `run_dir` where its checkpoints end.
    from_checkpoint : str
        The drained checkpoint that another placement starts from; empty: the newest.
    cluster : LocalCluster, optional
        Who starts processes; by default an ordinary one.
    tls_dir : Path, optional
        Credentials of all processes, with all four roles.
    """
    if loaded.job.cluster.launcher != "local":
        raise ConfigurationError(
            f'cluster.launcher is "{loaded.job.cluster.launcher}": `parashard run` starts a local cluster; start the '
            "processes yourself (python -m coordinator, python -m ps_server, parashard worker), or set "
            "cluster.launcher=local"
        )
    credentials = _all_roles(tls_dir) if tls_dir is not None else None
    check_host(loaded.job.cluster.host, loaded.job.cluster.insecure, credentials)
    if output is not None:
        _check_output(output)
    try:
        lock = _locked(run_dir)
        (run_dir / NEW_JOB_FILE).write_text(as_toml(loaded.job))
        cluster = cluster or LocalCluster(run_dir)
    except OSError as error:
        raise ConfigurationError(f"run directory {run_dir}: {error.strerror}") from None
    run = _Run(loaded, run_dir, cluster, view, credentials)
    # As Ctrl-C: the report is written, the terminal given back.
    before = {number: signal.signal(number, signal.default_int_handler) for number in ENDING_SIGNALS}
    try:
        run.start_coordinator(init, resume=resume, from_checkpoint=from_checkpoint)
        state, reason = run.until_over()
        exit_code: int = ExitCode.DONE if state == pb.JOB_STATE_DONE else run.failure_code
    except KeyboardInterrupt:
        run.tell_stop("interrupted")
        exit_code, reason = INTERRUPTED, "interrupted; --resume goes on from the checkpoints"
    except ParashardError as error:
        exit_code, reason = run.failure_code, str(error)
    finally:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # nothing may interrupt this: no process is to be left behind
        view.close()
        cluster.end(loaded.job.cluster.grace_s)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(lock)
        (run_dir / NEW_JOB_FILE).unlink(missing_ok=True)
    report = read_report(run_dir) if run.accepted else {}
    if report.get("state") == "done":  # whatever came after the end of the job
        exit_code, reason = ExitCode.DONE, report["reason"]
    if exit_code == ExitCode.DONE and output is not None:
        shutil.copyfile(run_dir / WEIGHTS_FILE, output)
    return Outcome(int(exit_code), report, reason, run_dir)


class _Run:
    """One run in progress."""

    def __init__(
        self,
        loaded: LoadedJob,
        run_dir: Path,
        cluster: LocalCluster,
        view: JobView,
        credentials: Credentials | None,
    ) -> None:
        self._credentials = credentials
        self._cluster_options = loaded.job.cluster
        self._model_folder = loaded.path.parent
        self._run_dir = run_dir
        self._cluster = cluster
        self._view = view
        self._client: CoordinatorClient | None = None
        self._run_id = ""
        self._arguments: list[str] = []
        self._coordinator_exits = 0  # in a row, without a step completed in between
        self._coordinator_due_s: float | None = None  # when to start it again
        self._steps_complete = 0
        self._heard_s = 0.0
        self._asked_to_end: set[tuple[str, int]] = set()
        self.failure_code = ExitCode.FAILED
        self.accepted = False
        """The coordinator has taken the job: until then an earlier run's files are as they were."""

    def start_coordinator(self, init: Path | None, *, resume: bool, from_checkpoint: str) -> None:
        """Start the coordinator and wait until it serves."""
        self._arguments = ["--run-dir", str(self._run_dir), *self._listen(), "--model-folder", str(self._model_folder)]
        if init is not None:
            self._arguments += ["--init", str(init.absolute())]
        first = ["--job", str(self._run_dir / NEW_JOB_FILE)]
        first += ["--resume"] if resume else ["--run-id", secrets.token_hex(8)]
        first += ["--from-checkpoint", from_checkpoint] if from_checkpoint else []
        self._cluster.start("coordinator", "coordinator", [*self._arguments, *first])
        deadline_s = time.monotonic() + START_DEADLINE_S
        while (where := _coordinator_in(self._run_dir)).get("pid") != self._coordinator_pid():
            for child in self._cluster.reap():
                self._coordinator_ended(child)
                if child.exit_code > 0 and child.exit_code != ExitCode.RETRY:  # nor will it begin at the next try
                    raise JobFailed(f"the coordinator ended: {child.reason}")
            self._start_coordinator_again(first)
            if time.monotonic() > deadline_s:
                raise JobFailed(f"the coordinator did not serve within {START_DEADLINE_S:.0f} s")
            time.sleep(SUPERVISE_S)
        self.accepted = True
        (self._run_dir / REPORT_FILE).unlink(missing_ok=True)  # of an earlier start of this run
        os.replace(self._run_dir / NEW_JOB_FILE, self._run_dir / JOB_FILE)
        self._run_id = str(where["run_id"])
        self._arguments += ["--job", str(self._run_dir / JOB_FILE), "--run-id", self._run_id]
        self._client = CoordinatorClient(str(where["address"]), where=str(self._run_dir), credentials=self._credentials)

    def until_over(self) -> tuple[pb.JobState, str]:
        """Keep the cluster as the coordinator asks until the job is over; return its last state and why."""
        unheard: list[Ended] = []
        next_show_s = 0.0
        self._heard_s = time.monotonic()
        while True:
            for child in self._cluster.reap():
                if child.name == "coordinator":
                    self._coordinator_ended(child)
                else:
                    unheard.append(child)
            self._start_coordinator_again([])
            try:
                orders = self._supervise(unheard)
            except RetryLater:
                self._check_silence()
                time.sleep(SUPERVISE_S)
                continue
            self._heard_s = time.monotonic()
            for child in unheard:
                if child.exit_code == ExitCode.CONFIGURATION:
                    self.failure_code = ExitCode.CONFIGURATION
            unheard = []
            if time.monotonic() >= next_show_s:
                next_show_s = time.monotonic() + SHOW_S
                self._show()
            if orders.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED):
                self._wait_for_report(orders.state)
                return orders.state, orders.reason
            self._obey(orders)
            time.sleep(SUPERVISE_S)

    def _coordinator_ended(self, child: Ended) -> None:
        """Have the coordinator started again: shards and workers wait for it (the job's state is with the shards)."""
        self._check_exit(child)
        options = self._cluster_options
        self._coordinator_due_s = time.monotonic() + backoff_s(options.restart_backoff_s, self._coordinator_exits)
        self._view.say(f"the coordinator ended: {child.reason}; it is started again")

    def _start_coordinator_again(self, first: list[str]) -> None:
        if self._coordinator_due_s is not None and time.monotonic() >= self._coordinator_due_s:
            self._coordinator_due_s = None
            self._cluster.start("coordinator", "coordinator", [*self._arguments, *first])

    def _check_exit(self, child: Ended) -> None:
        """Give up where to start the coordinator again would not help."""
        if child.exit_code == ExitCode.CONFIGURATION:
            self.failure_code = ExitCode.CONFIGURATION
            raise ConfigurationError(child.reason.removesuffix(" (exit code 2)"))
        self._coordinator_exits += 1
        if self._coordinator_exits > self._cluster_options.max_restarts:
            raise JobFailed(f"the coordinator ended {self._coordinator_exits} times in a row: {child.reason}")

    def _check_silence(self) -> None:
        """Kill a coordinator that serves and does not answer; one that is starting has more time."""
        silent_s = time.monotonic() - self._heard_s
        serves = _coordinator_in(self._run_dir).get("pid") == self._coordinator_pid()
        if silent_s > (self._cluster_options.silence_s if serves else START_DEADLINE_S):
            self._view.say(f"the coordinator has not answered for {silent_s:.0f} s; it is killed")
            self._cluster.kill("coordinator")
            self._heard_s = time.monotonic()

    def _coordinator_pid(self) -> int:
        return self._cluster.pid("coordinator") if "coordinator" in self._cluster.running else -1

    def tell_stop(self, reason: str) -> None:
        """Let the coordinator write its report before it is ended, if it still answers."""
        if self._client is None:
            return
        try:
            self._client.supervise(pb.SuperviseRequest(run_id=self._run_id, stop_reason=reason), deadline_s=2.0)
            self._wait_for_report(pb.JOB_STATE_FAILED)
        except ParashardError:
            return

    def _supervise(self, ended: list[Ended]) -> pb.SuperviseReply:
        assert self._client is not None
        exits = [
            pb.ProcessExit(process=_process(e.name), exit_code=e.exit_code, reason=e.reason, number=e.number)
            for e in ended
        ]
        running = [_process(name) for name in self._cluster.running if name != "coordinator"]
        return self._client.supervise(
            pb.SuperviseRequest(run_id=self._run_id, exits=exits, running=running), deadline_s=5.0
        )

    def _obey(self, orders: pb.SuperviseReply) -> None:
        for process in orders.start:
            name = f"{process.role}-{process.index}"
            common = ["--connect", str(self._run_dir), *self._listen()]
            if process.role == "shard":
                self._cluster.start(name, "ps_server", [*common, "--index", str(process.index)])
            else:
                self._cluster.start(name, "worker", [*common, "--name", name])
        for process in orders.stop:
            name = f"{process.role}-{process.index}"
            if (name, self._cluster.pid(name)) not in self._asked_to_end:  # once: a second signal would kill it
                self._asked_to_end.add((name, self._cluster.pid(name)))
                self._cluster.ask_to_end(name)
        for process in orders.kill:
            self._cluster.kill(f"{process.role}-{process.index}")

    def _listen(self) -> list[str]:
        insecure = ["--insecure"] if self._cluster_options.insecure else []
        tls = ["--tls-dir", str(self._credentials.folder.absolute())] if self._credentials else []
        return ["--host", self._cluster_options.host, *insecure, *tls]

    def _show(self) -> None:
        assert self._client is not None
        try:
            status = self._client.get_status()
        except RetryLater:
            return  # the next look comes soon; `until_over` counts how long nobody answers
        self._view.show(status)
        if status.steps_complete > self._steps_complete:
            self._coordinator_exits = 0  # it makes progress, however often it is killed
        self._steps_complete = status.steps_complete

    def _wait_for_report(self, state: pb.JobState) -> None:
        """A failed job's report is written just after its end; a done job's just before."""
        deadline_s = time.monotonic() + 5.0
        while not (self._run_dir / REPORT_FILE).exists() and time.monotonic() < deadline_s:
            time.sleep(SUPERVISE_S)
        if state == pb.JOB_STATE_DONE:
            self._show()


def _all_roles(tls_dir: Path) -> Credentials:
    """Return the credentials of a whole local cluster: its processes are one user's, and share a certificate."""
    credentials = Credentials(tls_dir)
    missing = set(Role) - {identity.role for identity in credentials.identities}
    if missing:
        raise ConfigurationError(
            f"--tls-dir {tls_dir}: the certificate's roles are {in_words(credentials.identities)}; a local cluster "
            f"also needs {', '.join(sorted(missing))}"
        )
    return credentials


def _check_output(output: Path) -> None:
    """Refuse a place that cannot be written before the training, not after it."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise ConfigurationError(f"--output {output}: this is a folder; allowed: a file")
        with output.open("ab"):
            pass
    except OSError as error:
        raise ConfigurationError(f"--output {output}: cannot be written: {error.strerror}") from None


def _job_name_in(run_dir: Path) -> str:
    """Return the name of the job in a run directory; "" if its file is not one that this version can read."""
    try:
        return load_job(run_dir / JOB_FILE, environ={}).job.job.name
    except ConfigurationError:
        return ""


def _coordinator_in(run_dir: Path) -> dict[str, Any]:
    """Return what the coordinator wrote about itself in a run directory; empty if it has not yet."""
    try:
        where: dict[str, Any] = json.loads((run_dir / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return where


def _locked(run_dir: Path) -> int:
    """Return the descriptor of a run directory's lock, held until it is closed: one launcher at a time.

    Raises
    ------
    ConfigurationError
        If another one has it.
    """
    descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigurationError(f"run directory {run_dir}: another `parashard run` works in it") from None
    return descriptor


def _process(name: str) -> pb.ProcessName:
    role, _, index = name.rpartition("-")
    return pb.ProcessName(role=role, index=int(index))


def read_report(run_dir: Path) -> dict[str, Any]:
    """Return the report in a run directory, or an empty one if it has none yet."""
    try:
        report: dict[str, Any] = json.loads((run_dir / REPORT_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return report


def newest_run() -> Path:
    """Return the newest run directory under `runs/`.

    Raises
    ------
    ConfigurationError
        If there is none.
    """
    runs = [path.parent for path in RUNS.glob(f"*/{ADDRESS_FILE}")]
    if not runs:
        raise ConfigurationError("no run directory under runs/; say which coordinator: host:port or a run directory")
    return max(runs, key=lambda run: os.path.getmtime(run / ADDRESS_FILE))
