"""Tracer: OpenTelemetry spans; all executions of a step share one trace.

Owns the ids of traces, how a span's context is written and read, and how spans leave the process: in batches, from a
bounded queue, on a thread of OpenTelemetry's own, so that no request waits for a collector. Where they go, and
how many of them, is said by OpenTelemetry's own environment variables. Knows no service: the `traced` module of each
says what is a span. Imported only by processes that trace.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from parashard import __version__
from parashard.errors import ConfigurationError, ParashardError
from parashard.process.logs import log

TRACEPARENT_BYTES = 55  # version 00 of W3C Trace Context: 2 + 32 + 16 + 2 hexadecimal digits and three dashes
CLOSE_S = 1.0
EXPORTERS = "opentelemetry_traces_exporter"  # the entry points by which packages offer them
PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
SETTINGS = ("OTEL_BSP_", "OTEL_SPAN_", "OTEL_TRACES_SAMPLER")  # variables of what is not an exporter's
READS_SETTINGS = "opentelemetry.sdk.trace"
NOISY = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")  # a line for every failed try and batch

Attributes = dict[str, AttributeValue]

_w3c = TraceContextTextMapPropagator()


def trace_id(run_id: str, step: int) -> int:
    """Return the id of the trace that all executions of a step share, on any worker and however many there are."""
    return int.from_bytes(hashlib.blake2b(f"{run_id}/{step}".encode(), digest_size=16).digest())


def traceparent(span: Span | None = None) -> str:
    """Return the context of a span, by default of the current one, for a request; empty if there is none."""
    carrier: dict[str, str] = {}
    _w3c.inject(carrier, None if span is None else set_span_in_context(span))
    return carrier.get("traceparent", "")


def sender(text: str) -> Context | None:
    """Return the context that came with a request; None if there is none, or it is malformed."""
    if len(text) != TRACEPARENT_BYTES:
        return None
    context = _w3c.extract({"traceparent": text}, Context())
    return context if get_current_span(context).get_span_context().is_valid else None


class Tracer:
    """Makes spans.

    Parameters
    ----------
    resource : Resource
        Whose spans these are.
    processors : sequence of SpanProcessor
        Where they go.
    """

    def __init__(self, resource: Resource, processors: Sequence[SpanProcessor]) -> None:
        self._ids = _Ids()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        for processor in processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("parashard", __version__)

    def of_step(
        self,
        name: str,
        run_id: str,
        step: int,
        *,
        parent: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes,
    ) -> Span:
        """Begin a span below the one that a request came with; without one it begins in the step's own trace."""
        with self._ids.next_trace(trace_id(run_id, step)):
            about = {"parashard.run": run_id, "parashard.step": step, **attributes}
            return self._tracer.start_span(name, sender(parent) or Context(), kind, about)

    @contextmanager
    def within(
        self, name: str, parent: Context, *, kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes
    ) -> Iterator[Span]:
        """Be in a span below another; an error that leaves it is told by its permanent code."""
        with self._tracer.start_as_current_span(
            name, parent, kind, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                failed(span, error)
                raise

    def past(self, name: str, start_ns: int, stop_ns: int, attributes: Attributes) -> None:
        """Tell a span, below the current one, that is over already; times are those of `time.time_ns`."""
        span = self._tracer.start_span(name, attributes=attributes, start_time=start_ns)
        span.end(stop_ns)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, and wait for that no longer than this; what has not gone by then is lost."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)


def failed(span: Span, error: BaseException) -> None:
    """Note that a span ended by an error."""
    if isinstance(error, ParashardError):
        span.set_attribute("error.type", error.code)
        span.set_status(StatusCode.ERROR, error.message)
    else:
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(StatusCode.ERROR, str(error))


def from_environment(role: str, instance: str) -> Tracer:
    """Return a tracer that sends spans where OpenTelemetry's variables say; by default to localhost:4317, by OTLP.

    Raises
    ------
    ConfigurationError
        If no exporter has the name that OTEL_TRACES_EXPORTER says, it cannot be made, or another variable is not right.
    """
    ours = {"service.namespace": "parashard", "service.name": f"parashard-{role}", "service.version": __version__}
    ours |= {"service.instance.id": instance} if instance else {}
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # `_Told` has one line for all of it
    names = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    exporters = [_exporter(name.strip()) for name in names.split(",") if name.strip() != "none"]
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    with _strictly():
        return Tracer(resource, [BatchSpanProcessor(_Told(exporter)) for exporter in exporters])


def _exporter(name: str) -> SpanExporter:
    asked, variable = name, "OTEL_TRACES_EXPORTER"
    if name == "otlp":
        variable = "OTEL_EXPORTER_OTLP_PROTOCOL"
        asked = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(variable) or "grpc"
        name = PROTOCOLS.get(asked, asked)
    found = list(entry_points(group=EXPORTERS, name=name))
    if not found:
        there = {point.name for point in entry_points(group=EXPORTERS)}
        allowed = ["otlp", "none", *there] if variable == "OTEL_TRACES_EXPORTER" else _spoken(there)
        raise ConfigurationError(
            f"environment {variable}: found {asked!r}; installed are: {', '.join(sorted(allowed))}"
        )
    try:
        exporter: SpanExporter = found[0].load()()
    except Exception as error:  # noqa: BLE001  # whatever it makes of its variables, such as a certificate's path
        raise ConfigurationError(f"environment OTEL_EXPORTER_*: the exporter {name} cannot be made: {error}") from None
    return exporter


def _spoken(there: set[str]) -> list[str]:
    return [protocol for protocol, name in PROTOCOLS.items() if name in there]


@contextmanager
def _strictly() -> Iterator[None]:
    """Refuse what OpenTelemetry raises about its settings, and also what it only logs before it takes a default."""
    for name in [name for name, value in os.environ.items() if name.startswith(SETTINGS) and not value]:
        del os.environ[name]  # empty is the same as not set, by OpenTelemetry's specification
    logger, heard = logging.getLogger(READS_SETTINGS), _Heard()
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(heard)
    try:
        yield
    except ValueError as error:
        heard.texts.append(str(error))
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagated
    if heard.texts:
        said = heard.texts[0].partition(". ")[0].rstrip(".")  # not which default it would have taken
        why = re.sub(r"\b(max_\w+_size|schedule_delay)(_millis)?\b", lambda it: f"OTEL_BSP_{it[1].upper()}", said)
        found = [f"{name}={value!r}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
        raise ConfigurationError(f"environment: {why}; found {', '.join(found)}")


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class _Ids(IdGenerator):
    """Random ids, except of the trace that a step's span begins.

    From the system: the `random` module's state may be a model's, to be seeded alike in all workers, and to be left
    as it is.
    """

    def __init__(self) -> None:
        self._next = threading.local()

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1  # 0 is no id

    def generate_trace_id(self) -> int:
        return getattr(self._next, "trace_id", None) or secrets.randbits(128) or 1

    @contextmanager
    def next_trace(self, number: int) -> Iterator[None]:
        """Let a trace that begins in here have this id."""
        self._next.trace_id = number
        try:
            yield
        finally:
            self._next.trace_id = None


class _Told(SpanExporter):
    """Another exporter, which tells once that spans are lost, and once that they arrive again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result, why = self._inner.export(spans), "not taken by the collector"
        except Exception as error:  # noqa: BLE001  # an error of an exporter must not end its thread
            result, why = SpanExportResult.FAILURE, repr(error)
        if (result is not SpanExportResult.SUCCESS) != self._failing:
            self._failing = not self._failing
            if self._failing:
                log.warning("spans-lost", reason=why)
            else:
                log.info("spans-arrive-again")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
