"""Membership: one worker's part in a job, from joining to leaving: its leases, and its connection to the shards.

Knows no model and no step loop: a worker (`parashard_worker.worker`) computes its steps by a model, and
`parashard_worker.program` hands them to a program's own loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parashard._proto import coordinator_pb2 as pb
from parashard.client.proto_conversion import view_from
from parashard.client.pulled_rows import TableSet
from parashard.client.shard_client import ShardClient
from parashard.job.embeddings import tables_of
from parashard.job.schema import Job
from parashard.plan.partition import Plan
from parashard.process.shell import Stop
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.security.credentials import Credentials
from parashard.transports.base import View
from parashard.transports.choosing import connect_by
from parashard_worker.leased import LeaseLimits
from parashard_worker.leasing import Joined, Leasing

if TYPE_CHECKING:
    from parashard.telemetry.tracer import Tracer

LEAVE_S = 2.0  # for the last report


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
        """Join the job by a name; "": the next free one, which stays this worker's."""
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
        """Join, or join again at a coordinator that was started anew."""
        member = self._coordinator.register_worker(self._request)
        self._request.name = member.name
        return Joined(self._reply.run_id, member.name, member.incarnation, member.lease_ttl_s)

    def connected(
        self, member: Joined, stop: Stop, on_hung: Callable[[str], None], *, evaluates: bool = True
    ) -> tuple[Leasing, ShardClient]:
        """Return what leases steps, and what pulls and pushes; nothing is asked yet."""
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
            tells_norms=self._job.batch_clip_norm is not None,
        )
        return leasing, client

    @contextmanager
    def working(self, leasing: Leasing, client: ShardClient) -> Iterator[None]:
        """Work within; at the end report what is done, give back what is held, and raise what ended the worker."""
        leasing.start()  # before the wait for the shards' view: a worker that waits for a shard is not silent
        try:
            client.use(self._coordinator.patiently(self._view))
            yield
        finally:
            leasing.leave(LEAVE_S)
            client.close()
        if leasing.failure is not None:
            raise leasing.failure

    def _view(self) -> View:
        return view_from(self._coordinator.get_view(self._reply.run_id))
