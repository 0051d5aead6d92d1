"""A job that runs in this process's care while another thread watches its processes from outside, and may kill them.

Records when each process ended and was started again, queries coordinator and shards, and ends the job once the
watching is over. Called by the recovery benchmarks.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import grpc

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.display.live import JobView
from parashard.errors import JobFailed, RetryLater, StaleRequest
from parashard.job.layers import Override
from parashard.job.load import load_job
from parashard.launch.local_cluster import LocalCluster
from parashard.launch.run import run_job
from parashard.launch.run_folders import locked_run
from parashard.launch.runs import Run
from parashard.launch.starting import Ended
from parashard.protocol import rpc
from parashard.protocol.coordinator_client import CoordinatorClient, coordinator_in, run_id_in

POLL_S = 0.005
WAIT_S = 60.0
ASK_S = 2.0

_Value = TypeVar("_Value")


class WatchedCluster(LocalCluster):
    """A local cluster that notes, in monotonic seconds, when it started each process and learned of its end."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.started_s: dict[str, float] = {}
        self.reaped_s: dict[str, float] = {}

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start a child and note when."""
        self.started_s[name] = time.monotonic()
        super().start(name, module, arguments)

    def reap(self) -> list[Ended]:
        """Return the children that have ended since the last call, and note when."""
        ended = super().reap()
        self.reaped_s.update((child.name, time.monotonic()) for child in ended)
        return ended


class Watch:
    """The watching thread's view of a job, and its means to kill processes.

    Parameters
    ----------
    cluster : WatchedCluster
        The job's processes.
    run_dir : Path
        Where the coordinator writes its address, and processes their logs.
    over : Event
        Set once the job has ended.
    """

    def __init__(self, cluster: WatchedCluster, run_dir: Path, over: threading.Event) -> None:
        self.cluster = cluster
        self._run_dir = run_dir
        self._over = over
        self._coordinator: CoordinatorClient | None = None
        self._channels: dict[str, grpc.Channel] = {}
        self._last_view: pb.GetViewReply | None = None

    def status(self) -> pb.GetStatusReply | None:
        """Return the job's status; None without an answer."""
        coordinator = self._reach()
        return None if coordinator is None else _answered(coordinator.get_status)

    def view(self) -> pb.GetViewReply | None:
        """Return the view of the shards; None without an answer, or before every shard has registered."""
        coordinator = self._reach()
        view = None if coordinator is None else _answered(lambda: coordinator.get_view(run_id_in(str(self._run_dir))))
        self._last_view = view or self._last_view
        return view

    def last_view(self) -> pb.GetViewReply | None:
        """Return the view of the shards, or the last one known; None before the first one."""
        return self.view() or self._last_view

    def inspect(self, address: str) -> shard_pb2.InspectReply | None:
        """Return a shard's record; None without an answer."""
        if address not in self._channels:
            self._channels[address] = rpc.connect(address)
        stub = shard_pb2_grpc.ShardStub(self._channels[address])  # type: ignore[no-untyped-call]
        request = shard_pb2.InspectRequest(run_id=run_id_in(str(self._run_dir)))

        def ask() -> shard_pb2.InspectReply:
            with rpc.our_errors(address):
                record: shard_pb2.InspectReply = stub.Inspect(request, timeout=ASK_S)
                return record

        return _answered(ask)

    def eventually(self, look: Callable[[], _Value | None], what: str, wait_s: float = WAIT_S) -> _Value:
        """Poll every 5 ms until `look` returns something true, and return it.

        Raises
        ------
        JobFailed
            If the job ended meanwhile, or `look` returned nothing true within `wait_s`.
        """
        deadline_s = time.monotonic() + wait_s
        while not (seen := look()):
            if self._over.wait(POLL_S) or time.monotonic() > deadline_s:
                raise JobFailed(f"the job ended, or {wait_s:.0f} s have passed, and there was not: {what}")
        return seen

    def pause(self, seconds: float) -> None:
        """Let the job run for this time; raise JobFailed if it ends meanwhile."""
        if self._over.wait(seconds):
            raise JobFailed("the job ended before the measurement")

    def kill(self, name: str) -> float:
        """Send SIGKILL to a process that runs, and return when, in monotonic seconds."""
        self.eventually(lambda: name in self.cluster.running, f"{name} runs")
        self.cluster.kill(name)
        return time.monotonic()

    def told_s(self, name: str, event: str, since_s: float) -> float:
        """Return when a process's log first reported an event after `since_s`, both in monotonic seconds."""
        offset_s = time.time() - time.monotonic()

        def look() -> float | None:
            times = (logged_s(line, event) for line in self.cluster.log_path(name).read_text().splitlines())
            return next((t - offset_s for t in times if t is not None and t - offset_s > since_s), None)

        return self.eventually(look, f"{name} logs {event}")

    def _reach(self) -> CoordinatorClient | None:
        """Return a client once the first coordinator has written its address; the client follows later ones."""
        if self._coordinator is None:
            address = coordinator_in(self._run_dir).get("address")
            if address is not None:
                self._coordinator = CoordinatorClient(address, where=str(self._run_dir))
        return self._coordinator


def logged_s(line: str, event: str) -> float | None:
    """Return the Unix time of a log line that reports an event; None of any other line."""
    words = line.split(" ", 3)
    if len(words) < 3 or words[2] != f"event={event}":
        return None
    return datetime.fromisoformat(words[0].removeprefix("timestamp=")).timestamp()


def run_watched(
    job: Path, settings: Sequence[Override], scratch: Path | None, watch: Callable[[Watch], _Value]
) -> _Value:
    """Run a job, call `watch` in a thread beside it, end the job when it returns, and return what it returned.

    Parameters
    ----------
    job : Path
        The job file; long enough that it does not end by itself.
    settings : sequence of (dotted key, value, origin)
        Overrides of the job file.
    scratch : Path, optional
        Folder for the run's own, which is removed at the end; None: the system's.
    watch : callable
        Gets a `Watch`. What it raises is raised here, once no process is left.

    Raises
    ------
    JobFailed
        If the job does not start, or ends before `watch` does.
    """
    loaded = load_job(job, settings)
    seen: list[_Value] = []
    failures: list[Exception] = []
    over = threading.Event()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        run_dir = Path(folder) / "run"
        cluster = WatchedCluster(run_dir)

        def look() -> None:
            try:
                seen.append(watch(Watch(cluster, run_dir, over)))
            except Exception as error:  # noqa: BLE001  # raised again where the thread is joined
                failures.append(error)
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C would: `run_job` ends its processes and returns

        thread = threading.Thread(target=look, name="watch", daemon=True)
        thread.start()
        with locked_run(run_dir):
            outcome = run_job(Run(loaded, run_dir), JobView(), cluster=cluster)
        over.set()
        thread.join()
    if failures:
        failures[0].add_note(f"the run: {outcome.reason}")
        raise failures[0]
    return seen[0]


def _answered(ask: Callable[[], _Value]) -> _Value | None:
    try:
        return ask()
    except (RetryLater, StaleRequest):
        return None
