"""The coordinator's spans: a lease is the first span of a step's execution, and its context goes with the grant.

A subclass of the service: a coordinator that does not trace has the plain one and never imports this. Called by
`parashard_coordinator.__main__`.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import SpanKind

from parashard._proto import coordinator_pb2 as pb
from parashard.telemetry.tracer import Attributes, Tracer, traceparent
from parashard_coordinator.api.service import CoordinatorService


class TracedService(CoordinatorService):
    """A service whose grants are spans; the arguments are those of `CoordinatorService` after the first."""

    def __init__(self, tracer: Tracer, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._tracer = tracer

    def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseReply:
        reply = super().Lease(request, context)
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
        return reply
