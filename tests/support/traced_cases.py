"""A tracer whose spans stay in memory, and a look at them: what the tests of several folders share."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from parashard.telemetry.tracer import Tracer

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the specification's example
MALFORMED = (
    "",
    "traceparent",
    CONTEXT[:-1],
    CONTEXT + "0",
    CONTEXT.replace("0af7651916cd43dd8448eb211c80319c", 32 * "0"),
    CONTEXT.replace("b7ad6b7169203331", 16 * "0"),
    CONTEXT.replace("0af7", "wxyz"),
    "ff" + CONTEXT[2:],
    CONTEXT.replace("-", " "),
    " " + CONTEXT,
    f"01{CONTEXT[2:]}-of-a-later-version",
    "\0" * 55,
    "ü" * 55,
    CONTEXT * 20_000,
)


class Traced:
    """A tracer, and what it has told."""

    def __init__(self) -> None:
        self._memory = InMemorySpanExporter()
        self.tracer = Tracer(Resource({}), [SimpleSpanProcessor(self._memory)])

    @property
    def spans(self) -> list[ReadableSpan]:
        """What has ended, in that order."""
        return list(self._memory.get_finished_spans())

    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def only(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Return the trace, the span and the span above it, in hex; "" for none above."""
    assert span.context is not None
    above = f"{span.parent.span_id:016x}" if span.parent else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", above


def about(span: ReadableSpan, *keys: str) -> list[Any]:
    """Return attributes by their last names."""
    found = dict(span.attributes or {})
    return [found.get(f"parashard.{key}") for key in keys]
