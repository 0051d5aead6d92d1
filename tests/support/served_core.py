"""A core behind its service, over a real socket: for the tests of the service and of its held calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parashard._proto import coordinator_pb2 as pb
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.protocol.rpc import Server
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import REQUEST_BYTES_MAX, WAITERS_MAX, CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from support.coordinator_cases import DIGEST, RUN
from support.waiting import DEADLINE_S


class WatchedCondition(threading.Condition):
    """Condition that signals each wait that begins, and records its timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.timeouts_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts_s.append(timeout)
        self.began.release()
        return super().wait(timeout)


class Served:
    """A service, the condition that it waits on, and a client of it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.exclusive = ExclusiveCore(core)
        self.watch(WatchedCondition())
        self.status = StatusView("digits", "async")
        self.service = CoordinatorService(self.exclusive, pb.GetJobReply(run_id=RUN, job_digest=DIGEST), self.status)
        self.server = Server("127.0.0.1:0", request_bytes_max=REQUEST_BYTES_MAX, held_max=WAITERS_MAX)
        self.service.add_to(self.server)
        self.client = CoordinatorClient(self.server.address, retry_budget_s=0.0)

    def watch(self, condition: WatchedCondition) -> None:
        """Have the core's lock be this one."""
        self.condition = self.exclusive._changed = condition

    def wait_until_a_call_waits(self) -> None:
        assert self.condition.began.acquire(timeout=DEADLINE_S)


@contextmanager
def served(core: Core) -> Iterator[Served]:
    it = Served(core)
    it.server.start()
    try:
        yield it
    finally:
        it.client.close()
        it.server.stop(grace_s=0.0)


def shard_request(shard: int, incarnation: int = 1, **changed: Any) -> pb.RegisterShardRequest:
    fields: dict[str, Any] = {
        "run_id": RUN,
        "job_digest": DIGEST,
        "shard": shard,
        "incarnation": incarnation,
        "address": f"host:{shard}",
        **changed,
    }
    return pb.RegisterShardRequest(**fields)


def worker_request(name: str = "worker-0", **changed: Any) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(**{"run_id": RUN, "job_digest": DIGEST, "name": name, "device": "cpu", **changed})


def lease_request(worker: str = "worker-0", sequence: int = 1, **changed: Any) -> pb.LeaseRequest:
    return pb.LeaseRequest(**{"run_id": RUN, "worker": worker, "incarnation": 1, "sequence": sequence, **changed})
