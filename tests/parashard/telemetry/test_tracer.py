"""Tracer: ids of traces, contexts that travel, and spans that are sent in the background."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, StatusCode, get_current_span

from parashard.errors import ConfigurationError, StaleRound
from parashard.telemetry import tracer as tracer_module
from parashard.telemetry.tracer import Tracer, from_environment, sender, trace_id, traceparent
from support.logs import capture_logs
from support.traced_cases import CONTEXT, MALFORMED, Traced, ids
from support.waiting import DEADLINE_S


def step(traced: Traced, number: int = 7, run: str = "run-1", parent: str = "") -> Span:
    span = traced.tracer.of_step("step", run, number, parent=parent, attributes={})
    span.end()
    return span


# --- ids ---


def test_all_executions_of_a_step_meet_in_one_trace() -> None:
    here, there = Traced(), Traced()
    for traced in (here, here, there):
        step(traced)
    found = [ids(span) for span in here.spans + there.spans]
    assert {trace for trace, _, _ in found} == {f"{trace_id('run-1', 7):032x}"}
    assert len({span for _, span, _ in found}) == 3


def test_other_steps_and_runs_have_other_traces() -> None:
    traced = Traced()
    for run, number in (("run-1", 7), ("run-1", 8), ("run-2", 7), ("run-1/7", 7)):
        step(traced, number, run)
    assert len({ids(span)[0] for span in traced.spans}) == 4


def test_what_begins_after_a_step_has_a_trace_of_its_own() -> None:
    traced = Traced()
    step(traced)
    with traced.tracer.within("pull", Context(), attributes={}):
        pass
    assert ids(traced.spans[1])[0] != ids(traced.spans[0])[0]


def test_a_models_random_numbers_are_left_alone_and_do_not_make_ids() -> None:
    random.seed(1)
    before = random.getstate()
    traced = Traced()
    step(traced)
    assert random.getstate() == before
    random.seed(1)
    step(traced)
    assert ids(traced.spans[0])[1] != ids(traced.spans[1])[1]


@pytest.mark.parametrize("ratio", ["0", "0.5", "1"])
def test_a_ratio_takes_the_same_steps_in_every_process(ratio: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    taken = []
    for traced in (Traced(), Traced()):
        taken.append([number for number in range(64) if step(traced, number).get_span_context().trace_flags.sampled])
    assert taken[0] == taken[1]
    assert {"0": 0, "1": 64}.get(ratio, len(taken[0])) == len(taken[0])
    assert ratio != "0.5" or 0 < len(taken[0]) < 64


# --- contexts ---


def test_a_span_goes_below_the_one_that_a_request_came_with() -> None:
    traced = Traced()
    step(traced, parent=CONTEXT)
    trace, _, above = ids(traced.spans[0])
    assert f"00-{trace}-{above}-01" == CONTEXT


def test_a_context_is_written_as_it_is_read() -> None:
    traced = Traced()
    span = step(traced)
    context = sender(traceparent(span))
    assert context is not None
    assert get_current_span(context).get_span_context().span_id == span.get_span_context().span_id
    with traced.tracer.within("pull", context, attributes={}) as below:
        assert traceparent() == traceparent(below)
    assert traceparent() == ""


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_context_is_ignored(text: str) -> None:
    assert sender(text) is None
    traced = Traced()
    step(traced, parent=text)
    assert ids(traced.spans[0])[::2] == (f"{trace_id('run-1', 7):032x}", "")


def test_what_a_sender_does_not_record_is_not_recorded_below() -> None:
    traced = Traced()
    step(traced, parent=CONTEXT[:-1] + "0")
    assert traced.spans == []


def test_an_error_is_reported_by_its_code_and_goes_on() -> None:
    traced = Traced()
    for error in (StaleRound("round 3 is over"), RuntimeError("a model's")):
        with pytest.raises(type(error)), traced.tracer.within("push", Context(), attributes={}):
            raise error
    told = [(s.attributes["error.type"], s.status.status_code, s.status.description) for s in traced.spans]  # type: ignore[index]
    assert told == [
        (StaleRound.code, StatusCode.ERROR, "round 3 is over"),
        ("RuntimeError", StatusCode.ERROR, "a model's"),
    ]


def test_what_is_over_is_reported_with_its_times() -> None:
    traced = Traced()
    with traced.tracer.within("push", Context(), attributes={}):
        traced.tracer.past("apply", 1_000, 3_000, {})
    apply, push = traced.spans
    assert (apply.start_time, apply.end_time, ids(apply)[2]) == (1_000, 3_000, ids(push)[1])


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
        tracer.of_step("step", "run-1", number, attributes={}).end()
    assert collector.called.wait(DEADLINE_S)
    tracer.close(timeout_s=0.01)
    assert collector.taken == 0  # it hangs still, and we are here
    collector.hold.set()
    tracer.close(timeout_s=DEADLINE_S)
    assert collector.taken <= 110


def test_what_is_left_goes_at_the_end() -> None:
    collector = Collector()
    tracer = Tracer(Resource({}), [BatchSpanProcessor(collector)])
    tracer.of_step("step", "run-1", 7, attributes={}).end()
    tracer.close(DEADLINE_S)
    assert collector.taken == 1


def test_lost_spans_are_reported_once_until_they_arrive_again() -> None:
    inner = Collector()
    exporter = tracer_module._Told(inner)
    inner.results = [SpanExportResult.FAILURE, OSError("gone"), SpanExportResult.SUCCESS, OSError("gone")]
    with capture_logs() as logs:
        results = [exporter.export([]) for _ in range(5)]
    assert [entry["event"] for entry in logs] == ["spans-lost", "spans-arrive-again"] * 2
    assert [result is SpanExportResult.SUCCESS for result in results] == [False, False, True, False, True]


def test_a_collector_that_is_not_there_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in tracer_module.NOISY:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    for name, value in (
        ("OTEL_TRACES_EXPORTER", "otlp"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "4"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    tracer = from_environment("worker", "worker-0")
    with capture_logs() as logs:
        for number in range(100):
            tracer.of_step("step", "run-1", number, attributes={}).end()
        tracer.close(DEADLINE_S)
    assert [entry["event"] for entry in logs] == ["spans-lost"]
    assert [record.getMessage() for record in caplog.records] == ["spans-lost"]


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
    found = resource_of(from_environment("shard", "shard-1"))
    assert (found["service.name"], found["service.instance.id"]) == ("parashard-shard", "shard-1")


def test_the_environment_may_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=spot")
    found = resource_of(from_environment("shard", "shard-1"))
    assert (found["service.name"], found["deployment.environment"]) == ("mine", "spot")


@pytest.mark.parametrize("names", ["otlp", "", "console", "otlp, console", "otlp_proto_grpc"])
def test_exporters_are_those_that_are_installed(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", names)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    from_environment("shard", "shard-1").close(0.0)


def test_an_unknown_exporter_is_refused_with_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(ConfigurationError, match=r"OTEL_TRACES_EXPORTER: found 'jaeger'; installed are: console, none"):
        from_environment("shard", "shard-1")


def test_an_unknown_protocol_is_refused_with_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not entry_points(group=tracer_module.EXPORTERS, name="otlp_proto_http")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ConfigurationError, match=r"_PROTOCOL: found 'http/protobuf'; installed are: grpc$"):
        from_environment("shard", "shard-1")


def test_an_exporter_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(ConfigurationError, match="exporter otlp_proto_grpc cannot be made"):
        from_environment("shard", "shard-1")


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
        from_environment("shard", "shard-1")
    assert all(f"{name}='{value}'" in str(caught.value) for name, value in variables.items())
    assert "\n" not in str(caught.value)
    assert caplog.records == []


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    for name in ("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_TRACES_SAMPLER", "OTEL_SPAN_EVENT_COUNT_LIMIT"):
        monkeypatch.setenv(name, "")
    from_environment("shard", "shard-1").close(0.0)
    assert caplog.records == []


def test_what_opentelemetry_logs_later_is_not_kept_back(caplog: pytest.LogCaptureFixture) -> None:
    from_environment("shard", "shard-1").close(0.0)
    logging.getLogger(f"{tracer_module.READS_SETTINGS}.export").warning("later")
    assert [record.getMessage() for record in caplog.records] == ["later"]
