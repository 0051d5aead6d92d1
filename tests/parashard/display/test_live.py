"""Where the status of a running job goes: a view that redraws itself on a terminal, plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from parashard._proto import coordinator_pb2 as pb
from parashard.display.live import NoView, PlainView, TerminalView, console_for, open_view
from parashard.display.screen import plain_line
from support.status_cases import status_of


def console_of(*, terminal: bool = False, width: int = 160) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False), out


def test_a_terminal_gets_a_view_that_redraws_and_anything_else_plain_lines():
    terminal, _ = console_of(terminal=True)
    view = open_view(terminal)
    view.close()
    assert isinstance(view, TerminalView)
    assert isinstance(open_view(console_of()[0]), PlainView)


def test_plain_lines_come_now_and_then_and_every_event_once(monkeypatch):
    console, out = console_of(width=40)
    now_s = [100.0]
    monkeypatch.setattr("parashard.display.live.time.monotonic", lambda: now_s[0])
    view = PlainView(console)
    view.show(status_of(events=["a", "b"], events_total=2))
    view.show(status_of(events=["a", "b", "c"], events_total=3))
    now_s[0] += 10.0
    view.show(status_of(events=["c"], events_total=3))
    view.say("[said] by another")
    view.close()
    lines = out.getvalue().splitlines()
    assert [line[:5] for line in lines] == ["a", "b", "step ", "c", "step ", "[said"]
    assert lines[2] == plain_line(status_of())  # never wrapped: one line is one line, also in a log


def test_a_job_that_has_not_begun_gets_no_line_yet():
    console, out = console_of()
    PlainView(console).show(status_of(state=pb.JOB_STATE_STARTING, events=[], events_total=0))
    assert out.getvalue() == ""


def test_a_warning_and_its_end_stay_when_the_terminal_view_goes():
    console, out = console_of(terminal=True)
    view = TerminalView(console)
    try:
        for events in (["worker-0 started (cpu)", "warning: the disk is full"], ["resolved: the disk is full"]):
            view.show(status_of(events=events, events_total=2 if "warning" in events[-1] else 3))
        view.show(status_of(events=["data: 8 training rows"], events_total=4))
        view.say("shard-1 ended: exit code 1")
    finally:
        view.close()
    said = [line for line in out.getvalue().splitlines() if "\x1b" not in line or "ended" in line]
    assert any("shard-1 ended: exit code 1" in line for line in said)
    for staying in ("warning: the disk is full", "resolved: the disk is full", "data: 8 training rows"):
        assert staying in out.getvalue()


def test_no_view_shows_nothing():
    view = NoView()
    view.show(status_of())
    view.say("x")
    view.close()


@pytest.mark.parametrize("kind", [PlainView, TerminalView])
def test_a_terminal_or_a_pipe_that_is_gone_stops_no_job(kind: type[PlainView | TerminalView]) -> None:  # P21
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    view = kind(console_for(Gone()))
    view.show(status_of(events=["warning: x"], events_total=1))
    view.say("worker-0 is up")
    view.close()
