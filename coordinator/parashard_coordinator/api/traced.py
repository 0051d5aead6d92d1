"""The coordinator's spans: a lease is the first span of a step's execution, and its context goes with the grant.

Made by `parashard_coordinator.__main__`, if the coordinator traces; no other imports this.
"""

from __future__ import annotations

from opentelemetry.trace import SpanKind

from parashard._proto import coordinator_pb2 as pb
from parashard.telemetry.observing import LeaseObserver
from parashard.telemetry.tracer import Attributes, Tracer, traceparent


class LeaseSpans(LeaseObserver):
    """Makes grants spans.

    Parameters
    ----------
    tracer : Tracer
        Makes them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def answered(self, request: pb.LeaseRequest, reply: pb.LeaseReply) -> None:
        for grant in reply.granted:
            about: Attributes = {
                "rpc.system.name": "grpc",
                "rpc.method": "parashard.v1.Coordinator/Lease",
                "parashard.worker": request.worker,
                "parashard.skip": grant.skip,
            }
            span = self._tracer.of_step("lease", request.run_id, grant.step, kind=SpanKind.SERVER, attributes=about)
            grant.traceparent = traceparent(span)
            span.end()
