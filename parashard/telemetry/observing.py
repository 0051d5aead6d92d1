"""Observers: hooks called for each step and request while it happens; the ones here do nothing.

The one seam for tracing. The coordinator's service, the worker's leasing and client, and the shard's request handler
call an observer; a process that traces gives them another one (each service's `traced`), and no other process imports
that. Every method is called for each step or request, so here all are empty and what they return is shared.
"""

from __future__ import annotations

from typing import Literal, Self

from parashard._proto import coordinator_pb2 as pb
from parashard.protocol.messages import PullRun, Push, Receipt, Weights

Phase = Literal["pull", "compute", "push"]
Outcome = Literal["completed", "failed", "dropped"]


class Observed:
    """A stretch of work, from the entering to the leaving of its context; an error that leaves it is seen, too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def receipts(self, receipts: tuple[Receipt, ...]) -> None:
        """It was a push, and every shard has answered so."""


class ObservedRequest(Observed):
    """A request to a shard; moments are of the clock of the handler."""

    def began(self, at_s: float) -> None:
        """Its turn has come."""

    def applied(self, at_s: float, shard: int, version: int, round_: int | None) -> None:
        """It has moved a shard's weights to a version; in `sync:N` to the start of a round."""

    def answered(self, receipt: Receipt) -> None:
        """It was a push, and this is its receipt."""

    def read(self, weights: Weights) -> None:
        """It was a pull, and these are what it gets; to be looked at only now."""


_UNSEEN = Observed()
_UNSEEN_REQUEST = ObservedRequest()


class LeaseObserver:
    """Sees the coordinator's leases."""

    def answered(self, request: pb.LeaseRequest, reply: pb.LeaseReply) -> None:
        """A worker is about to get this reply, whose grants may be given a context."""


class StepObserver:
    """Sees a worker's steps; called from several threads."""

    def joined(self, run_id: str, worker: str) -> None:
        """The worker has this name in the run."""

    def began(self, grant: pb.Grant) -> None:
        """A leased step was taken from the queue."""

    def ended(self, step: int, outcome: Outcome, reason: str = "", *, loss: float = 0.0, examples: int = 0) -> None:
        """It has ended, for this worker; `reason` if it failed, `loss` and `examples` if it was completed."""

    def phase(self, phase: Phase, step: int | None) -> Observed:
        """Return what is entered around a part of a step, each try of it; None: of an evaluation."""
        return _UNSEEN

    def traceparent(self) -> str:
        """Return the context that the requests of the present part carry; empty: none."""
        return ""


class RequestObserver:
    """Sees a shard's requests; called from several threads."""

    def push(self, push: Push, arrived_s: float) -> ObservedRequest:
        """Return what is entered around a push."""
        return _UNSEEN_REQUEST

    def pull(self, run: PullRun, arrived_s: float) -> ObservedRequest:
        """Return what is entered around a pull."""
        return _UNSEEN_REQUEST


NO_LEASE_OBSERVER = LeaseObserver()
NO_STEP_OBSERVER = StepObserver()
NO_REQUEST_OBSERVER = RequestObserver()
