"""The coordinator's gRPC service: decode, run a call on the core, encode. Makes no decisions.

A worker's lease call without a grant is held until something changes; time and number of held calls are bounded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import coordinator_pb2_grpc
from parashard.client.proto_conversion import interval_messages
from parashard.errors import MalformedFrame
from parashard.metrics import FIGURES, METRICS_MAX, VALUES_MAX
from parashard.process import failpoints
from parashard.protocol.rpc import Server
from parashard_coordinator.core.callback_progress import ReachedMilestone
from parashard_coordinator.core.calls import (
    CompletedStep,
    EvaluationResult,
    FailedStep,
    FailureKind,
    FollowAnswer,
    FollowCall,
    JobState,
    LeaseAnswer,
    LeaseCall,
)
from parashard_coordinator.core.controller import Drift
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.input_limits import (
    DEVICE_BYTES_MAX,
    FINGERPRINT_BYTES_MAX,
    REASON_BYTES_MAX,
    checked_address,
    checked_name,
    checked_text,
    fault_of_metrics,
    readable,
)
from parashard_coordinator.core.membership import PHASES, GpuMemory
from parashard_coordinator.core.results import follow
from parashard_coordinator.core.supervision import Exit, ProcessName
from parashard_coordinator.core.training_figures import MetricSums
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.shards import announcement, check_count

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

NAME_BYTES_MAX = 200  # of a file in the checkpoint store
REQUEST_BYTES_MAX = 3 << 19  # holds the most intervals below, of steps up to 2^35
REPORTS_MAX = 4096  # of one kind in a worker's call: four times the largest `cluster.lease_batch`
PHASE_S_MAX = 1e9  # larger reported times are ignored as invalid
WAITERS_MAX = 1024
"""Concurrently held lease calls: the coordinator's server has a thread and a connection for each."""
WAITER_BYTES_MAX = 1 << 16  # of a held call; a larger one is answered at once
WAIT_MAX_S = 10.0
CROWDED_RETRY_AFTER_S = 1.0  # when `WAITERS_MAX` calls are held already

_Result = TypeVar("_Result")


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves one job."""

    def __init__(
        self,
        core: ExclusiveCore,
        job: pb.GetJobReply,
        status: StatusView,
        tracer: Tracer | None = None,
    ) -> None:
        self._core = core
        self._job = job
        self._status = status
        self._tracer = tracer
        self._may_wait = threading.Semaphore(WAITERS_MAX)
        self._releasing_place: Callable[[], AbstractContextManager[None]] = nullcontext

    def add_to(self, server: Server) -> None:
        """Register every method with a server."""
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server.grpc)  # type: ignore[no-untyped-call]
        self._releasing_place = server.admission.releasing_place

    def _call(
        self,
        request: Any,
        call: Callable[[Core, float], _Result],
        job_digest: str | None = None,
        *,
        any_run: bool = False,
    ) -> _Result:
        """Run a call on the core after a check of its run and job; with `any_run` the request may name no run."""

        def checked(core: Core, now_s: float) -> _Result:
            if request.run_id or not any_run:
                core.job.check_run(request.run_id, job_digest)
            return call(core, now_s)

        return self._core.run_exclusive(checked)

    # --- any role ---

    def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobReply:
        """Return the definition of the job."""
        return self._job

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusReply:
        """Return the job's status."""
        return self._call(request, lambda core, now_s: self._status.message(core.job, now_s), any_run=True)

    # --- shards ---

    def RegisterShard(self, request: pb.RegisterShardRequest, context: Any) -> pb.RegisterShardReply:
        """Register a shard, or process the announcement of a known one."""
        says = announcement(request)

        def register(core: Core, now_s: float) -> pb.RegisterShardReply:
            core.announced(request.shard, says, now_s)
            return pb.RegisterShardReply(
                coordinator_incarnation=core.job.options.incarnation,
                cut_round=core.job.rounds.common_cut(),
                kept_rounds=core.job.rounds.kept_rounds(),
                state=core.job.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
            )

        reply = self._call(request, register, request.job_digest)
        failpoints.hit("coordinator.register_shard")
        return reply

    # --- workers ---

    def RegisterWorker(self, request: pb.RegisterWorkerRequest, context: Any) -> pb.RegisterWorkerReply:
        """Register a worker."""
        name, http_address = checked_name(request.name), checked_address(request.http_address, "http_address")
        fingerprint = checked_text(request.fingerprint, "fingerprint", FINGERPRINT_BYTES_MAX)
        device = readable(request.device, DEVICE_BYTES_MAX)

        def register(core: Core, now_s: float) -> pb.RegisterWorkerReply:
            worker = core.register_worker(name, fingerprint, device, http_address, now_s, request.token)
            return pb.RegisterWorkerReply(
                name=worker.name, incarnation=worker.incarnation, lease_ttl_s=core.job.options.lease_ttl_s
            )

        return self._call(request, register, request.job_digest)

    def GetView(self, request: pb.GetViewRequest, context: Any) -> pb.GetViewReply:
        """Return the shards' addresses."""

        def tell(core: Core, now_s: float) -> pb.GetViewReply:
            shards = [
                pb.ShardAddress(
                    address=registration.address,
                    incarnation=registration.incarnation,
                    data_address=registration.data_address,
                    local_path=registration.local_path,
                )
                for registration in core.job.shards.registrations()
            ]
            return pb.GetViewReply(view=core.job.shards.view, shards=shards)

        return self._call(request, tell)

    def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseReply:
        """Process a report, renew leases, and grant; hold the call for a bounded time if there is nothing to grant."""
        call = lease_call(request)
        answer = self._call(request, lambda core, now_s: core.lease(call, now_s))
        if request.want and request.wait_s > 0 and _waits(answer) and request.ByteSize() <= WAITER_BYTES_MAX:
            answer = self._wait_for_work(request, answer, context)
        failpoints.hit("coordinator.lease.decided")
        reply = lease_reply(answer)
        if self._tracer is not None:
            self._tracer.grants(request, reply)
        return reply

    def _wait_for_work(self, request: pb.LeaseRequest, answer: LeaseAnswer, context: Any) -> LeaseAnswer:
        def again(core: Core, now_s: float) -> LeaseAnswer | None:
            # Steps granted to a caller that has gone would wait until their lease ends.
            gone = context is not None and not context.is_active()
            if gone or not core.job.workers.is_latest_call(request.worker, request.incarnation, request.sequence):
                return None
            worker = core.job.workers.by_name[request.worker]
            return core.grant(worker, request.want, now_s, answer.revoked, steps_only=request.steps_only)

        if not self._may_wait.acquire(blocking=False):
            return answer._replace(retry_after_s=CROWDED_RETRY_AFTER_S)
        try:
            with self._releasing_place():
                later = self._core.run_until(
                    again, lambda found: found is None or not _waits(found), min(request.wait_s, WAIT_MAX_S)
                )
        finally:
            self._may_wait.release()
        return later or answer

    # --- people and the launcher ---

    def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleReply:
        """Set the wanted number of workers."""
        self._call(request, lambda core, _: core.scale(request.workers), any_run=True)
        return pb.ScaleReply(workers_wanted=request.workers)

    def Supervise(self, request: pb.SuperviseRequest, context: Any) -> pb.SuperviseReply:
        """Record processes that ended; return processes to start, stop and kill."""
        exits = [
            Exit(_process(e.process), e.exit_code, readable(e.reason, REASON_BYTES_MAX), e.number)
            for e in request.exits
        ]
        running = [_process(p) for p in request.running]

        def supervise(core: Core, now_s: float) -> pb.SuperviseReply:
            if request.stop_reason:
                core.job.stop(request.stop_reason)
            orders = core.supervise(exits, running, now_s)
            if request.HasField("scheduled"):
                core.job.open_steps(request.scheduled, closed=request.closed)
            return pb.SuperviseReply(
                start=_processes(orders.start),
                stop=_processes(orders.stop),
                kill=_processes(orders.kill),
                state=core.job.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
                reason=core.job.reason,
                exit_code=core.job.exit_code,
                complete=interval_messages(core.job.leases.complete) if request.HasField("scheduled") else (),
            )

        return self._call(request, supervise)

    def Follow(self, request: pb.FollowRequest, context: Any) -> pb.FollowReply:
        """Process the callbacks' progress and decisions; return the next events."""
        call = follow_call(request)
        return follow_reply(self._call(request, lambda core, _: follow(core.job, call)))

    def CreateCheckpoint(self, request: pb.CreateCheckpointRequest, context: Any) -> pb.CreateCheckpointReply:
        """Request a drained checkpoint, or return its progress."""
        answer = self._call(
            request, lambda core, _: core.create_checkpoint(request.request, stop=request.stop), any_run=True
        )
        return pb.CreateCheckpointReply(checkpoint=answer.checkpoint, error=answer.error, steps=answer.steps)


def lease_call(request: pb.LeaseRequest) -> LeaseCall:
    """Convert a LeaseRequest message into the core's LeaseCall."""
    for what in ("held", "completed", "failed", "evaluated", "held_evaluations", "computing", "warnings", "drifts"):
        check_count(what, getattr(request, what), REPORTS_MAX)
    return LeaseCall(
        worker=request.worker,
        incarnation=request.incarnation,
        sequence=request.sequence,
        held=list(request.held),
        held_evaluations=list(request.held_evaluations),
        completed=[completed_step(c) for c in request.completed],
        failed=[failed_step(failed) for failed in request.failed],
        evaluated=[evaluation_result(e) for e in request.evaluated],
        want=request.want,
        leaving=request.leaving,
        computing=list(request.computing),
        phases_s={phase: s for phase in PHASES if 0.0 <= (s := getattr(request.phases, phase)) <= PHASE_S_MAX},
        steps_only=request.steps_only,
        warnings=[readable(text, REASON_BYTES_MAX) for text in request.warnings],
        drifts=[
            Drift(found.step, found.drift, found.updates)
            for found in request.drifts
            if found.updates and math.isfinite(found.drift) and found.drift >= 0
        ],
        gpu_memory=gpu_memory(request.gpu_memory) if request.HasField("gpu_memory") else None,
    )


def gpu_memory(told: pb.GpuMemory) -> GpuMemory | None:
    """Convert a GpuMemory message; None if its numbers are impossible."""
    return GpuMemory(told.used_bytes, told.total_bytes) if told.used_bytes <= told.total_bytes else None


def completed_step(done: pb.CompletedStep) -> CompletedStep:
    """Convert a CompletedStep message into the core's."""
    return CompletedStep(
        done.step,
        list(done.incarnations),
        done.loss if done.HasField("loss") else None,
        done.examples,
        done.skipped,
        _metric_sums(done.metrics) if done.metrics else (),
    )


def _metric_sums(metrics: Sequence[pb.MetricSums]) -> list[MetricSums]:
    """Convert a step's metrics; return none if there are too many."""
    if len(metrics) > METRICS_MAX or sum(len(one.values) for one in metrics) > VALUES_MAX:
        return []
    return [
        MetricSums(checked_text(one.name, "metric", NAME_BYTES_MAX), one.kind, list(one.values))
        for one in metrics
        if one.kind in FIGURES or not one.kind
    ]


def failed_step(failed: pb.FailedStep) -> FailedStep:
    """Convert a FailedStep message; a kind that this version does not know becomes OTHER."""
    return FailedStep(failed.step, readable(failed.reason, REASON_BYTES_MAX), _kind(failed.kind))


def _kind(kind: pb.FailureKind) -> FailureKind:
    return FailureKind(kind) if kind in pb.FailureKind.values() else FailureKind.OTHER


def evaluation_result(result: pb.EvaluationResult) -> EvaluationResult:
    """Convert an EvaluationResult message; invalid names or too many metrics count as a failure."""
    fault = fault_of_metrics(result.metrics)
    metrics = {} if fault else dict(result.metrics)
    error = readable(result.error or fault, REASON_BYTES_MAX)
    weights = checked_text(result.weights, "weights", NAME_BYTES_MAX)
    return EvaluationResult(
        result.evaluation, list(result.incarnations), metrics, error, weights, result.judged_steps, _kind(result.kind)
    )


def lease_reply(answer: LeaseAnswer) -> pb.LeaseReply:
    """Convert the core's LeaseAnswer into a message."""
    return pb.LeaseReply(
        granted=[pb.Grant(**grant._asdict()) for grant in answer.granted],
        evaluations=evaluation_grants(answer),
        revoked=answer.revoked,
        state=answer.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
        view=answer.view,
        retry_after_s=answer.retry_after_s,
        reason=answer.reason,
        stored=answer.stored,
        ahead=answer.ahead,
        depth=answer.depth,
    )


def evaluation_grants(answer: LeaseAnswer) -> list[pb.EvaluationGrant]:
    """Convert the evaluations of a LeaseAnswer into messages."""
    return [
        pb.EvaluationGrant(
            evaluation=e.after_step,
            for_round=e.round is not None,
            round=e.round or 0,
            incarnations=e.incarnations,
            store=answer.stores_evaluated,
        )
        for e in answer.evaluations
    ]


def follow_call(request: pb.FollowRequest) -> FollowCall:
    """Convert a FollowRequest message into the core's FollowCall."""
    return FollowCall(
        handled=request.handled,
        stop_reason=readable(request.stop_reason, REASON_BYTES_MAX),
        learning_rate=request.learning_rate if request.HasField("learning_rate") else None,
        decision=request.decision,
        between=request.between,
        planned=[(one.epoch, one.learning_rate) for one in request.planned],
        wants_steps=request.wants_steps,
        steps_seen=request.steps_seen,
        coordinator=request.coordinator,
    )


def follow_reply(answer: FollowAnswer) -> pb.FollowReply:
    """Convert the core's FollowAnswer into a message."""
    return pb.FollowReply(
        coordinator=answer.coordinator,
        state=answer.state.value,  # type: ignore[arg-type]  # the enum's values are the wire's
        milestone=None if answer.milestone is None else _milestone(answer.milestone),
        steps=[pb.StepEnd(**end._asdict()) for end in answer.steps],
        steps_seen=answer.steps_seen,
        steps_total=answer.steps_total,
        learning_rate=None if answer.rate is None else pb.LearningRate(**answer.rate._asdict()),
        stopped_by=answer.stopped_by,
    )


def _milestone(reached: ReachedMilestone) -> pb.Milestone:
    fields = reached._asdict()
    sums = [[pb.MetricSums(**one._asdict()) for one in of_epoch] for of_epoch in fields.pop("epoch_sums")]
    epochs = zip(fields.pop("epoch_metrics"), sums, strict=True)
    return pb.Milestone(
        **fields, epoch_metrics=[pb.EpochMetrics(figures=figures, sums=of_epoch) for figures, of_epoch in epochs]
    )


def _waits(answer: LeaseAnswer) -> bool:
    """Tell whether an answer is empty and its call may be held."""
    over = answer.state in (JobState.DONE, JobState.FAILED)
    return answer.may_wait and not (answer.granted or answer.evaluations or answer.revoked or over)


def _process(name: pb.ProcessName) -> ProcessName:
    if name.role not in ("shard", "worker"):
        raise MalformedFrame(f"a process is a shard or a worker, found {readable(name.role, NAME_BYTES_MAX)!r}")
    return ProcessName(name.role, name.index)


def _processes(names: Sequence[ProcessName]) -> list[pb.ProcessName]:
    return [pb.ProcessName(role=name.role, index=name.index) for name in names]
