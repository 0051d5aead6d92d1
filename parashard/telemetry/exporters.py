"""Exporters, samplers and queues of spans, configured by OpenTelemetry's own environment variables.

Spans leave in batches, from a bounded queue, on OpenTelemetry's own thread: no request waits for a collector.
Imported only by processes that trace.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from logging.handlers import BufferingHandler

from opentelemetry.sdk._shared_internal import BatchProcessor
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from parashard import __version__
from parashard.errors import ConfigurationError
from parashard.process.logs import log
from parashard.telemetry.tracer import Tracer

EXPORTERS = "opentelemetry_traces_exporter"  # the entry points by which packages offer them
PROTOCOLS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
SETTINGS = ("OTEL_BSP_", "OTEL_SPAN_", "OTEL_TRACES_SAMPLER")  # variables of samplers, limits and queues
READS_SETTINGS = "opentelemetry.sdk.trace"
HEARD_MAX = 1000  # warnings about settings
_ours = threading.local()  # `quiet` while a thread is in a processor or an exporter of ours


def tracer_from_environment(role: str, instance: str) -> Tracer:
    """Return a tracer that OpenTelemetry's variables configure; by default it sends by OTLP to localhost:4317."""
    ours = {"service.namespace": "parashard", "service.name": f"parashard-{role}", "service.version": __version__}
    ours |= {"service.instance.id": instance} if instance else {}
    names = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    exporters = [_exporter(name.strip()) for name in names.split(",") if name.strip() != "none"]
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    with _strictly():
        return Tracer(resource, [_Processor(_LossReporting(exporter)) for exporter in exporters])


def _exporter(name: str) -> SpanExporter:
    asked, variable = name, "OTEL_TRACES_EXPORTER"
    if name == "otlp":
        variable = "OTEL_EXPORTER_OTLP_PROTOCOL"
        asked = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(variable) or "grpc"
        name = PROTOCOLS.get(asked, asked)
    found = list(entry_points(group=EXPORTERS, name=name))
    if not found:
        there = {point.name for point in entry_points(group=EXPORTERS)}
        spoken = [protocol for protocol, offered in PROTOCOLS.items() if offered in there]
        allowed = ["otlp", "none", *there] if variable == "OTEL_TRACES_EXPORTER" else spoken
        raise ConfigurationError(
            f"environment {variable}: found {asked!r}; installed are: {', '.join(sorted(allowed))}"
        )
    try:
        exporter: SpanExporter = found[0].load()()
    except Exception as error:  # noqa: BLE001  # any error about its variables, such as a certificate's path
        raise ConfigurationError(f"environment OTEL_EXPORTER_*: the exporter {name} cannot be made: {error}") from None
    for module in {BatchProcessor.__module__, *(base.__module__ for base in type(exporter).__mro__)}:
        logging.getLogger(module).addFilter(_of_others)  # a program in this process may have its own exporters
    return exporter


def _of_others(record: logging.LogRecord) -> bool:
    """Tell whether a record is not of our exporters, which log each failed try: `_LossReporting` logs one line."""
    return not getattr(_ours, "quiet", False)


@contextmanager
def _quiet() -> Iterator[None]:
    before = getattr(_ours, "quiet", False)
    _ours.quiet = True
    try:
        yield
    finally:
        _ours.quiet = before


@contextmanager
def _strictly() -> Iterator[None]:
    """Raise ConfigurationError for a setting that OpenTelemetry refuses, or replaces by a default with a warning."""
    for name in [name for name, value in os.environ.items() if name.startswith(SETTINGS) and not value]:
        del os.environ[name]  # empty is the same as not set, by OpenTelemetry's specification
    logger, heard = logging.getLogger(READS_SETTINGS), BufferingHandler(HEARD_MAX)
    heard.setLevel(logging.WARNING)
    texts: list[str] = []
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(heard)
    try:
        yield
    except ValueError as error:
        texts.append(str(error))
    finally:
        logger.removeHandler(heard)
        logger.propagate = propagated
    texts = [record.getMessage() for record in heard.buffer] + texts
    if texts:
        said = texts[0].partition(". ")[0].rstrip(".")  # without the default that it would have taken
        why = re.sub(r"\b(max_\w+_size|schedule_delay)(_millis)?\b", lambda it: f"OTEL_BSP_{it[1].upper()}", said)
        found = [f"{name}={value!r}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
        raise ConfigurationError(f"environment: {why}; found {', '.join(found)}")


class _Processor(BatchSpanProcessor):
    """OpenTelemetry's processor, without a log line for each span that its full queue drops."""

    def on_end(self, span: ReadableSpan) -> None:
        with _quiet():
            super().on_end(span)


class _LossReporting(SpanExporter):
    """Wraps an exporter; logs once that spans are lost, and once that they arrive again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            with _quiet():
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
        with _quiet():
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)
