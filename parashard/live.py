"""What `parashard run` shows while a job runs: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parashard.metric_text import metric_name, metric_value
from parashard.transfer import Bytes, Overlap, percent
from protos import coordinator_pb2 as pb

PLAIN_EVERY_S = 2.0
EVENTS_SHOWN = 6


class NewEvents:
    """Finds the events of a status that earlier ones did not have."""

    def __init__(self) -> None:
        self._seen = 0

    def of(self, status: pb.GetStatusReply) -> list[str]:
        """Return the new events, oldest first."""
        new = status.events_total - self._seen
        self._seen = status.events_total
        return list(status.events[-new:]) if new > 0 else []


class JobView(Protocol):
    """Shows a job's status, and lines of text."""

    def show(self, status: pb.GetStatusReply) -> None:
        """Show how the job goes now."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Give the terminal back."""


class TerminalView:
    """A view that redraws itself in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text("starting"), console=console, refresh_per_second=4, transient=True)
        self._live.start()
        self._events = NewEvents()

    def show(self, status: pb.GetStatusReply) -> None:
        """Redraw; warnings, and what the data are, stay on the screen when the view goes."""
        for event in self._events.of(status):
            if event.startswith(("warning", "data: ")):
                self.say(event)
        self._live.update(render(status))

    def say(self, text: str) -> None:
        """Print above the view."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """Clear the view."""
        self._live.stop()


class PlainView:
    """One line every PLAIN_EVERY_S, and every event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0
        self._events = NewEvents()

    def show(self, status: pb.GetStatusReply) -> None:
        """Print the events that are new, and a line if it is time."""
        for event in self._events.of(status):
            self.say(event)
        if status.state == pb.JOB_STATE_RUNNING and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PLAIN_EVERY_S
            self.say(one_line(status))

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Nothing to give back."""


class NoView:
    """Shows nothing: standard output is for the report alone."""

    def show(self, status: pb.GetStatusReply) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_view(console: Console) -> JobView:
    """Return the view that fits a console."""
    return TerminalView(console) if console.is_terminal else PlainView(console)


def one_line(status: pb.GetStatusReply) -> str:
    """Return the status as one line."""
    share = 100 * status.steps_complete / max(1, status.steps_total)
    metrics = "".join(
        f"  held-out {metric_name(name)} {metric_value(value)}" for name, value in sorted(status.metrics.items())
    )
    live = sum(worker.live for worker in status.workers)
    return (
        f"step {status.steps_complete}/{status.steps_total} ({share:.0f} %)  {status.examples_per_s:,.0f} examples/s  "
        f"loss {_loss(status)}{metrics}  staleness p50 {status.staleness_p50} max {status.staleness_max}  "
        f"workers {live}"
    )


def render(status: pb.GetStatusReply) -> RenderableType:
    """Return the live view of a status."""
    return Group(_head(status), _bar(status), _figures(status), _workers(status), _shards(status), _events(status))


def _head(status: pb.GetStatusReply) -> Text:
    state = pb.JobState.Name(status.state).removeprefix("JOB_STATE_").lower()
    head = Text()
    head.append(status.job, style="bold")
    head.append(f"  {state}", style="green" if state == "running" else "yellow")
    head.append(f"  {status.consistency}  http://{status.http_address}/", style="dim")
    return head


def _bar(status: pb.GetStatusReply) -> Table:
    grid = Table.grid(padding=(0, 1))
    left_s = _left_s(status)
    grid.add_row(
        ProgressBar(total=max(1, status.steps_total), completed=status.steps_complete, width=40),
        f"{status.steps_complete:,} of {status.steps_total:,} steps",
        f"{status.elapsed_s:.0f} s" + (f", {left_s:.0f} s left" if math.isfinite(left_s) else ""),
    )
    return grid


def _loss(status: pb.GetStatusReply) -> str:
    return f"{status.loss:.4f}" if status.HasField("loss") else "-"


def _left_s(status: pb.GetStatusReply) -> float:
    if not status.steps_complete:
        return math.inf
    return status.elapsed_s * (status.steps_total - status.steps_complete) / status.steps_complete


def _figures(status: pb.GetStatusReply) -> Table:
    grid = Table.grid(padding=(0, 3))
    cells: list[RenderableType] = [
        f"[bold]{status.examples_per_s:,.0f}[/] examples/s",
        f"loss [bold]{_loss(status)}[/]",
    ]
    cells += [
        Text.assemble(f"held-out {metric_name(name)} ", (metric_value(value), "bold"))
        for name, value in sorted(status.metrics.items())
    ]
    cells.append(
        f"staleness p50 [bold]{status.staleness_p50}[/] p95 [bold]{status.staleness_p95}[/] "
        f"max [bold]{status.staleness_max}[/]"
    )
    cells.append(f"step lag max [bold]{status.step_lag_max}[/]")
    hidden = Overlap.of(worker.phases for worker in status.workers).hidden
    saved = Bytes.of(shard.record for shard in status.shards).saved
    cells.append(f"transfer hidden [bold]{percent(hidden)}[/]  bytes saved [bold]{percent(saved)}[/]")
    grid.add_row(*cells)
    return grid


def _workers(status: pb.GetStatusReply) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("worker", "device", "examples/s", "steps", "held", "restarts", "time: lease pull compute push"):
        table.add_column(name, justify="left" if name in ("worker", "device") else "right")
    for worker in status.workers:
        phases = worker.phases
        total = phases.lease + phases.pull + phases.compute + phases.push or 1.0
        shares = (phases.lease, phases.pull, phases.compute, phases.push)
        table.add_row(
            Text(worker.name),
            Text(worker.device) if worker.live else Text("away", style="red"),
            f"{worker.examples_per_s:,.0f}",
            f"{worker.steps_complete:,}",
            str(worker.steps_held),
            str(worker.restarts),
            " ".join(f"{100 * share / total:3.0f}%" for share in shares),
        )
    return table


def _shards(status: pb.GetStatusReply) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("shard", "version", "MiB held", "MiB pushed", "MiB pulled", "duplicates", "refused"):
        table.add_column(name, justify="left" if name == "shard" else "right")
    for shard in status.shards:
        record = shard.record
        table.add_row(
            f"shard-{shard.shard}" if shard.registered else f"[red]shard-{shard.shard}[/]",
            f"{record.version:,}",
            f"{(record.variable_bytes + record.slot_bytes) / 2**20:,.1f}",
            f"{record.push_bytes / 2**20:,.0f}",
            f"{record.pull_bytes / 2**20:,.0f}",
            f"{record.duplicate_pushes:,}",
            f"{record.refused_pushes:,}",
        )
    return table


def _events(status: pb.GetStatusReply) -> Text:
    return Text("\n".join(status.events[-EVENTS_SHOWN:]), style="dim")
