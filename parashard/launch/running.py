"""Start and stop processes as the coordinator orders; restart, kill or give up the coordinator itself."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import intervals_from
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed, NotReady, ParashardError, RetryLater
from parashard.launch.local_cluster import MODULES, LocalCluster
from parashard.launch.run_control import CallbackFailed, RunControl, RunFollower
from parashard.launch.run_watch import IMPORT_S, AwaitedWorkers, CoordinatorSilence, RefusedHandshakes
from parashard.launch.runs import Run
from parashard.launch.starting import Ended, Starter
from parashard.process.addresses import is_loopback, own_host
from parashard.process.backoff import BACKOFF_MAX_S, backoff_s
from parashard.process.durable import rename_durably
from parashard.process.run_files import JOB_FILE, LOGS, NEW_JOB_FILE, REPORT_FILE
from parashard.process.shell import AwakeClock, ExitCode
from parashard.process.starts import CoordinatorStart, ShardStart, WorkerStart
from parashard.protocol.coordinator_client import CoordinatorClient, coordinator_in
from parashard.protocol.rpc import CONTROL_DEADLINE_S

SUPERVISE_S = 0.05
SHOW_S = 0.25
SUPERVISE_DEADLINE_S = 5.0
STALL_S = CONTROL_DEADLINE_S + 2.0  # longer than any call here: this process was paused


class Running:
    """One run in progress."""

    def __init__(
        self,
        run: Run,
        cluster: LocalCluster,
        view: JobView,
        follower: RunFollower | None = None,
        control: RunControl | None = None,
        starter: Starter | None = None,
    ) -> None:
        """`cluster` runs the coordinator; `starter` runs shards and workers (None: `cluster` does)."""
        self._follower = follower
        self._control = control
        self._stop_reason = ""
        self.raised: BaseException | None = None
        """A callback's exception: the run is saved and ended."""
        self._run = run
        self._cluster_options = run.job.cluster
        self._run_dir = run.folder
        self._cluster = cluster
        self._starter: Starter = cluster if starter is None else starter
        self._view = view
        self._client: CoordinatorClient | None = None
        self._run_id = self._connect = ""
        self._start = self._first_start()
        self._coordinator_exits = 0  # in a row, without a completed step in between
        self._coordinator_due_s: float | None = None  # when to restart it
        self._clock = AwakeClock(STALL_S, time.monotonic)  # of the coordinator's silence, without own pauses
        self._silence = CoordinatorSilence(self._cluster_options.silence_s, self._cluster_options.start_s)
        self._awaited: AwaitedWorkers | None = None
        self._refused = RefusedHandshakes(run.folder / LOGS / "coordinator.log") if run.credentials else None
        self._asked_to_end: set[str] = set()
        self.status = pb.GetStatusReply()
        """As last reported by the coordinator."""
        self.failure_code = ExitCode.FAILED
        self.accepted = False
        """The coordinator has accepted the job: until then an earlier run's files are unchanged."""

    def start_coordinator(self) -> None:
        """Start the coordinator and wait until it serves."""
        self._start_coordinator()
        while (where := coordinator_in(self._run_dir)).get("pid") != self._coordinator_pid():
            for child in self._cluster.reap():
                self._coordinator_ended(child)
                if child.exit_code > 0 and child.exit_code != ExitCode.RETRY:  # a retry would fail, too
                    raise JobFailed(f"the coordinator ended: {child.reason}")
            self._start_coordinator_again()
            if self._check_silence():  # a retry would hang, too
                raise JobFailed(
                    f"cluster.start_s is {self._cluster_options.start_s:.0f} s, in which it did not come up"
                )
            self._pause()
        self.accepted = True
        (self._run_dir / REPORT_FILE).unlink(missing_ok=True)  # of an earlier start of this run
        rename_durably(self._run_dir / NEW_JOB_FILE, self._run_dir / JOB_FILE)
        self._run_id, address = str(where["run_id"]), str(where["address"])
        self._connect = address if self._starter.launcher_address else str(self._run_dir)
        self._start = replace(
            self._start,
            job=self._start.run_dir / JOB_FILE,
            # Processes of other machines keep the address.
            port=int(address.rpartition(":")[2]) if self._starter.launcher_address else self._start.port,
            run_id=self._run_id,
            again=True,
            resume=False,
            from_checkpoint="",
        )
        self._client = CoordinatorClient(address, where=str(self._run_dir), credentials=self._run.credentials)
        if self._control is not None:
            self._control.tell(accepted=True)
        if not self._cluster_options.workers:
            command = self._how_to_join(address)
            self._awaited = AwaitedWorkers(f"the job waits until one joins: {command}")
        elif self._run.script is not None:
            shown = self._run.script.shown
            self._awaited = AwaitedWorkers(f"each runs {shown} up to its call of fit, from the beginning", IMPORT_S)
        self._say_awaited(live=0)

    def _first_start(self) -> CoordinatorStart:
        """Return the coordinator's flags until it has accepted the job."""
        run, folder = self._run, self._run_dir.absolute()
        port, http_port = self._cluster_options.ports_of_coordinator()
        start = CoordinatorStart(
            **self._common(),
            job=folder / NEW_JOB_FILE,
            run_dir=folder,
            port=port,
            http_port=http_port,
            model_folder=run.loaded.path.parent,
            declaration=None if run.declared is None else folder,
            init=None if run.init is None else run.init.absolute(),
            open=self._control is not None and self._control.open_length,
            resume=run.resume,
            run_id="" if run.resume else os.urandom(8).hex(),
            from_checkpoint=run.from_checkpoint,
        )
        if self._follower is None:
            return start
        return replace(
            start,
            callbacks="decide" if self._follower.callbacks.decides else "follow",
            callbacks_ahead=self._follower.callbacks.ahead,
            store_evaluated=self._follower.callbacks.uses_weights,
        )

    def until_over(self) -> tuple[pb.JobState, str]:
        """Supervise the processes for the coordinator until the job is over; return its last state and reason."""
        ended: list[Ended] = []
        next_show_s = 0.0
        self._silence.heard(self._clock.now_s())
        while True:
            ended += self._reaped()
            self._start_coordinator_again()
            try:
                orders = self._supervise(ended)
            except RetryLater as error:
                if isinstance(error, NotReady):  # it answers: our certificate has expired
                    self._silence.heard(self._clock.now_s())
                self._check_silence()
                self._pause()
                continue
            self._silence.heard(self._clock.now_s())
            misconfigured = orders.exit_code == ExitCode.CONFIGURATION
            misconfigured |= any(child.exit_code == ExitCode.CONFIGURATION for child in ended)
            if orders.state == pb.JOB_STATE_FAILED and misconfigured:
                self.failure_code = ExitCode.CONFIGURATION
            ended = []
            if time.monotonic() >= next_show_s:
                next_show_s = time.monotonic() + SHOW_S
                self._show()
            if orders.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED):
                self._wait_for_report(orders.state)
                return orders.state, orders.reason
            self._obey(orders)
            self._tell_follower()
            self._pause()

    def _reaped(self) -> list[Ended]:
        """Return the shards and workers that have ended; handle the coordinator's end."""
        found = self._cluster.reap()
        if self._starter is not self._cluster:
            found += self._starter.reap()
        for child in found:
            self._asked_to_end.discard(child.name)
            if child.name == "coordinator":
                self._coordinator_ended(child)
        return [child for child in found if child.name != "coordinator"]

    def _pause(self) -> None:
        if self._control is None:
            time.sleep(SUPERVISE_S)
        else:
            self._control.pause(SUPERVISE_S)

    def _tell_follower(self) -> None:
        """Let the follower ask for news; while the coordinator does not answer, try again later."""
        if self._follower is None or self._client is None:
            return
        client = self._client

        def follow(request: pb.FollowRequest) -> pb.FollowReply:
            request.run_id = self._run_id
            return client.follow(request)

        try:
            self._follower.look(follow)
        except RetryLater:
            pass
        except CallbackFailed as error:
            self.raised, self._follower = error.error, None
            self._stop_reason = str(error)
            self._view.say(f"stopping: {error}; shards save their state")

    def _coordinator_ended(self, child: Ended) -> None:
        """Schedule a restart of the coordinator: the others wait for it, and shards hold the job's state."""
        self._check_exit(child)
        io_error, first_s = child.exit_code == ExitCode.IO_ERROR, self._cluster_options.restart_backoff_s
        pause_s = BACKOFF_MAX_S if io_error else backoff_s(first_s, self._coordinator_exits)
        self._coordinator_due_s = time.monotonic() + pause_s
        self._view.say(f"the coordinator ended: {child.reason}; it is restarted")

    def _start_coordinator_again(self) -> None:
        if self._coordinator_due_s is not None and time.monotonic() >= self._coordinator_due_s:
            self._coordinator_due_s = None
            self._start_coordinator()

    def _start_coordinator(self) -> None:
        self._cluster.start("coordinator", MODULES["coordinator"], self._start.words())
        self._silence.started(self._clock.now_s())

    def _check_exit(self, child: Ended) -> None:
        """Raise if restarting the coordinator would not help."""
        # Once it has accepted the job, a failure to start may be transient, such as an expired certificate.
        misconfigured = child.exit_code == ExitCode.CONFIGURATION
        self._coordinator_exits += child.exit_code != ExitCode.IO_ERROR  # a failing disk is waited for
        too_often = self._coordinator_exits > self._cluster_options.max_restarts
        if misconfigured and (too_often or not self.accepted):
            self.failure_code = ExitCode.CONFIGURATION
            raise ConfigurationError(child.reason.removesuffix(" (exit code 2)"))
        if too_often:
            raise JobFailed(f"the coordinator ended {self._coordinator_exits} times in a row: {child.reason}")

    def _check_silence(self) -> bool:
        """Kill a coordinator that does not answer or start in time; report the wait; return whether it was killed."""
        pid = self._coordinator_pid()
        if pid < 0:
            return False
        serves = coordinator_in(self._run_dir).get("pid") == pid
        said, killed = self._silence.look(self._clock.now_s(), serves=serves)
        if said:
            self._view.say(said)
        if killed:
            self._cluster.kill("coordinator")
        return killed

    def _coordinator_pid(self) -> int:
        return self._cluster.pid("coordinator") if "coordinator" in self._cluster.running else -1

    def tell_stop(self, reason: str) -> None:
        """Let the coordinator write its report before it is ended, if it answers."""
        if self._client is None:
            return
        try:
            self._show()
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
        running = [_process(name) for name in self._starter.running if name != "coordinator"]
        request = pb.SuperviseRequest(run_id=self._run_id, exits=exits, running=running, stop_reason=self._stop_reason)
        if self._control is not None and self._control.open_length:
            request.closed = self._control.closed  # first: once it is closed, nothing more is scheduled
            request.scheduled = self._control.scheduled
        orders = self._client.supervise(request, deadline_s=SUPERVISE_DEADLINE_S)
        if self._control is not None:
            self._control.report(intervals_from(orders.complete))
        return orders

    def _obey(self, orders: pb.SuperviseReply) -> None:
        for process in orders.start:
            name = f"{process.role}-{process.index}"
            common = {**self._common(), "connect": self._connect, "http_port": self._cluster_options.any_port}
            if process.role == "shard":
                port, data_port = self._cluster_options.ports_of_shard(process.index)
                shard = ShardStart(**common, index=process.index, port=port, data_port=data_port)
                self._starter.start(name, MODULES["shard"], shard.words())
            else:
                self._starter.start(name, MODULES["worker"], WorkerStart(**common, name=name).words())
        for process in orders.stop:
            self._ask_to_end(f"{process.role}-{process.index}")
        for process in orders.kill:
            self._starter.kill(f"{process.role}-{process.index}")
        for name, deadline_s in self._starter.coming_ends().items():
            self._ask_to_end(name)  # it saves, gives back its leases, and is started again elsewhere
            if time.monotonic() >= deadline_s:
                self._starter.kill(name)

    def _ask_to_end(self, name: str) -> None:
        """Ask a process to end, once: a second signal would kill it."""
        if name not in self._asked_to_end:
            self._asked_to_end.add(name)
            self._starter.ask_to_end(name)

    def _common(self) -> dict[str, Any]:
        """Return the flags that all processes share."""
        options, credentials = self._cluster_options, self._run.credentials
        tls_dir = credentials.folder.absolute() if credentials else None
        trace = "1" if self._run.trace else ""
        host = self._starter.launcher_address or options.listens_on
        return {"host": host, "insecure": options.insecure, "tls_dir": tls_dir, "trace": trace}

    def _how_to_join(self, address: str) -> str:
        """Return the command that joins from another machine, or on loopback only from this one."""
        place = str(self._run_dir) if is_loopback(own_host(self._common()["host"])) else address
        tls = " --tls-dir DIR" if self._run.credentials else ""
        script = f" {self._run.script.shown}" if self._run.script else ""
        return f"parashard worker --connect {place}{tls}{script}"

    def _say_awaited(self, live: int) -> None:
        said = self._awaited.look(self._clock.now_s(), live) if self._awaited is not None else ""
        if said:
            self._view.say(said)

    def _show(self) -> None:
        assert self._client is not None
        try:
            status = self._client.get_status()
        except RetryLater:
            return  # the next call comes soon; `until_over` measures the silence
        self._view.show(status)
        self._say_awaited(sum(worker.live for worker in status.workers))
        if self._refused is not None and (refused := self._refused.look()):
            self._view.say(refused)
        if status.steps_complete > self.status.steps_complete:
            self._coordinator_exits = 0  # it makes progress
        self.status = status

    def _wait_for_report(self, state: pb.JobState) -> None:
        """Wait for the report: a failed job's is written just after its end, a done job's just before."""
        deadline_s = time.monotonic() + 5.0
        while not (self._run_dir / REPORT_FILE).exists() and time.monotonic() < deadline_s:
            time.sleep(SUPERVISE_S)
        if state == pb.JOB_STATE_DONE:
            self._show()


def _process(name: str) -> pb.ProcessName:
    role, _, index = name.rpartition("-")
    return pb.ProcessName(role=role, index=int(index))
