"""Tracer: ids of traces, contexts that travel, and a user's own spans, which are left alone."""

from __future__ import annotations

import random

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import StaleRound
from parashard.telemetry.trace_context import traceparent
from parashard.telemetry.tracer import sender, trace_id
from support.traced_cases import CONTEXT, MALFORMED, Traced, about, ids


def step(traced: Traced, number: int = 7, run: str = "run-1", parent: str = "") -> None:
    traced.tracer.begin_step(run, "worker-0", pb.Grant(step=number, traceparent=parent))
    traced.tracer.end_step(number, "completed")


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
    with traced.tracer.phase("pull", "worker-0", None):
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
        for number in range(64):
            step(traced, number)
        taken.append([about(span, "step") for span in traced.spans])
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
    with Traced().tracer.phase("pull", "worker-0", None) as span:
        context = sender(traceparent(span))
    assert context is not None
    found, written = get_current_span(context).get_span_context(), span.get_span_context()
    assert (found.trace_id, found.span_id, found.trace_flags) == (
        written.trace_id,
        written.span_id,
        written.trace_flags,
    )


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
        with pytest.raises(type(error)), traced.tracer.phase("push", "worker-0", 7):
            raise error
    told = [(s.attributes["error.type"], s.status.status_code, s.status.description) for s in traced.spans]  # type: ignore[index]
    assert told == [
        (StaleRound.code, StatusCode.ERROR, "round 3 is over"),
        ("RuntimeError", StatusCode.ERROR, "a model's"),
    ]


# --- a user's own spans ---


def test_a_users_provider_gets_no_span_of_ours_and_its_spans_stay_in_their_own_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    traced = Traced()
    traced.tracer.begin_step("run-1", "worker-0", pb.Grant(step=7))
    with traced.tracer.phase("compute", "worker-0", 7), trace.get_tracer("mine").start_as_current_span("layer"):
        step(traced, 8)
    traced.tracer.end_step(7, "completed")
    (layer,) = memory.get_finished_spans()
    assert (layer.name, layer.parent) == ("layer", None)
    assert traced.names() == ["step", "compute", "step"]
    assert ids(traced.spans[0])[::2] == (f"{trace_id('run-1', 8):032x}", "")
