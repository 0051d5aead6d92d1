"""What a person sees of a running job: any status can be shown, whatever it lacks and whatever its names contain."""

import io

import pytest
from rich.console import Console

from parashard.live import EVENTS_SHOWN, NoView, PlainView, TerminalView, one_line, open_view, render
from protos import coordinator_pb2 as pb
from protos import shard_pb2


def status_of(**more: object) -> pb.GetStatusReply:
    fields: dict[str, object] = {
        "job": "digits",
        "state": pb.JOB_STATE_RUNNING,
        "steps_total": 1000,
        "steps_complete": 250,
        "examples_per_s": 12345.6,
        "elapsed_s": 10.0,
        "loss": 0.123456,
        "metrics": {"accuracy": 0.97},
        "staleness_p50": 1,
        "staleness_p95": 3,
        "staleness_max": 7,
        "step_lag_max": 4,
        "consistency": "ssp:8",
        "http_address": "127.0.0.1:9",
        "workers": [
            pb.WorkerStatus(
                name="worker-0",
                live=True,
                device="cpu",
                steps_complete=200,
                steps_held=8,
                phases=pb.PhaseSeconds(lease=1, pull=2, compute=6, push=1, transfer=6),
            ),
            pb.WorkerStatus(name="worker-1", device="cpu", restarts=2),
        ],
        "shards": [
            pb.ShardStatus(
                shard=0,
                registered=True,
                record=shard_pb2.InspectReply(
                    version=250,
                    variable_bytes=3 << 20,
                    slot_bytes=1 << 20,
                    push_bytes=1 << 20,
                    push_float32_bytes=4 << 20,
                ),
            ),
            pb.ShardStatus(shard=1),
        ],
        "events": ["worker-1 ended: killed by SIGKILL"],
        "events_total": 1,
    }
    return pb.GetStatusReply(**(fields | more))


def console_of(*, terminal: bool = False, width: int = 160) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False), out


def shown(status: pb.GetStatusReply, width: int = 160) -> str:
    console, out = console_of(width=width)
    console.print(render(status))
    return out.getvalue()


def test_the_view_says_how_the_job_goes():
    text = shown(status_of())
    for part in (
        "digits  running  ssp:8  http://127.0.0.1:9/",
        "250 of 1,000 steps",
        "10 s, 30 s left",
        "12,346 examples/s",
        "loss 0.1235",
        "held-out accuracy 0.9700",
        "staleness p50 1 p95 3 max 7",
        "step lag max 4",
        "transfer hidden 50 %  bytes saved 75 %",
        " 10%  20%  60%  10%",
        "worker-1 ended: killed by SIGKILL",
    ):
        assert part in text, part


def test_who_is_away_is_marked():
    lines = shown(status_of()).splitlines()
    assert "cpu" in next(line for line in lines if line.startswith("worker-0"))
    assert "away" in next(line for line in lines if line.startswith("worker-1"))
    shard = next(line for line in lines if line.startswith("shard-0"))
    assert shard.split()[1:3] == ["250", "4.0"]
    assert any(line.startswith("shard-1") for line in lines)


def test_only_the_latest_events_are_shown():
    text = shown(status_of(events=[f"event {i}." for i in range(20)]))
    assert [i for i in range(20) if f"event {i}." in text] == list(range(20 - EVENTS_SHOWN, 20))


@pytest.mark.parametrize(
    "status",
    [
        pb.GetStatusReply(),
        status_of(steps_complete=0, elapsed_s=0.0, loss=0.0, metrics={}, workers=[], shards=[], events=[]),
        status_of(steps_total=0, steps_complete=0),
        status_of(state=pb.JOB_STATE_FAILED, loss=float("nan"), examples_per_s=float("inf")),
        status_of(steps_complete=2000),
    ],
    ids=["nothing", "before the first step", "no steps", "failed", "more than all"],
)
@pytest.mark.parametrize("width", [160, 20])
def test_every_status_can_be_shown(status, width):
    assert shown(status, width)
    assert one_line(status).startswith("step ")


@pytest.mark.parametrize("name", ["[/]", "[bold]", "[/red]", "[link=x", "worker[0]", ":smile:"])
def test_names_of_others_are_text_and_no_markup(name):
    worker = pb.WorkerStatus(name=name, live=True, device=f"cuda:0 {name}")
    text = shown(status_of(job=name, workers=[worker], metrics={name: 0.5}, events=[name]))
    assert text.count(name) == 5


def test_one_line_has_the_figures():
    assert one_line(status_of()) == (
        "step 250/1000 (25 %)  12,346 examples/s  loss 0.1235  held-out accuracy 0.9700  "
        "staleness p50 1 max 7  workers 1"
    )


# --- views ---


def test_a_terminal_gets_a_view_that_redraws_and_anything_else_plain_lines():
    terminal, _ = console_of(terminal=True)
    view = open_view(terminal)
    view.close()
    assert isinstance(view, TerminalView)
    assert isinstance(open_view(console_of()[0]), PlainView)


def test_plain_lines_come_now_and_then_and_every_event_once(monkeypatch):
    console, out = console_of(width=40)
    now_s = [100.0]
    monkeypatch.setattr("parashard.live.time.monotonic", lambda: now_s[0])
    view = PlainView(console)
    view.show(status_of(events=["a", "b"], events_total=2))
    view.show(status_of(events=["a", "b", "c"], events_total=3))
    now_s[0] += 10.0
    view.show(status_of(events=["c"], events_total=3))
    view.say("[said] by another")
    view.close()
    lines = out.getvalue().splitlines()
    assert [line[:5] for line in lines] == ["a", "b", "step ", "c", "step ", "[said"]
    assert lines[2] == one_line(status_of())  # never wrapped: one line is one line, also in a log


def test_a_job_that_has_not_begun_gets_no_line_yet():
    console, out = console_of()
    PlainView(console).show(status_of(state=pb.JOB_STATE_STARTING, events=[], events_total=0))
    assert out.getvalue() == ""


def test_a_warning_stays_when_the_terminal_view_goes():
    console, out = console_of(terminal=True)
    view = TerminalView(console)
    try:
        view.show(status_of(events=["worker-0 joined", "warning: the loss runs away"], events_total=2))
        view.show(status_of(events=["warning: the loss runs away", "data: 8 training rows"], events_total=3))
        view.show(status_of(events=["worker-0 joined", "warning: the loss runs away"], events_total=2))
        view.say("shard-1 ended: exit code 1")
    finally:
        view.close()
    said = [line for line in out.getvalue().splitlines() if "\x1b" not in line or "ended" in line]
    assert any("shard-1 ended: exit code 1" in line for line in said)
    assert "warning: the loss runs away" in out.getvalue()
    assert "data: 8 training rows" in out.getvalue()


def test_the_metrics_of_a_regression_are_named_in_words():
    status = status_of(metrics={"mean_squared_error": 2.5e9})
    for text in (shown(status), one_line(status)):
        assert "held-out mean squared error 2.5e+09" in text


def test_no_view_shows_nothing():
    view = NoView()
    view.show(status_of())
    view.say("x")
    view.close()
