"""Worker: one worker of one job, from the job's description to its end; `Membership`: a program's place in a job.

Owns the order: load the task, join, lease, compute and push until the job is over or a stop is requested, leave. Model
and data are the program's or those that the job names, so a worker is a process (`parashard_worker`) or an object in
a user's process. Knows no arguments, no signals, and only the exit codes with which a worker's own process ends.

    worker = Worker(CoordinatorClient(address), OwnTask(model, source))
    worker.run(Stop()).reason
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import view_from
from parashard.client.pulled import Memory, aligned
from parashard.client.pulled_rows import TableSet
from parashard.client.shard_client import ShardClient
from parashard.job.embeddings import tables_of
from parashard.job.layers import parse_set
from parashard.job.schema import Job
from parashard.models.user_errors import users_line
from parashard.plan.partition import Plan
from parashard.process import failpoints
from parashard.process.cuda_memory import DeviceMemory, index_in
from parashard.process.logs import bound, log
from parashard.process.shell import Stop
from parashard.process.starts import WorkerStart
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.security.credentials import Credentials
from parashard.telemetry.http import HttpPort, Metrics
from parashard.transports.base import View
from parashard.transports.choosing import connect_by
from parashard_worker.leased import Joined, LeaseLimits
from parashard_worker.leasing import Leasing, end_process
from parashard_worker.loading import (
    ANY_WORKER,
    NAMED_BY_JOB,
    OwnTask,
    fix_algorithms,
    job_of,
    limit_compute_threads,
    load_task,
)
from parashard_worker.loop import StepLoop, check_store, keep_evaluated

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

LEAVE_S = 2.0  # for the last report
TOLD_MAX = 10  # warnings that are reported
TEXT_MAX = 300  # characters of a warning
LOOK_S = 1.0  # how long the thread that watches for a stop may outlive the run


AskGpuMemory = Callable[[], tuple[int, int] | None]
"""Returns a GPU's used and total memory in bytes; None: there is no GPU, or its driver does not answer."""


def no_gpu_memory() -> None:
    """Return None: there is no GPU."""


def tell_hung(reason: str) -> None:
    """Log that a step hangs in the model; the process waits for it."""
    log.critical("hung", reason=reason)


class Membership:
    """A worker in a job."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        reply: pb.GetJobReply,
        job: Job,
        plan: Plan,
        *,
        credentials: Credentials | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._reply = reply
        self._job = job
        self._plan = plan
        self._credentials = credentials
        self._tracer = tracer
        self._request = pb.RegisterWorkerRequest()

    def join(self, name: str, fingerprint: str, device: str, http_address: str = "") -> Joined:
        """Join the job under a name; "": the next free one, which this worker then keeps."""
        self._request = pb.RegisterWorkerRequest(
            run_id=self._reply.run_id,
            job_digest=self._reply.job_digest,
            name=name,
            fingerprint=fingerprint,
            http_address=http_address,
            device=device,
            token=int.from_bytes(os.urandom(8)),
        )
        return self._join()

    def _join(self) -> Joined:
        """Join, or join again after a restart of the coordinator."""
        member = self._coordinator.register_worker(self._request)
        self._request.name = member.name
        return Joined(self._reply.run_id, member.name, member.incarnation, member.lease_ttl_s)

    def connected(
        self,
        member: Joined,
        stop: Stop,
        on_hung: Callable[[str], None],
        *,
        evaluates: bool = True,
        memory: Memory = aligned,
    ) -> tuple[Leasing, ShardClient]:
        """Return the clients for leases, and for pulls (into `memory`) and pushes; no call is made yet."""
        cluster, reply = self._job.cluster, self._reply
        leasing = Leasing(
            self._coordinator,
            member,
            LeaseLimits(cluster.lease_batch, cluster.pipeline_depth, cluster.step_timeout_s, cluster.retry_budget_s),
            join=self._join,
            on_hung=on_hung,
            tracer=self._tracer,
            evaluates=evaluates,
        )
        client = ShardClient(
            reply.run_id,
            reply.job_digest,
            self._plan,
            member.name,
            retry_budget_s=cluster.retry_budget_s,
            cancelled=stop.event,
            now_s=leasing.clock.now_s,
            look=self._view,
            connect=connect_by(cluster.transport, self._credentials),
            tracer=self._tracer,
            tables=TableSet(tables_of(self._job), self._job.job.seed),
            sends_norms=self._job.batch_clip_norm is not None,
            memory=memory,
        )
        return leasing, client

    @contextmanager
    def working(self, leasing: Leasing, client: ShardClient) -> Iterator[None]:
        """Run the leasing thread within; at the end report completed steps, give back leases, and raise a failure."""
        leasing.start()  # before the wait for the shards' view: a worker that waits for a shard is not silent
        try:
            client.use(self._coordinator.retry(self._view))
            yield
        finally:
            leasing.leave(LEAVE_S)
            client.close()
        if leasing.work.failure is not None:
            raise leasing.work.failure

    def _view(self) -> View:
        return view_from(self._coordinator.get_view(self._reply.run_id))


class WorkerEnd(NamedTuple):
    """How a worker ended: its completed steps, whether the job has failed, and the reason."""

    steps: int
    job_failed: bool
    reason: str


class Worker:
    """One worker of one job; it runs once. The caller closes the coordinator's client.

    `start` has this worker's settings; its coordinator address is not read. `on_hung` is called with the reason, in the
    leasing thread, when a step hangs in the model; by default it is logged, and the worker waits for its model. None:
    the process belongs to the worker. It exits then, and also when a step does not end within `cluster.grace_s` after a
    stop; its environment limits its compute threads, too.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        own: OwnTask = NAMED_BY_JOB,
        start: WorkerStart = ANY_WORKER,
        *,
        credentials: Credentials | None = None,
        tracer: Tracer | None = None,
        on_hung: Callable[[str], None] | None = tell_hung,
    ) -> None:
        self._coordinator = coordinator
        self._own = own
        self._start = start
        self._overrides = [parse_set(text) for text in start.set]
        self._own_process = on_hung is None
        self._on_hung = on_hung or end_process
        self._credentials = credentials
        self._tracer = tracer

    def run(self, stop: Stop) -> WorkerEnd:
        """Work until the job is over or a stop is requested; leases held then are given back.

        Raises WrongRun if the data, the model or an override is not of the coordinator's job; ConfigurationError if
        something that the job names is missing, or the model returns no valid gradients; Fenced if another process has
        taken this worker's name; RetryLater if the coordinator or a shard did not answer for longer than
        `cluster.retry_budget_s`, or a stop was requested before the worker had joined.
        """
        start, coordinator = self._start, self._coordinator
        reply = coordinator.get_job()
        if self._own.check is not None:
            self._own.check(job_of(reply))
        job = job_of(reply, self._overrides)
        coordinator.retry_budget_s = job.cluster.retry_budget_s
        check_store(reply)
        threads = limit_compute_threads(job, own_process=self._own_process)
        task = load_task(reply, job, self._own, start, threads=threads)
        if self._own_process:
            fix_algorithms(job)
        metrics = Metrics("worker", self._credentials)
        joined = False
        not_ready = "not in the job yet"
        http = HttpPort(
            start.host, start.http_port, metrics, lambda: "" if joined else not_ready, advertise=start.advertise
        )
        http.start()
        try:
            membership = Membership(
                coordinator, reply, job, task.plan, credentials=self._credentials, tracer=self._tracer
            )
            device = task.device
            member = membership.join(start.name, device.fingerprint(), device.name, http.address)
            joined = True
            failpoints.hit("worker.boot.joined")
            with bound(worker=member.name, incarnation=member.incarnation):
                log.info("joined", device=device.name, threads=threads, http=http.address)
                leasing, client = membership.connected(member, stop, self._on_hung, memory=device.host_memory)
                keep = partial(keep_evaluated, reply.checkpoint_url, reply.run_id, task.plan.variables)
                loop = StepLoop(task, client, leasing, depth=job.depth_max, keep=keep, ends_process=self._own_process)
                memory = gpu_memory_of(device.name)
                leasing.gpu_memory = partial(gpu_memory_message, memory)
                metrics.add(partial(worker_families, loop, member.name, memory))
                with (
                    warnings_told(leasing.warned) if self._own_process else nullcontext(),
                    self._left_in_time(stop, leasing, job.cluster.grace_s),
                    membership.working(leasing, client),
                ):
                    loop.run(lambda: stop.asked)
                reason = stop.reason or leasing.work.hung or leasing.work.reason
                log.info("left", steps=loop.session.steps_done, reason=reason)
        finally:
            http.stop()
        return WorkerEnd(loop.session.steps_done, leasing.work.state == pb.JOB_STATE_FAILED, reason)

    @contextmanager
    def _left_in_time(self, stop: Stop, leasing: Leasing, grace_s: float) -> Iterator[None]:
        """Leave within `grace_s` of a stop request, without waiting for the current step, which is leased again."""
        over = threading.Event()
        watch = threading.Thread(target=self._leave_in_time, args=(stop, leasing, grace_s, over), name="leaving")
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            over.set()

    def _leave_in_time(self, stop: Stop, leasing: Leasing, grace_s: float, over: threading.Event) -> None:
        while not stop.wait(LOOK_S):
            leasing.clock.now_s()  # keep the clock read: pulls and pushes read it rarely, and leasing may be over
            if over.is_set():
                return
        if over.wait(max(0.0, grace_s - LEAVE_S)):
            return
        try:
            leasing.leave(LEAVE_S)
            log.info("left", reason=f"{stop.reason}; the step in the works was given back")
        finally:
            if self._own_process:
                os._exit(stop.exit_code)  # even if giving back or logging failed


def gpu_memory_of(device: str) -> AskGpuMemory:
    """Return a function that reads the GPU memory of a device, given the device's name."""
    card = index_in(device)
    return no_gpu_memory if card is None else DeviceMemory(card).read


def gpu_memory_message(ask: AskGpuMemory) -> pb.GpuMemory | None:
    """Return the GPU memory as a message for the coordinator."""
    found = ask()
    return None if found is None else pb.GpuMemory(used_bytes=found[0], total_bytes=found[1])


def worker_families(loop: StepLoop, worker: str, gpu_memory: AskGpuMemory = no_gpu_memory) -> Iterator[Metric]:
    """Yield a worker's metric families, read from its loop and its GPU's driver at each scrape."""
    session, traffic = loop.session, loop.traffic

    def counter(name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"parashard_worker_{name}", text, labels=["worker"])
        family.add_metric([worker], value)
        return family

    yield counter("steps", "Steps computed and acknowledged by every shard.", session.steps_done)
    yield counter("computed_steps", "Steps computed, whatever became of them.", session.computed)
    yield counter("staleness_pushes", "Staleness of its pushes, added up.", session.transfers.staleness_pushes)
    yield counter("examples", "Examples in these steps.", session.examples)
    phases = CounterMetricFamily(
        "parashard_worker_phase_seconds", "Where the step loop's time went.", labels=["worker", "phase"]
    )
    for phase, seconds in dict(session.phases_s).items():
        phases.add_metric([worker, phase], seconds)
    yield phases
    yield counter("transfer_seconds", "Duration of pulls and pushes, waited for or not.", session.transfers.transfer_s)
    if traffic is not None:
        yield counter("gpu_wait_seconds", "Time for which steps' results were waited for.", loop.gpu_wait_s)
        copied = CounterMetricFamily(
            "parashard_worker_gpu_copied_bytes", "Copied to its GPU and from it.", labels=["worker", "way"]
        )
        for way, size in (("in", traffic.in_bytes), ("out", traffic.out_bytes)):
            copied.add_metric([worker, way], size)
        yield copied
    memory = gpu_memory()
    if memory is not None:
        family = GaugeMetricFamily(
            "parashard_worker_gpu_memory_bytes", "Memory of its GPU, of all processes.", labels=["worker", "memory"]
        )
        for name, size in zip(("used", "total"), memory, strict=True):
            family.add_metric([worker, name], size)
        yield family


@contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings within to `tell`, in any thread, as texts like "UserWarning: far too few (train.py:12)"."""
    # Each text once, at most TOLD_MAX texts: few users read a worker's log.
    before, told = warnings.showwarning, set[str]()

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        before(message, category, *place, **more)
        line = users_line(sys._getframe())
        text = f"{category.__name__}: {' '.join(str(message).split())[:TEXT_MAX]}{f' ({line})' if line else ''}"
        if text not in told and len(told) < TOLD_MAX:
            told.add(text)
            tell(text)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before
