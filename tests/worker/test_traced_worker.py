"""The worker's spans: a step from its lease to its end, with its pull, its computation and its push in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from parashard._proto import coordinator_pb2 as pb
from parashard.client.shard_client import ShardClient
from parashard.errors import NotReady, ParashardError
from parashard.protocol.messages import PullRun, Push
from parashard.telemetry.tracer import trace_id
from parashard_worker.leased import Joined, LeaseLimits
from parashard_worker.leasing import Leasing
from parashard_worker.loop import StepLoop
from support.in_process import DIGEST, RUN
from support.loop_cases import Job, evaluation
from support.traced_cases import CONTEXT, Traced, about, ids
from support.waiting import DEADLINE_S


class OneGrant:
    """A coordinator that grants once, and is done when all of that has been reported or given back."""

    def __init__(self, *grants: pb.Grant, evaluations: tuple[pb.EvaluationGrant, ...] = ()) -> None:
        self._reply = pb.LeaseReply(granted=grants, evaluations=evaluations, state=pb.JOB_STATE_RUNNING)
        self._granted = False

    def lease(self, request: pb.LeaseRequest, deadline_s: float = 0.0) -> pb.LeaseReply:
        if not self._granted:
            self._granted = True
            return self._reply
        busy = request.held or request.held_evaluations
        return pb.LeaseReply(state=pb.JOB_STATE_RUNNING if busy else pb.JOB_STATE_DONE)


class Worker:
    """A traced worker over two shards in this process."""

    def __init__(self, coordinator: OneGrant, depth: int) -> None:
        self.traced = Traced()
        self.job = Job(depth=depth)
        self.leasing = Leasing(
            coordinator,  # type: ignore[arg-type]
            Joined(RUN, "worker-0", 1, 3600.0),
            LeaseLimits(batch=8, ahead=1, step_timeout_s=3600.0),
            join=lambda: None,  # type: ignore[arg-type, return-value]
            tracer=self.traced.tracer,
        )
        cluster = self.job.cluster
        client = ShardClient(
            RUN,
            DIGEST,
            cluster.plan,
            "worker-0",
            connect=cluster.connect,
            look=self.job.look,
            tracer=self.traced.tracer,
        )
        client.use(cluster.view())
        self.job.loop = StepLoop(self.job.task, client, self.leasing, depth=depth)
        self.requests: list[Push | PullRun] = []
        cluster.before = lambda address, request: self.requests.append(request)

    def run(self) -> Worker:
        self.leasing.start()
        self.job.run()
        return self

    def of_step(self, step: int) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.traced.spans if about(span, "step") == [step]}


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Return what makes a worker of some grants; its leasing thread ends with the test."""
    made: list[Worker] = []

    def make(*grants: pb.Grant, depth: int = 0, **more: tuple[pb.EvaluationGrant, ...]) -> Worker:
        made.append(Worker(OneGrant(*grants, **more), depth))
        return made[-1]

    yield make
    for one in made:
        one.leasing.leave(DEADLINE_S)
        assert not one.leasing._thread.is_alive()


Make = Callable[..., Worker]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_has_its_pull_its_computation_and_its_push(worker: Make, depth: int) -> None:
    it = worker(pb.Grant(step=3), pb.Grant(step=4), depth=depth).run()
    for number in (3, 4):
        spans = it.of_step(number)
        assert sorted(spans) == ["compute", "pull", "push", "step"]
        trace, step, above = ids(spans.pop("step"))
        assert (trace, above) == (f"{trace_id(RUN, number):032x}", "")
        assert {ids(span)[::2] for span in spans.values()} == {(trace, step)}
        assert {name: span.kind for name, span in spans.items()} == {
            "pull": SpanKind.CLIENT,
            "compute": SpanKind.INTERNAL,
            "push": SpanKind.CLIENT,
        }
    step = it.of_step(3)["step"]
    assert about(step, "run", "worker", "skip", "outcome", "examples") == [RUN, "worker-0", False, "completed", 4]
    results, staleness = about(it.of_step(3)["push"], "results", "staleness")
    assert (results, 0 <= staleness <= 2 * depth) == (("applied", "applied"), True)


def test_every_request_carries_the_context_of_its_pull_or_push(worker: Make) -> None:
    it = worker(pb.Grant(step=3)).run()
    spans = it.of_step(3)
    assert len(it.requests) == 4
    for request in it.requests:
        trace, span, _ = ids(spans["pull" if isinstance(request, PullRun) else "push"])
        assert request.traceparent == f"00-{trace}-{span}-01"


def test_a_step_is_below_its_lease(worker: Make) -> None:
    it = worker(pb.Grant(step=3, traceparent=CONTEXT)).run()
    trace, _, above = ids(it.of_step(3)["step"])
    assert f"00-{trace}-{above}-01" == CONTEXT


def test_a_lease_whose_context_is_malformed_is_a_lease(worker: Make) -> None:
    it = worker(pb.Grant(step=3, traceparent="00-nonsense")).run()
    assert ids(it.of_step(3)["step"])[::2] == (f"{trace_id(RUN, 3):032x}", "")


def test_a_model_that_fails_ends_its_step_with_its_reason(worker: Make) -> None:
    it = worker(pb.Grant(step=3))

    def fail(batch: object) -> None:
        raise RuntimeError("poison")

    it.job.model.before = fail
    it.run()
    spans = it.of_step(3)
    assert sorted(spans) == ["compute", "pull", "step"]
    assert spans["compute"].status.description == "poison"
    assert about(spans["step"], "outcome") == ["failed"]
    assert spans["step"].status.status_code is StatusCode.ERROR
    assert "poison" in (spans["step"].status.description or "")


def test_a_push_is_one_span_however_often_a_shard_is_asked(worker: Make) -> None:
    it = worker(pb.Grant(step=3))
    refusals: list[ParashardError] = [NotReady("not yet"), NotReady("not yet")]

    def before(address: str, request: Push | PullRun) -> None:
        if isinstance(request, Push) and address == "shard-1" and refusals:
            raise refusals.pop()

    it.job.cluster.before = before
    it.run()
    [push] = [span for span in it.traced.spans if span.name == "push"]
    assert push.status.status_code is StatusCode.UNSET
    assert about(push, "results") == [("applied", "applied")]


def test_a_skipped_step_is_a_push_alone(worker: Make) -> None:  # P6
    it = worker(pb.Grant(step=3, skip=True)).run()
    assert sorted(it.of_step(3)) == ["push", "step"]
    assert about(it.of_step(3)["step"], "skip", "outcome") == [True, "completed"]


def test_a_step_that_was_given_back_says_so(worker: Make) -> None:
    it = worker(pb.Grant(step=3), pb.Grant(step=4), depth=1)
    it.leasing.start()
    it.job.run(lambda: bool(it.job.model.computed))  # stops with the second step pulled and not computed
    assert [about(it.of_step(step)["step"], "outcome") for step in (3, 4)] == [["completed"], ["dropped"]]


def test_an_evaluation_is_of_no_step(worker: Make) -> None:
    it = worker(evaluations=(evaluation(1),)).run()
    assert {name for name in it.traced.names()} == {"pull", "compute"}
    assert all(about(span, "step") == [None] and ids(span)[2] == "" for span in it.traced.spans)


def test_what_is_computed_is_what_is_computed_without_spans(worker: Make) -> None:
    it = worker(*(pb.Grant(step=number) for number in range(8))).run()
    plain = Job(*range(8)).run()
    for name, array in it.job.weights().items():
        assert np.array_equal(array, plain.weights()[name])
