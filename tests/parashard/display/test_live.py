"""Where the status of a running job goes: a view that redraws itself on a terminal, plain lines elsewhere."""

import io
import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from parashard._proto import coordinator_pb2 as pb
from parashard.display.live import (
    STAYING_EVENTS,
    JobView,
    NotebookView,
    PlainView,
    TerminalView,
    console_for,
    open_view,
)
from parashard.display.screen import plain_line, progress_line, screen_lines
from parashard.display.status_tables import worker_columns
from support.status_cases import status_of, worker_of


def console_of(*, terminal: bool = False, width: int = 160) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False), out


def test_a_terminal_gets_a_view_that_redraws_and_anything_else_plain_lines():
    terminal, _ = console_of(terminal=True)
    view = open_view(terminal)
    view.close()
    assert isinstance(view, TerminalView)
    assert isinstance(open_view(console_of()[0]), PlainView)


def test_a_notebook_gets_one_line_that_is_updated_in_place_and_the_events_that_stay(monkeypatch):
    cells: list[list[str]] = []  # each is an output of the cell, with what it has shown

    class Handle:
        def __init__(self, cell: list[str]) -> None:
            self.cell = cell

        def update(self, content: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.cell.append(content["text/plain"])

    def display(content: Any, *, raw: bool = False, display_id: bool = False) -> Handle:
        found = content if raw else content._repr_mimebundle_(["text/plain"], [])
        cells.append([found["text/plain"].strip()])
        return Handle(cells[-1])

    fake = ModuleType("IPython.display")
    fake.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    now_s = [100.0]
    monkeypatch.setattr("parashard.display.live.time.monotonic", lambda: now_s[0])
    view = open_view(Console(file=io.StringIO(), force_jupyter=True))
    assert isinstance(view, NotebookView)
    statuses = [status_of(steps_complete=steps, events=[], events_total=0) for steps in (0, 100, 400, 1000)]
    view.show(statuses[0])
    view.show(statuses[1])  # too soon
    now_s[0] += 1.0
    view.show(statuses[2])
    view.show(status_of(steps_complete=1000, events=["fit started (cpu)", "warning: slow"], events_total=2))
    view.close()
    view.close()
    assert cells == [[progress_line(statuses[place]) for place in (0, 2, 3)], ["warning: slow"]]
    assert "----- 400 of 1,000 steps (40 %)" in cells[0][1]


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


def test_a_plain_view_tells_a_cause_once_however_often_it_fails():
    console, out = console_of()
    view = PlainView(console)
    failed = "worker-{} failed at step {:,} (examples 7, 2, ...): net.py:6: ValueError: bad value {}"
    events = [
        failed.format(0, 1, 5),
        failed.format(1, 2000, 6),
        failed.format(0, 1, 7),
        "worker-1 failed at step 3: NaN",
    ]
    view.show(status_of(state=pb.JOB_STATE_STARTING, events=events, events_total=4))
    assert out.getvalue().splitlines() == [events[0], events[3]]


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


SILENT = "shard-1 does not answer; training is paused until it does"
WARNED = status_of(problems=[SILENT], events=["worker-0 started (cpu)", f"warning: {SILENT}"], events_total=2)
ANSWERED = status_of(events=[f"warning: {SILENT}", "resolved: shard-1 answers again"], events_total=3)


class SayingView(TerminalView):
    """Remembers what it prints above itself."""

    def __init__(self):
        super().__init__(console_of(terminal=True)[0])
        self.said = []

    def say(self, text):
        self.said.append(text)


def lines_about_the_shard(view, status):
    screen = screen_lines(status, 80, 23, elsewhere=STAYING_EVENTS)
    lines = [*view.said, *(line.plain for line in screen)]
    told = ("warning: shard-1", "! shard-1", "resolved: shard-1")
    return [line for line in lines if line.startswith(told)]


def test_a_warning_is_on_the_terminal_once_while_it_holds_and_once_when_it_is_over():
    view = SayingView()
    try:
        view.show(WARNED)
        view.show(WARNED)
        assert [line[:9] for line in lines_about_the_shard(view, WARNED)[:1]] == ["! shard-1"]
        assert (len(lines_about_the_shard(view, WARNED)), view.said) == (1, [])
        view.show(ANSWERED)
        view.show(ANSWERED)
        told = [f"warning: {SILENT}", "resolved: shard-1 answers again"]
        assert (view.said, lines_about_the_shard(view, ANSWERED)) == (told, told)
    finally:
        view.close()
    assert len(view.said) == 2


def test_what_is_wrong_when_the_terminal_view_goes_stays():
    view = SayingView()
    view.show(WARNED)
    view.close()
    assert view.said == [f"warning: {SILENT}"]


def test_no_view_shows_nothing():
    view = JobView()
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


def test_the_memory_of_gpus_and_the_wait_for_them_are_shown_where_there_are_some() -> None:
    workers = [worker_of(0), worker_of(1, device="cpu")]
    assert "GPU GiB" not in [column.title for column in worker_columns(workers)]
    workers[0].gpu_memory.used_bytes, workers[0].gpu_memory.total_bytes = 12 << 30, 80 << 30
    columns = {column.title: column.cells for column in worker_columns(workers)}
    assert (columns["GPU GiB"], columns["GPU wait %"]) == (("12.0/80.0", "-"), ("0", "-"))
    workers[0].phases.gpu_wait = workers[0].phases.compute / 4
    columns = {column.title: column.cells for column in worker_columns(workers)}
    assert columns["GPU wait %"] == ("25", "-")
