"""Tracer: the spans of docs/tracing.md, made by OpenTelemetry; all executions of a step share one trace.

It has its own provider: a program's own provider and current span are unaffected. Imported only by processes that
trace; a process that does not trace has None in place of a tracer.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from parashard import __version__
from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ParashardError
from parashard.protocol.messages import Ack, PullRun, Push, Weights
from parashard.telemetry.trace_context import traceparent

TRACEPARENT_BYTES = 55  # version 00 of W3C Trace Context: 2 + 32 + 16 + 2 hexadecimal digits and three dashes
CLOSE_S = 1.0

Attributes = dict[str, AttributeValue]
Outcome = Literal["completed", "failed", "dropped"]

_w3c = TraceContextTextMapPropagator()


def trace_id(run_id: str, step: int) -> int:
    """Return the id of the trace that all executions of a step share, on any worker and however many there are."""
    return int.from_bytes(hashlib.blake2b(f"{run_id}/{step}".encode(), digest_size=16).digest())


def sender(text: str) -> Context | None:
    """Return the context that came with a request; None if there is none, or it is malformed."""
    if len(text) != TRACEPARENT_BYTES:
        return None
    context = _w3c.extract({"traceparent": text}, Context())
    return context if get_current_span(context).get_span_context().is_valid else None


class RequestSpan:
    """The span of a shard's request. Events under the shard's lock are recorded after it, since others wait."""

    def __init__(self, span: Span, step: int | None) -> None:
        self._span = span
        self._step = step
        self.began_s: float | None = None  # when it got the lock
        self.apply: tuple[int, int, Attributes] | None = None  # if the weights moved: begin and end in ns, and more

    def applied(self, shard: int, version: int, round_: int | None, took_s: float) -> None:
        """Record that the request has just moved a shard's weights to a version; in `sync:N` to a round's start."""
        about: Attributes = {"parashard.shard": shard, "parashard.version": version}
        if round_ is not None:
            about["parashard.round"] = round_ - 1  # the round that ended; the request may be of the next one
        elif self._step is not None:
            about["parashard.step"] = self._step
        ended_ns = time.time_ns()
        self.apply = ended_ns - round(1e9 * took_s), ended_ns, about

    def answered(self, ack: Ack) -> None:
        """Record the ack of a push."""
        about: Attributes = {"parashard.result": ack.result.name.lower(), "parashard.version": ack.version}
        if ack.staleness is not None:
            about["parashard.staleness"] = ack.staleness
        self._span.set_attributes(about)

    def read(self, weights: Weights) -> None:
        """Record version and size of a pull's weights, which may be read only now."""
        size_bytes = sum(run.values.nbytes for run in weights.runs)
        size_bytes += sum(rows.values.nbytes for rows in weights.rows.values())
        self._span.set_attributes({"parashard.version": weights.version, "parashard.bytes": size_bytes})


class Tracer:
    """Makes the spans of one process; thread-safe."""

    def __init__(self, resource: Resource, processors: Sequence[SpanProcessor]) -> None:
        self._ids = _Ids()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("parashard", __version__)
        self._steps: dict[int, Span] = {}  # of a worker's present steps

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send the remaining spans, for at most `timeout_s`; spans that are not sent by then are lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)

    # --- coordinator ---

    def grants(self, request: pb.LeaseRequest, reply: pb.LeaseReply) -> None:
        """Make a span for each grant, the first of its step's execution; the grant carries its context."""
        for grant in reply.granted:
            about: Attributes = {
                "rpc.system.name": "grpc",
                "rpc.method": "parashard.v1.Coordinator/Lease",
                "parashard.worker": request.worker,
                "parashard.skip": grant.skip,
            }
            span = self._of_step("lease", request.run_id, grant.step, Context(), SpanKind.SERVER, about)
            grant.traceparent = traceparent(span)
            span.end()

    # --- worker ---

    def begin_step(self, run_id: str, worker: str, grant: pb.Grant) -> None:
        """Begin the span of a leased step, below that of its lease."""
        about: Attributes = {"parashard.worker": worker, "parashard.skip": grant.skip}
        parent = sender(grant.traceparent) or Context()
        self._steps[grant.step] = self._of_step("step", run_id, grant.step, parent, SpanKind.INTERNAL, about)

    def end_step(self, step: int, outcome: Outcome, reason: str = "", *, loss: float = 0.0, examples: int = 0) -> None:
        """End a step's span; `reason` if it failed, `loss` and `examples` if it was completed."""
        span = self._steps.pop(step, None)
        if span is None:
            return
        span.set_attribute("parashard.outcome", outcome)
        if outcome == "completed":
            span.set_attributes({"parashard.loss": loss, "parashard.examples": examples})
        if reason:
            span.set_status(StatusCode.ERROR, reason)
        span.end()

    def phase(
        self, name: Literal["pull", "compute", "push"], worker: str, step: int | None
    ) -> AbstractContextManager[Span]:
        """Open the span of a part of a step; an evaluation's part, which has no step, has its own trace."""
        above = None if step is None else self._steps.get(step)
        about: Attributes = {"parashard.worker": worker}
        if step is not None:
            about["parashard.step"] = step
        kind = SpanKind.INTERNAL if name == "compute" else SpanKind.CLIENT
        return self._within(name, Context() if above is None else set_span_in_context(above, Context()), kind, about)

    # --- shard ---

    @contextmanager
    def request(
        self, name: Literal["pull", "push"], request: Push | PullRun, arrived_s: float
    ) -> Iterator[RequestSpan | None]:
        """Open the span of a request; None if the request has no context, or a malformed one."""
        parent, target = sender(request.traceparent), request.target
        if parent is None:
            yield None
            return
        about: Attributes = {
            "rpc.system.name": "parashard",
            "rpc.method": f"parashard.v1.ShardData/{name.capitalize()}",
            "parashard.run": target.run_id,
            "parashard.shard": target.shard,
            "parashard.incarnation": target.incarnation,
        }
        if isinstance(request, Push):
            about |= {"parashard.worker": request.worker, "parashard.bytes": request.payload.nbytes}
        if request.step is not None:
            about["parashard.step"] = request.step
        with self._within(name, parent, SpanKind.SERVER, about) as span:
            traced = RequestSpan(span, request.step)
            try:
                yield traced
            finally:
                if traced.began_s is not None:
                    span.set_attribute("parashard.turn_wait_s", traced.began_s - arrived_s)
                if traced.apply is not None:
                    began_ns, ended_ns, about = traced.apply
                    within = set_span_in_context(span, Context())
                    apply = self._tracer.start_span("apply", within, attributes=about, start_time=began_ns)
                    apply.end(ended_ns)

    # --- all ---

    def _of_step(
        self, name: str, run_id: str, step: int, parent: Context, kind: SpanKind, attributes: Attributes
    ) -> Span:
        """Begin a span below its parent, or, without one, in the step's own trace."""
        with self._ids.next_trace(trace_id(run_id, step)):
            about = {"parashard.run": run_id, "parashard.step": step, **attributes}
            return self._tracer.start_span(name, parent, kind, about)

    @contextmanager
    def _within(self, name: str, parent: Context, kind: SpanKind, attributes: Attributes) -> Iterator[Span]:
        """Open a span below its parent; the permanent code of an error that leaves it becomes an attribute."""
        span = self._tracer.start_span(name, parent, kind, attributes)
        try:
            yield span
        except BaseException as error:
            code, text = type(error).__qualname__, str(error)
            if isinstance(error, ParashardError):
                code, text = error.code, error.message
            span.set_attribute("error.type", code)
            span.set_status(StatusCode.ERROR, text)
            raise
        finally:
            span.end()


class _Ids(IdGenerator):
    """Random ids, except for the trace that a step's span begins.

    They come from the system: a model may have seeded the `random` module alike in all workers, and its state must not
    change.
    """

    def __init__(self) -> None:
        self._next = threading.local()

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1  # 0 is no id

    def generate_trace_id(self) -> int:
        return getattr(self._next, "trace_id", None) or secrets.randbits(128) or 1

    @contextmanager
    def next_trace(self, number: int) -> Iterator[None]:
        """Give this id to a trace that begins in the block."""
        self._next.trace_id = number
        try:
            yield
        finally:
            self._next.trace_id = None
