"""A worker's leases and their clock: what the tests of leased work share."""

from __future__ import annotations

from parashard._proto import coordinator_pb2 as pb
from parashard_worker.leased import Joined, LeasedWork, LeaseLimits

TTL_S, STEP_TIMEOUT_S, RETRY_BUDGET_S = 9.0, 100.0, 45.0
RUNNING, DONE, FAILED = pb.JOB_STATE_RUNNING, pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED


class Worker:
    """A worker and its clock."""

    def __init__(self, *, batch: int = 8, ahead: int = 1) -> None:
        joined = Joined("run-1", "worker-0", 3, TTL_S)
        self.now_s = 50.0
        self.work = LeasedWork(joined, LeaseLimits(batch, ahead, STEP_TIMEOUT_S, RETRY_BUDGET_S), self.now_s)

    @property
    def due_in_s(self) -> float:
        return self.work.due_in_s(self.now_s)

    def call(self) -> pb.LeaseRequest:
        """Wait until a call is due, and make it."""
        self.now_s += self.due_in_s
        request = self.work.request(self.now_s, {"pull": 1.5})
        assert request is not None
        return request

    def answer(self, request: pb.LeaseRequest, *steps: int, **fields: object) -> None:
        fields = {"state": RUNNING, "view": 1, **fields}
        self.work.accept(request, pb.LeaseReply(granted=[pb.Grant(step=s) for s in steps], **fields), self.now_s)

    def granted(self, *steps: int) -> Worker:
        self.answer(self.call(), *steps)
        return self

    def take(self) -> int:
        work = self.work.take(self.now_s)
        assert isinstance(work, pb.Grant)
        return work.step

    def complete(self, step: int, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.work.completed(pb.CompletedStep(step=step, loss=0.5), self.now_s)


def reported(request: pb.LeaseRequest) -> list[int]:
    return [c.step for c in request.completed]
