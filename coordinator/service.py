"""The coordinator's gRPC service: decode, delegate to the core under one lock, encode. No decision of its own.

A worker that gets nothing may wait here until something changes, for a bounded time and only so many at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from coordinator.calls import CompletedStep, EvaluationResult, JobState, LeaseAnswer, LeaseCall
from coordinator.core import Core
from coordinator.draining import Answer
from coordinator.launchers import Exit, ProcessName
from coordinator.membership import PHASES
from coordinator.peer_texts import (
    DEVICE_BYTES_MAX,
    FINGERPRINT_BYTES_MAX,
    REASON_BYTES_MAX,
    checked_address,
    checked_name,
    checked_text,
    fault_of_metrics,
    readable,
)
from coordinator.shard_says import announcement, check_count
from coordinator.status import StatusView
from parashard import failpoints
from parashard.rpc import SERVER_THREADS, Server
from protos import coordinator_pb2 as pb
from protos import coordinator_pb2_grpc

REQUEST_BYTES_MAX = 1 << 20  # holds the most intervals below, of steps up to 2^35
REPORTS_MAX = 4096  # of one kind in a worker's call: four times the largest `cluster.lease_batch`
WAITERS_MAX = SERVER_THREADS // 2
WAIT_MAX_S = 10.0
CROWDED_RETRY_AFTER_S = 0.5  # where as many as may are waiting already

_Result = TypeVar("_Result")

log = structlog.get_logger("coordinator")


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves one job.

    Parameters
    ----------
    core : Core
        The pure core; touched only under `changed`.
    job : GetJobReply
        What every process of the job is told.
    status : StatusView
        Renders the core for people.
    clock : callable
        Monotonic seconds.
    on_decision : callable
        Stores the core's decisions before anybody hears of them (P7).
    """

    def __init__(
        self,
        core: Core,
        job: pb.GetJobReply,
        status: StatusView,
        clock: Callable[[], float] = time.monotonic,
        on_decision: Callable[[Core], None] = lambda core: None,
    ) -> None:
        self.changed = threading.Condition()
        self._core = core
        self._job = job
        self._status = status
        self._clock = clock
        self._on_decision = on_decision
        self._waiters = 0

    def add_to(self, server: Server) -> None:
        """Register every method with a server."""
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server.grpc)  # type: ignore[no-untyped-call]

    def run(self, call: Callable[[Core, float], _Result]) -> _Result:
        """Run a call on the core alone, then store and log what it decided and wake who waits."""
        with self.changed:
            decisions = self._core.decisions
            try:
                return call(self._core, self._clock())
            finally:
                if self._core.decisions != decisions:
                    self._on_decision(self._core)
                self._announce()

    # --- everybody ---

    def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobReply:
        """Give everything that defines the job."""
        return self._job

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusReply:
        """Tell how the job goes."""
        with self.changed:
            if request.run_id:
                self._core.check_run(request.run_id)
            return self._status.message(self._core, self._clock())

    # --- shards ---

    def RegisterShard(self, request: pb.RegisterShardRequest, context: Any) -> pb.RegisterShardReply:
        """Take in a shard, or what a known one says of itself."""
        says = announcement(request)

        def register(core: Core, now_s: float) -> pb.RegisterShardReply:
            core.check_run(request.run_id, request.job_digest)
            core.announced(request.shard, says, now_s)
            return pb.RegisterShardReply(
                coordinator_incarnation=core.options.incarnation,
                cut_round=core.rounds.common_cut(),
                state=core.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
            )

        reply = self.run(register)
        failpoints.hit("coordinator.register_shard")
        return reply

    # --- workers ---

    def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> pb.RegisterWorkerReply:
        """Take in a worker."""
        name, http_address = checked_name(request.name), checked_address(request.http_address, "http_address")
        fingerprint = checked_text(request.fingerprint, "fingerprint", FINGERPRINT_BYTES_MAX)
        device = readable(request.device, DEVICE_BYTES_MAX)

        def register(core: Core, now_s: float) -> pb.RegisterWorkerReply:
            core.check_run(request.run_id, request.job_digest)
            worker = core.register_worker(name, fingerprint, device, http_address, now_s, request.token)
            return pb.RegisterWorkerReply(
                name=worker.name, incarnation=worker.incarnation, lease_ttl_s=core.options.lease_ttl_s
            )

        return self.run(register)

    def GetView(self, request: pb.GetViewRequest, context: Any) -> pb.GetViewReply:
        """Give the shards' addresses."""
        with self.changed:
            self._core.check_run(request.run_id)
            shards = [
                pb.ShardAddress(
                    address=life.address,
                    incarnation=life.incarnation,
                    data_address=life.data_address,
                    local_path=life.local_path,
                )
                for life in self._core.shards.lives()
            ]
            return pb.GetViewReply(view=self._core.shards.view, shards=shards)

    def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseReply:
        """Take a report, renew, and grant; hold the call for a while if there is nothing to grant."""
        call = lease_call(request)

        def first(core: Core, now_s: float) -> LeaseAnswer:
            core.check_run(request.run_id)
            return core.lease(call, now_s)

        answer = self.run(first)
        if request.want and request.wait_s > 0 and _nothing(answer):
            answer = self._wait_for_work(request, answer)
        failpoints.hit("coordinator.lease.decided")
        return lease_reply(answer)

    def _wait_for_work(self, request: pb.LeaseRequest, answer: LeaseAnswer) -> LeaseAnswer:
        with self.changed:
            if self._waiters >= WAITERS_MAX:
                return replace(answer, retry_after_s=CROWDED_RETRY_AFTER_S)
            self._waiters += 1
            deadline_s = self._clock() + min(request.wait_s, WAIT_MAX_S)
            try:
                while True:  # asks before it waits: something may have changed since the first answer
                    if not self._core.workers.waits(request.worker, request.incarnation, request.sequence):
                        break
                    worker = self._core.workers.by_name[request.worker]
                    answer = self._core.grant(worker, request.want, self._clock(), answer.revoked)
                    left_s = deadline_s - self._clock()
                    if left_s <= 0 or not _nothing(answer):
                        break
                    self.changed.wait(left_s)
            finally:
                self._waiters -= 1
            return answer

    # --- people and the launcher ---

    def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleReply:
        """Set the wanted number of workers."""

        def scale(core: Core, now_s: float) -> None:
            if request.run_id:
                core.check_run(request.run_id)
            core.scale(request.workers)

        self.run(scale)
        return pb.ScaleReply(workers_wanted=request.workers)

    def Supervise(self, request: pb.SuperviseRequest, context: Any) -> pb.SuperviseReply:
        """Take note of processes that ended; say what to start and stop."""
        exits = [
            Exit(_process(e.process), e.exit_code, readable(e.reason, REASON_BYTES_MAX), e.number)
            for e in request.exits
        ]
        running = [_process(p) for p in request.running]

        def supervise(core: Core, now_s: float) -> pb.SuperviseReply:
            core.check_run(request.run_id)
            if request.stop_reason:
                core.stop(request.stop_reason)
            orders = core.supervise(exits, running, now_s)
            return pb.SuperviseReply(
                start=_processes(orders.start),
                stop=_processes(orders.stop),
                kill=_processes(orders.kill),
                state=core.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
                reason=core.reason,
            )

        return self.run(supervise)

    def CreateCheckpoint(self, request: pb.CreateCheckpointRequest, context: Any) -> pb.CreateCheckpointReply:
        """Take a request for a drained checkpoint, or say how far it is."""

        def ask(core: Core, now_s: float) -> Answer:
            if request.run_id:
                core.check_run(request.run_id)
            return core.create_checkpoint(request.request)

        answer = self.run(ask)
        return pb.CreateCheckpointReply(checkpoint=answer.checkpoint, error=answer.error, steps=answer.steps)

    def _announce(self) -> None:
        for event in self._core.new_events:
            log.info(event)
        self._core.new_events.clear()
        self.changed.notify_all()


def lease_call(request: pb.LeaseRequest) -> LeaseCall:
    """Return a worker's call as the core takes it."""
    for what in ("held", "completed", "failed", "evaluated", "held_evaluations"):
        check_count(what, getattr(request, what), REPORTS_MAX)
    return LeaseCall(
        worker=request.worker,
        incarnation=request.incarnation,
        sequence=request.sequence,
        held=list(request.held),
        held_evaluations=list(request.held_evaluations),
        completed=[
            CompletedStep(c.step, list(c.incarnations), c.loss, c.examples, c.skipped) for c in request.completed
        ],
        failed=[(f.step, readable(f.reason, REASON_BYTES_MAX)) for f in request.failed],
        evaluated=[_evaluated(e) for e in request.evaluated],
        want=request.want,
        leaving=request.leaving,
        phases_s={phase: getattr(request.phases, phase) for phase in PHASES},
    )


def _evaluated(result: pb.EvaluationResult) -> EvaluationResult:
    """Return an evaluation's result; metrics that nobody could show make it one that failed."""
    fault = fault_of_metrics(result.metrics)
    metrics = {} if fault else dict(result.metrics)
    error = readable(result.error or fault, REASON_BYTES_MAX)
    return EvaluationResult(result.evaluation, list(result.incarnations), metrics, error)


def lease_reply(answer: LeaseAnswer) -> pb.LeaseReply:
    """Return the core's answer as its message."""
    return pb.LeaseReply(
        granted=[pb.Grant(step=grant.step, skip=grant.skip) for grant in answer.granted],
        evaluations=[
            pb.EvaluationGrant(
                evaluation=e.after_step,
                for_round=e.round is not None,
                round=e.round or 0,
                incarnations=e.incarnations,
            )
            for e in answer.evaluations
        ],
        revoked=answer.revoked,
        state=answer.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
        view=answer.view,
        retry_after_s=answer.retry_after_s,
        reason=answer.reason,
    )


def _nothing(answer: LeaseAnswer) -> bool:
    over = answer.state in (JobState.DONE, JobState.FAILED)
    return not (answer.granted or answer.evaluations or answer.revoked or over)


def _process(name: pb.ProcessName) -> ProcessName:
    return ProcessName(name.role, name.index)


def _processes(names: Sequence[ProcessName]) -> list[pb.ProcessName]:
    return [pb.ProcessName(role=name.role, index=name.index) for name in names]
