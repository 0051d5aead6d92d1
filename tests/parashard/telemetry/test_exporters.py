"""Exporters: spans are sent in the background, and the environment says where."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ConfigurationError
from parashard.telemetry import exporters
from parashard.telemetry.exporters import tracer_from_environment
from parashard.telemetry.tracer import Tracer
from support.logs import capture_logs
from support.waiting import DEADLINE_S


def step(tracer: Tracer, number: int) -> None:
    tracer.begin_step("run-1", "worker-0", pb.Grant(step=number))
    tracer.end_step(number, "completed")


# --- on their way ---


class Collector(SpanExporter):
    """An exporter that waits, raises or takes, as a test says."""

    def __init__(self) -> None:
        self.results: list[SpanExportResult | Exception] = []
        self.taken = 0
        self.called, self.hold = threading.Event(), threading.Event()
        self.hold.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.hold.wait(DEADLINE_S)
        result = self.results.pop(0) if self.results else SpanExportResult.SUCCESS
        if isinstance(result, Exception):
            raise result
        self.taken += len(spans)
        return result

    def shutdown(self) -> None:
        self.hold.set()


def test_a_collector_that_hangs_delays_no_span_and_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    collector = Collector()
    collector.hold.clear()
    tracer = Tracer(Resource({}), [BatchSpanProcessor(collector)])
    for number in range(1000):
        step(tracer, number)
    assert collector.called.wait(DEADLINE_S)
    tracer.close(timeout_s=0.01)
    assert collector.taken == 0  # it hangs still, and we are here
    collector.hold.set()
    tracer.close(timeout_s=DEADLINE_S)
    assert collector.taken <= 110


def test_what_is_left_goes_at_the_end() -> None:
    collector = Collector()
    tracer = Tracer(Resource({}), [BatchSpanProcessor(collector)])
    step(tracer, 7)
    tracer.close(DEADLINE_S)
    assert collector.taken == 1


def test_lost_spans_are_reported_once_until_they_arrive_again() -> None:
    inner = Collector()
    exporter = exporters._LossReporting(inner)
    inner.results = [SpanExportResult.FAILURE, OSError("gone"), SpanExportResult.SUCCESS, OSError("gone")]
    with capture_logs() as logs:
        results = [exporter.export([]) for _ in range(5)]
    assert [entry["event"] for entry in logs] == ["spans-lost", "spans-arrive-again"] * 2
    assert [result is SpanExportResult.SUCCESS for result in results] == [False, False, True, False, True]


def test_a_collector_that_is_not_there_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("OTEL_TRACES_EXPORTER", "otlp"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "4"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    tracer = tracer_from_environment("worker", "worker-0")
    with capture_logs() as logs:
        for number in range(100):
            step(tracer, number)
        tracer.close(DEADLINE_S)
    assert [entry["event"] for entry in logs] == ["spans-lost"]
    assert [record.getMessage() for record in caplog.records] == ["spans-lost"]


class Loud(Collector):
    """An exporter that logs each try, by the logger of its module."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        logging.getLogger(__name__).error("a try failed")
        return super().export(spans)


def test_a_programs_own_exporters_log_as_without_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "loud")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setattr(exporters, "entry_points", lambda **_: [SimpleNamespace(load=lambda: Loud)])
    ours = tracer_from_environment("worker", "worker-0")
    step(ours, 7)
    ours.close(DEADLINE_S)
    assert caplog.records == []
    own = Loud()
    own.export([])
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").error("the program's")
    logging.getLogger("opentelemetry.sdk._shared_internal").error("its processor's")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a try failed", "the program's", "its processor's"]


# --- what the environment says ---


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of this machine's into the tests, and nothing of theirs out of it."""
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")


def resource_of(tracer: Tracer) -> dict[str, object]:
    return dict(tracer._provider.resource.attributes)


def test_spans_say_whose_they_are() -> None:
    found = resource_of(tracer_from_environment("shard", "shard-1"))
    assert (found["service.name"], found["service.instance.id"]) == ("parashard-shard", "shard-1")


def test_the_environment_may_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=spot")
    found = resource_of(tracer_from_environment("shard", "shard-1"))
    assert (found["service.name"], found["deployment.environment"]) == ("mine", "spot")


@pytest.mark.parametrize("names", ["otlp", "", "console", "otlp, console", "otlp_proto_grpc"])
def test_exporters_are_those_that_are_installed(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", names)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer_from_environment("shard", "shard-1").close(0.0)


def test_an_unknown_exporter_is_refused_with_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(ConfigurationError, match=r"OTEL_TRACES_EXPORTER: found 'jaeger'; installed are: console, none"):
        tracer_from_environment("shard", "shard-1")


def test_an_unknown_protocol_is_refused_with_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not entry_points(group=exporters.EXPORTERS, name="otlp_proto_http")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ConfigurationError, match=r"_PROTOCOL: found 'http/protobuf'; installed are: grpc$"):
        tracer_from_environment("shard", "shard-1")


def test_an_exporter_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(ConfigurationError, match="exporter otlp_proto_grpc cannot be made"):
        tracer_from_environment("shard", "shard-1")


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        (
            {"OTEL_BSP_MAX_QUEUE_SIZE": "100"},
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE must be .* equal to OTEL_BSP_MAX_QUEUE_SIZE;",
        ),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE as integer"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "-1"}, "OTEL_BSP_SCHEDULE_DELAY must be positive;"),
        ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-4"}, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative"),
        ({"OTEL_TRACES_SAMPLER": "nonsense"}, "recognize sampler nonsense;"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "7"}, "TRACES_SAMPLER_ARG to float"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_is_not_right_is_refused_in_one_line(
    variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"^environment: .*{why}") as caught:
        tracer_from_environment("shard", "shard-1")
    assert all(f"{name}='{value}'" in str(caught.value) for name, value in variables.items())
    assert "\n" not in str(caught.value)
    assert caplog.records == []


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    for name in ("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_TRACES_SAMPLER", "OTEL_SPAN_EVENT_COUNT_LIMIT"):
        monkeypatch.setenv(name, "")
    tracer_from_environment("shard", "shard-1").close(0.0)
    assert caplog.records == []


def test_what_opentelemetry_logs_later_is_not_kept_back(caplog: pytest.LogCaptureFixture) -> None:
    tracer_from_environment("shard", "shard-1").close(0.0)
    logging.getLogger(f"{exporters.READS_SETTINGS}.export").warning("later")
    assert [record.getMessage() for record in caplog.records] == ["later"]
