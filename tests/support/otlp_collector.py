"""A collector of traces: a gRPC server that takes what OpenTelemetry's exporters send, and keeps it."""

from __future__ import annotations

import threading
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True)
class Sent:
    """A span as it arrived."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    about: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port until `stop`."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []  # what has come
        self._adding = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"  # host:port
        self._server.start()

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        with self._adding:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_sent(span, service) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def named(self, name: str, service: str = "") -> list[Sent]:
        """Return the spans of a name, and of a service where it is said."""
        return [span for span in self.spans if span.name == name and span.service.endswith(service)]


def _sent(span: Any, service: str) -> Sent:
    return Sent(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found
