"""The coordinator's spans: every grant carries the context of its lease, in the trace of its step."""

from __future__ import annotations

from parashard._proto import coordinator_pb2 as pb
from parashard.telemetry.tracer import trace_id
from parashard_coordinator.core.core import Core
from parashard_coordinator.endpoints.service import CoordinatorService
from parashard_coordinator.endpoints.status import StatusView
from parashard_coordinator.exclusive_core import ExclusiveCore
from support.coordinator_cases import DIGEST, RUN, core_of
from support.served_core import lease_request, worker_request
from support.traced_cases import Traced, about, ids


def service_of(core: Core, traced: Traced) -> CoordinatorService:
    job = pb.GetJobReply(run_id=RUN, job_digest=DIGEST)
    service = CoordinatorService(ExclusiveCore(core), job, StatusView("digits", "async"), traced.tracer)
    service.RegisterWorker(worker_request(), None)
    return service


def test_a_grant_carries_the_context_of_its_lease() -> None:
    traced = Traced()
    reply = service_of(core_of(), traced).Lease(lease_request(want=3), None)
    assert [grant.step for grant in reply.granted] == [0, 1, 2]
    for grant, span in zip(reply.granted, traced.spans, strict=True):
        trace, lease, above = ids(span)
        assert (span.name, trace, above) == ("lease", f"{trace_id(RUN, grant.step):032x}", "")
        assert grant.traceparent == f"00-{trace}-{lease}-01"
        assert about(span, "run", "step", "worker", "skip") == [RUN, grant.step, "worker-0", False]


def test_a_step_that_is_leased_again_is_another_span_of_its_trace() -> None:
    traced = Traced()
    service = service_of(core_of(), traced)
    service.Lease(lease_request(want=1), None)
    failed = [pb.FailedStep(step=0, reason="poison")]
    service.Lease(lease_request(want=1, sequence=2, failed=failed), None)
    (first, span, _), (again, other, _) = map(ids, traced.spans)
    assert first == again == f"{trace_id(RUN, 0):032x}"
    assert span != other


def test_a_call_that_grants_nothing_is_no_span() -> None:
    traced = Traced()
    service_of(core_of(), traced).Lease(lease_request(want=0), None)
    assert traced.names() == []
