"""CoordinatorClient: the calls that shards, workers, the launcher and people make to the coordinator.

Every call has a deadline; a call without an answer, or with `RetryLater`, may be retried within a budget. A shard or a
worker may have a watchdog, which stops it in an orderly way once its coordinator has been unreachable for a while.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc
from parashard.errors import ConfigurationError, ParashardError, RetryLater, Unreachable
from parashard.process.addresses import split_address
from parashard.process.logs import log
from parashard.process.shell import AwakeClock, Stop
from parashard.process.starts import ConnectedStart
from parashard.protocol import rpc
from parashard.security.credentials import Credentials

ADDRESS_FILE = "coordinator.json"
POLL_S = 0.02
QUIET_S = 3.0  # of waiting before the user is told
WATCHDOG_LOOK_S = 1.0
STALL_S = 2.0  # a call and a pause exceed their bounds by this: the process was suspended

_Reply = TypeVar("_Reply")


class CoordinatorClient:
    """A channel to the coordinator.

    `where` is the run directory that the address is from, if any: a restarted coordinator has another address. `tell`
    is called once for each call that is retried for long, with the reason; the log has it in any case.
    """

    def __init__(
        self,
        address: str,
        *,
        retry_budget_s: float = 60.0,  # how long one call may be retried
        cancelled: threading.Event | None = None,  # once set, nothing is retried
        where: str = "",
        credentials: Credentials | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.address = address
        self._tell = tell
        self._credentials = credentials
        self._where = where
        self._moving = threading.Lock()
        self._channel = rpc.connect(address, self._credentials)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self.retry_budget_s = retry_budget_s
        self._cancelled = cancelled or threading.Event()
        self.unanswered = False
        """The last call got no answer."""

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def get_job(self) -> pb.GetJobReply:
        """Return everything that defines the job."""
        return self.retry(lambda: self._call("GetJob", pb.GetJobRequest(), pb.GetJobReply))

    def register_shard(self, request: pb.RegisterShardRequest) -> pb.RegisterShardReply:
        """Announce a shard that listens, without retries: the next announcement serves as one."""
        return self._call("RegisterShard", request, pb.RegisterShardReply)

    def register_worker(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerReply:
        """Join the job."""
        return self.retry(lambda: self._call("RegisterWorker", request, pb.RegisterWorkerReply))

    def get_view(self, run_id: str) -> pb.GetViewReply:
        """Return the shards' addresses, without retries; NotReady until every shard has registered."""
        return self._call("GetView", pb.GetViewRequest(run_id=run_id), pb.GetViewReply)

    def lease(self, request: pb.LeaseRequest, deadline_s: float = rpc.CONTROL_DEADLINE_S) -> pb.LeaseReply:
        """Report results, renew leases and request new ones, without retries: the caller numbers and retries calls."""
        # The answer may take `deadline_s` plus `request.wait_s`, for which the coordinator may wait.
        return self._call("Lease", request, pb.LeaseReply, deadline_s + request.wait_s)

    def get_status(self, run_id: str = "") -> pb.GetStatusReply:
        """Return the job's status, without retries; with a run id, only of that run."""
        return self._call("GetStatus", pb.GetStatusRequest(run_id=run_id), pb.GetStatusReply)

    def scale(self, workers: int, run_id: str = "") -> pb.ScaleReply:
        """Set the wanted number of workers, without retries; with a run id, only of that run."""
        return self._call("Scale", pb.ScaleRequest(workers=workers, run_id=run_id), pb.ScaleReply)

    def supervise(self, request: pb.SuperviseRequest, deadline_s: float) -> pb.SuperviseReply:
        """Report processes that ended, and get those to start, without retries."""
        return self._call("Supervise", request, pb.SuperviseReply, deadline_s)

    def create_checkpoint(self, request: pb.CreateCheckpointRequest) -> pb.CreateCheckpointReply:
        """Request a drained checkpoint, or its progress, without retries."""
        return self._call("CreateCheckpoint", request, pb.CreateCheckpointReply)

    def follow(self, request: pb.FollowRequest) -> pb.FollowReply:
        """Report the events that callbacks have handled and their decisions, and get the next ones, without retries."""
        return self._call("Follow", request, pb.FollowReply)

    def _call(
        self, name: str, request: object, reply: type[_Reply], deadline_s: float = rpc.CONTROL_DEADLINE_S
    ) -> _Reply:
        try:
            with rpc.our_errors(self.address):
                answer = getattr(self._stub, name)(request, timeout=deadline_s)
        except Unreachable:
            self.unanswered = True
            self.reconnect_if_moved()
            raise
        except ParashardError:
            self.unanswered = False
            raise
        self.unanswered = False
        assert isinstance(answer, reply)
        return answer

    def reconnect_if_moved(self) -> bool:
        """Reconnect if the run directory names another address of the coordinator; return whether it does."""
        address = coordinator_in(Path(self._where)).get("address") if self._where else None
        with self._moving:
            if address is None or address == self.address:
                return False
            self.address = address  # calls in progress keep the old channel, which ends with the last of them
            self._channel = rpc.connect(address, self._credentials)
            self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
            return True

    def retry(self, call: Callable[[], _Reply]) -> _Reply:
        """Repeat a call while it raises `RetryLater`, within the budget; raise other errors at once."""
        try:
            return call()
        except RetryLater:
            if not self.retry_budget_s or self._cancelled.is_set():
                raise
        awake = AwakeClock(rpc.CONTROL_DEADLINE_S + STALL_S, time.monotonic)
        since_s = awake.now_s()
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(RetryLater),
            wait=tenacity.wait_random_exponential(0.02, 0.5),
            stop=lambda _: self._cancelled.is_set() or awake.now_s() - since_s >= self.retry_budget_s,
            sleep=tenacity.sleep_using_event(self._cancelled),
            before_sleep=partial(self._note, told=[]),
            reraise=True,
        )
        return retrying(call)

    def _note(self, attempt: tenacity.RetryCallState, told: list[str]) -> None:
        """Log the wait; after `QUIET_S` also tell the user, once for each call: silence looks like a hang."""
        assert attempt.outcome is not None
        why = str(attempt.outcome.exception())
        ends = math.isfinite(self.retry_budget_s)
        if attempt.attempt_number == 1 and ends:
            log.info("waiting", why=why, at_most_s=self.retry_budget_s)
        elif attempt.attempt_number == 1:
            log.info("waiting-without-end", why=why)
        waited_s = attempt.seconds_since_start or 0.0
        if self._tell is not None and waited_s >= QUIET_S and not told:
            told.append(why)
            until = datetime.now() + timedelta(seconds=self.retry_budget_s - waited_s) if ends else None
            self._tell(f"{why}; asking again" + (f" until {until:%H:%M:%S}" if until else ""))


def coordinator_in(folder: Path) -> dict[str, Any]:
    """Return the content of a run directory's address file of the coordinator; empty if it cannot be read."""
    try:
        found = json.loads((folder / ADDRESS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def run_id_in(where: str) -> str:
    """Return the id of a run directory's run; "" for an address, whose run is not known."""
    return str(coordinator_in(Path(where)).get("run_id", ""))


def http_port_in(folder: Path, run_id: str) -> int:
    """Return the HTTP port of a run's last coordinator, from its run directory; 0 if it is not known."""
    where = coordinator_in(folder)
    if where.get("run_id") != run_id:
        return 0
    try:
        return split_address(str(where.get("http", "")))[1]
    except ConfigurationError:
        return 0


def find_coordinator(where: str, wait_s: float = 30.0, cancelled: threading.Event | None = None) -> str:
    """Return the address of a coordinator, given as host:port or as a run directory.

    A run directory without a coordinator is polled until `wait_s` have passed or `cancelled` is set.

    Raises ConfigurationError if `where` is neither; Unreachable if the run directory names no coordinator in time.
    """
    folder = Path(where)
    if not folder.is_dir():
        try:
            split_address(where)
        except ConfigurationError:
            raise ConfigurationError(
                f"{where!r} is neither a run directory nor host:port, as node-1:7000 or [::1]:7000; `parashard runs` "
                "lists the runs"
            ) from None
        return where
    cancelled = cancelled or threading.Event()
    path, deadline_s = folder / ADDRESS_FILE, time.monotonic() + wait_s
    while True:
        try:
            address = json.loads(path.read_text())["address"]
        except FileNotFoundError:
            if time.monotonic() >= deadline_s or cancelled.wait(POLL_S):
                when = f"within {wait_s:.0f} s" if wait_s else "yet"
                raise Unreachable(f"no coordinator has written {path} {when}") from None
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} is damaged: {error}") from None
        else:
            return str(address)


def client_of(start: ConnectedStart, stop: Stop, credentials: Credentials | None) -> CoordinatorClient:
    """Return a shard's or a worker's client of its coordinator; with `--give-up-s` start the watchdog."""
    client = CoordinatorClient(
        find_coordinator(start.connect, cancelled=stop.event),
        cancelled=stop.event,
        where=start.connect,
        credentials=credentials,
    )
    if start.give_up_s < math.inf:
        client.retry_budget_s = math.inf  # the watchdog ends the retries
        threading.Thread(target=give_up, args=(client, stop, start.give_up_s), name="giving-up", daemon=True).start()
    return client


def give_up(client: CoordinatorClient, stop: Stop, after_s: float) -> None:
    """Request a stop once calls have failed to reach the coordinator for `after_s`."""
    # For container engines that restart a failed process without end: it exits as if asked to stop. Counts checks, not
    # seconds of a clock: a suspended process has not been waiting, nor has one that made no call, such as a shard that
    # restores.
    away_s = 0.0
    while not stop.wait(WATCHDOG_LOOK_S):
        away_s = away_s + WATCHDOG_LOOK_S if client.unanswered else 0.0
        if away_s >= after_s:
            log.warning("giving-up", coordinator=client.address, away_s=away_s)
            stop.ask(f"the coordinator has been away for {away_s:.0f} s")
