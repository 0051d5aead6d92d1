"""The shard's spans: a request below its sender's span, and the apply below the request that moved the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from parashard.errors import NonFiniteGradient, QueueFull
from parashard.plan.variables import Variable
from parashard.protocol.messages import PullRun, PushResult
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import ShardHost
from support.in_process import plan_of, push_for, shard_of, variables_of
from support.traced_cases import CONTEXT, MALFORMED, Traced, about, ids

PLAN = plan_of(variables_of(Variable("w", (4,))))
WORKERS_TRACE, WORKERS_SPAN = CONTEXT.split("-")[1:3]


class Doubles:
    """A traced plane among fakes: a lock that is free late."""

    def __init__(self, **of_shard: Any) -> None:
        self.traced = Traced()
        self.now_s = 100.0
        self.shard = shard_of(PLAN, **of_shard)
        self.turn_s, self.apply_s = 0.0, 0.0
        host = ShardHost(self.shard, self, "")  # type: ignore[arg-type]
        self.plane = RequestHandler(host, self, self.traced.tracer, lambda: self.now_s)  # type: ignore[arg-type]

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:  # the lock's
        self.now_s += self.turn_s
        push = self.shard.push

        def slow(request: Any) -> Any:
            self.now_s += self.apply_s
            return push(request)

        self.shard.push = slow  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.shard.push = push  # type: ignore[method-assign]

    def push(self, step: int = 0, value: float = 1.0, traceparent: str = CONTEXT, **more: Any) -> PushResult:
        request = push_for(self.shard, step, np.full(4, value), traceparent=traceparent, **more)
        return self.plane.push(request, 10.0).result

    def pull(self, traceparent: str = CONTEXT, round_: int | None = None) -> bytes:
        run = PullRun(self.shard.identity, round_, 3, 0, 16, traceparent=traceparent)
        return self.plane.pull(run, 10.0, lambda weights: b"".join(run.values for run in weights.runs))


def test_a_push_is_below_its_worker_and_the_apply_below_the_push() -> None:
    it = Doubles(incarnation=4)
    assert it.push(3) is PushResult.APPLIED
    apply, push = it.traced.spans
    assert (apply.name, push.name, push.kind) == ("apply", "push", SpanKind.SERVER)
    assert ids(push)[::2] == (WORKERS_TRACE, WORKERS_SPAN)
    assert ids(apply)[::2] == (WORKERS_TRACE, ids(push)[1])
    assert about(push, "run", "shard", "incarnation", "step", "worker") == ["run-1", 0, 4, 3, "worker-0"]
    assert about(push, "bytes", "result", "version") == [16, "applied", 1]
    assert about(apply, "shard", "step", "version", "round") == [0, 3, 1, None]


def test_a_pull_is_below_its_worker_and_gives_what_it_should() -> None:
    it = Doubles()
    it.push(value=2.0)
    assert np.frombuffer(it.pull(), "<f4").tolist() == [2.0] * 4
    pull = it.traced.only("pull")
    assert (ids(pull)[::2], pull.kind) == ((WORKERS_TRACE, WORKERS_SPAN), SpanKind.SERVER)
    assert about(pull, "step", "version", "bytes") == [3, 1, 16]


def test_a_duplicate_is_reported_and_applies_nothing() -> None:  # P1
    it = Doubles()
    it.push()
    assert it.push() is PushResult.DUPLICATE
    assert it.traced.names() == ["apply", "push", "push"]
    assert about(it.traced.spans[2], "result") == ["duplicate"]


def test_a_round_is_applied_by_the_request_that_names_the_next_and_is_reported_as_a_round() -> None:  # P10
    it = Doubles(round_steps=2)
    assert [it.push(0), it.push(1)] == [PushResult.BUFFERED] * 2
    it.pull(round_=1)
    assert it.traced.names() == ["push", "push", "apply", "pull"]
    apply, pull = it.traced.spans[2:]
    assert ids(apply)[2] == ids(pull)[1]
    assert about(apply, "round", "version", "step") == [0, 1, None]


def test_the_wait_for_the_turn_is_told_apart_from_the_apply() -> None:
    it = Doubles()
    it.turn_s, it.apply_s = 2.0, 0.5
    it.push()
    apply, push = it.traced.spans
    assert about(push, "turn_wait_s") == [2.0]
    assert apply.start_time is not None
    assert apply.end_time is not None
    assert apply.end_time - apply.start_time == 500_000_000


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_what_brings_no_context_is_served_without_spans(text: str) -> None:
    it = Doubles()
    assert it.push(traceparent=text) is PushResult.APPLIED
    assert np.frombuffer(it.pull(text), "<f4").tolist() == [1.0] * 4
    assert it.traced.names() == []


def test_the_apply_of_one_request_is_not_reported_by_the_next() -> None:
    it = Doubles()
    it.push(traceparent="")
    it.pull()
    assert it.traced.names() == ["pull"]


def test_a_refusal_is_reported_by_its_code() -> None:
    it = Doubles()
    with pytest.raises(NonFiniteGradient):
        it.push(value=np.nan)
    (push,) = it.traced.spans
    assert push.status.status_code is StatusCode.ERROR
    assert (push.attributes or {})["error.type"] == NonFiniteGradient.code


def test_a_turn_that_never_came_has_no_wait() -> None:
    it = Doubles()

    def full(timeout_s: float) -> NoReturn:
        raise QueueFull("64 requests are waiting")

    it.push()
    it.held = full  # type: ignore[method-assign, assignment]
    with pytest.raises(QueueFull):
        it.pull()
    assert about(it.traced.only("pull"), "turn_wait_s") == [None]
