"""The live view of a run: redrawn on a terminal, one line that changes in a notebook, plain lines elsewhere."""

from __future__ import annotations

import importlib
import time
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from parashard._proto import coordinator_pb2 as pb
from parashard.display.screen import WARNING, StatusScreen, failure_cause, plain_line, progress_line, shown_warnings
from parashard.process.best_effort import lossy

PLAIN_EVERY_S = 2.0
NOTEBOOK_EVERY_S = 0.25
CAUSES_MAX = 50
"""Most distinct causes of failed attempts that a plain view prints; the report and the logs have all."""
STAYING_EVENTS = (WARNING, "resolved: ", "data: ")


class JobView:
    """Shows a job's status, and lines of text; this one shows nothing: standard output is for the report alone."""

    _seen = 0  # events

    def show(self, status: pb.GetStatusReply) -> None:
        """Show the present status."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Restore the terminal."""

    def _new_events(self, status: pb.GetStatusReply) -> list[str]:
        """Return the events since the last call, oldest first."""
        new = status.events_total - self._seen
        self._seen = status.events_total
        return list(status.events[-new:]) if new > 0 else []


class TerminalView(JobView):
    """A view that redraws itself in place; warnings, their ends and the description of the data stay above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text("starting"), console=console, refresh_per_second=4, transient=True)
        self._live.start()
        self._staying: list[str] = []

    def show(self, status: pb.GetStatusReply) -> None:
        """Print the events that stay and are not in view, and redraw."""
        self._staying += [event for event in self._new_events(status) if event.startswith(STAYING_EVENTS)]
        in_view = shown_warnings(status)
        self._print_staying([event for event in self._staying if event not in in_view])
        self._live.update(StatusScreen(status, fits_height=True, elsewhere=STAYING_EVENTS))

    def say(self, text: str) -> None:
        """Print above the view."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """Clear the view, and print the warnings that were in it."""
        self._print_staying(list(self._staying))
        self._live.stop()

    def _print_staying(self, events: list[str]) -> None:
        for event in events:
            self._staying.remove(event)
            self.say(event)


class PlainView(JobView):
    """One line every PLAIN_EVERY_S, and every event; attempts that fail at the same line of a model are shown once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0
        self._causes: set[str] = set()

    def show(self, status: pb.GetStatusReply) -> None:
        """Print the events that are new, and a line if it is time."""
        for event in self._new_events(status):
            if self._is_new_cause(event):
                self.say(event)
        if status.state == pb.JOB_STATE_RUNNING and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PLAIN_EVERY_S
            self.say(plain_line(status))

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _is_new_cause(self, event: str) -> bool:
        cause = failure_cause(event)
        if cause is None:
            return True
        if cause in self._causes or len(self._causes) >= CAUSES_MAX:
            return False
        self._causes.add(cause)
        return True


class NotebookView(JobView):
    """One line of a notebook's cell, updated in place; events that stay are printed below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._display = importlib.import_module("IPython.display").display  # only a notebook has it
        self._handle: Any = None
        self._line, self._shown, self._next_s = "", "", 0.0

    def show(self, status: pb.GetStatusReply) -> None:
        """Update the line if it is time, and print the events that stay."""
        self._line = progress_line(status)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + NOTEBOOK_EVERY_S
            self._update()
        for event in self._new_events(status):
            if event.startswith(STAYING_EVENTS):
                self.say(event)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Show the last status, which stays."""
        self._update()

    def _update(self) -> None:
        if self._line == self._shown:
            return
        self._shown, content = self._line, {"text/plain": self._line}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def console_for(stream: TextIO) -> Console:
    """Return a console on a stream that may fail: output that cannot be written is dropped."""
    return Console(file=lossy(stream, "lines of the view"))


def open_view(console: Console, *, only_terminal: bool = False) -> JobView:
    """Return the view that fits a console; with `only_terminal` one that shows nothing anywhere else."""
    if only_terminal and not console.is_terminal:
        return JobView()
    if console.is_jupyter:
        return NotebookView(console)
    return TerminalView(console) if console.is_terminal else PlainView(console)
