"""Write a span's context for a request; also for code that only forwards it, so OpenTelemetry is not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def traceparent(span: Span) -> str:
    """Return a span's context as W3C Trace Context writes it, for a request."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
