"""What tracing costs a step where it is off, and where it is on: `python -m benchmarks.tracing --write`.

Off, what is left of it is a field of two headers, which both sides look at, and the checks for a tracer: a header's way
with and without these looks takes turns, and their difference is the cost. On, spans are made and put into
OpenTelemetry's queue by the tracer that the services use; its thread takes them out meanwhile, and sends them nowhere.
All of it is processor time of the calling thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.tables import spread, table, write
from parashard._proto import coordinator_pb2, tensor_pb2
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, PushResult, Target
from parashard.telemetry.trace_context import traceparent
from parashard.telemetry.tracer import Tracer
from parashard.telemetry.tracing import NO_SPAN

ROUNDS = 15
CALLS_OFF = 50_000
CALLS_ON = 300
PHASES: tuple[Literal["pull", "compute", "push"], ...] = ("pull", "compute", "push")
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FIELDS = {"worker": "worker-0", "step": 7, "total_bytes": 1 << 20, "pulled": True, "pulled_version": 5}


class Nowhere(SpanExporter):
    """Takes spans and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Drop them."""
        return SpanExportResult.SUCCESS


def header_of(request: PullRun | None) -> Callable[[], None]:
    """Return a function that makes, serialises and parses a header; with a request, with its trace context."""
    kind = tensor_pb2.PushHeader

    def without() -> None:
        kind.FromString(kind(**FIELDS).SerializeToString())  # type: ignore[arg-type]

    def with_it() -> None:
        header = kind(**FIELDS)  # type: ignore[arg-type]
        if request.traceparent:  # type: ignore[union-attr]
            header.traceparent = request.traceparent  # type: ignore[union-attr]
        _ = kind.FromString(header.SerializeToString()).traceparent

    return without if request is None else with_it


def ns(call: Callable[[], object], calls: int) -> float:
    """Return nanoseconds of this thread's processor time for a call."""
    return 1e9 * timeit.timeit(call, number=calls, timer=time.thread_time) / calls


def off() -> dict[str, list[float]]:
    """Return nanoseconds of a header without the field, with the field empty, and with a context in it."""
    run = PullRun(Target("run", "digest", 1, 0, 1), None, 7, 0, 1 << 20)
    plain, empty, carrying = header_of(None), header_of(run), header_of(run._replace(traceparent=CONTEXT))
    found: dict[str, list[float]] = {"without the field": [], "field empty (off)": [], "with a context (on)": []}
    for _ in range(ROUNDS):
        for name, call in zip(found, (plain, empty, carrying), strict=True):
            found[name].append(ns(call, CALLS_OFF))
    return found


def of_step(tracer: Tracer | None) -> Callable[[], None]:
    """Return all that tracing adds to a worker's step, as `Leasing` and `ShardClient` have it."""
    grant = coordinator_pb2.Grant(step=7, traceparent=CONTEXT)

    def step() -> None:
        if tracer is not None:
            tracer.begin_step("run", "worker-0", grant)
        for phase in PHASES:
            with NO_SPAN if tracer is None else tracer.phase(phase, "worker-0", 7) as span:
                _ = "" if span is None else traceparent(span)
        if tracer is not None:
            tracer.end_step(7, "completed", loss=0.5, examples=32)

    return step


def of_push(tracer: Tracer | None) -> Callable[[], None]:
    """Return all that tracing adds to a shard's push, as `RequestHandler` has it."""
    target, ack = Target("run", "digest", 1, 0, 1), Ack(PushResult.APPLIED, 5, 0)
    request = Push(target, "worker-0", 7, (), False, None, Buffers([b"1234"]), CONTEXT)

    def push() -> None:
        with NO_SPAN if tracer is None else tracer.request("push", request, 1.0) as traced:
            if traced is not None:
                traced.began_s = 2.0
            if traced is not None:
                traced.applied(0, 5, None, 1.0)
            if traced is not None:
                traced.answered(ack)

    return push


def unseen() -> dict[str, list[float]]:
    """Return the nanoseconds of the checks for a tracer in a process without one."""
    ways = {"worker: a step": of_step(None), "shard: a push": of_push(None)}
    return {name: [ns(call, CALLS_OFF) for _ in range(ROUNDS)] for name, call in ways.items()}


def on() -> dict[str, list[float]]:
    """Return nanoseconds of a worker's spans of a step, and of a shard's of a push."""
    found: dict[str, list[float]] = {"worker: step, pull, compute, push": [], "shard: push, apply": []}
    for _ in range(ROUNDS):
        tracer = Tracer(Resource({}), [BatchSpanProcessor(Nowhere())])
        for name, call in zip(found, (of_step(tracer), of_push(tracer)), strict=True):
            found[name].append(ns(call, CALLS_ON))
        tracer.close()
    return found


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/tracing.json and tracing.md")
    arguments = parser.parse_args()
    headers, calls, spans = off(), unseen(), on()
    plain, empty = (statistics.median(headers[name]) for name in ("without the field", "field empty (off)"))
    text = _table("a request's header: make, write, parse, read", headers)
    text += f"\n\nOff costs {empty - plain:.0f} ns a request, {100 * (empty / plain - 1):.0f} % of the header alone."
    text += f"\n\n{_table('a process that does not trace', calls)}"
    traced = _table("spans", spans)
    print(f"{text}\n\n{traced}")
    if arguments.write:
        figures = {"rounds": ROUNDS, "headers_ns": headers, "calls_ns": calls, "spans_ns": spans}
        write("tracing", {"Off": text, "On": traced}, figures)


def _table(what: str, values_ns: dict[str, list[float]]) -> str:
    return table([what, "us"], [[name, spread([ns / 1000 for ns in values])] for name, values in values_ns.items()])


if __name__ == "__main__":
    main()
