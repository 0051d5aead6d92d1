"""The status of a job as lines that fit a terminal: the layout of its parts.

Pure. Lines are never longer than the width, so none wraps; if the height is too small, events are dropped and the
remaining workers and shards are counted in a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from parashard._proto import coordinator_pb2 as pb
from parashard.display.status_tables import (
    figures_of,
    progress_figures,
    shard_columns,
    state_of,
    table_columns,
    worker_columns,
)
from parashard.display.text_table import Column, cut, item_lines, table_lines, text_lines
from parashard.figures import count, counted, duration

BAR_CELLS = 40
BAR_CELLS_MIN = 10
PROGRESS_CELLS = 80  # of bar, steps and time in a line for a notebook
EVENTS_SHOWN = 6
EVENT_LINES = 3  # of one event
EVENT_LINES_MIN = 2  # of all events, where the tables do not fit
PROBLEMS_SHOWN = 3
WARNING = "warning: "  # prefix of an event that reports a problem
_FAILED_ATTEMPT = re.compile(r"\S+ failed at step [\d,]+(?: \(examples [^)]*\))?: (?P<reason>.*)", re.DOTALL)
PROBLEM_LINES = 4  # of one problem
CONSISTENCY_SHORT = 24
REASON_LINES = 2
TABLES_LINES = 5  # of embedding tables, where the height is bounded
TABLE_LINES_MIN = 3  # titles, one row, and the count of the others
HEIGHT_MIN = 4
ITEM = "{} {}"


class StatusScreen:
    """A status as a rich renderable, laid out for its console."""

    def __init__(self, status: pb.GetStatusReply, *, fits_height: bool, elsewhere: tuple[str, ...] = ()) -> None:
        self._status = status
        self._fits_height = fits_height
        self._elsewhere = elsewhere

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        height = max(HEIGHT_MIN, console.size.height - 1) if self._fits_height else None  # 1: the cursor's own line
        lines = screen_lines(
            self._status, options.max_width, height, ascii_only=options.ascii_only, elsewhere=self._elsewhere
        )
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
            yield line


def failure_cause(event: str) -> str | None:
    """Return the place and the error of a failed attempt, such as "net.py:6: ValueError"; None for other events."""
    failed = _FAILED_ATTEMPT.match(event)
    return None if failed is None else ":".join(failed["reason"].split(":")[:3])


def screen_lines(
    status: pb.GetStatusReply,
    width: int,
    height: int | None = None,
    *,
    ascii_only: bool = False,
    elsewhere: tuple[str, ...] = (),
) -> list[Text]:
    """Return the lines of a status: at most `width` cells each and, unless it is None, at most `height` of them."""
    items = [ITEM.format(*figure) for figure in figures_of(status)]
    lines = [*_head(status, width), _bar(status, width, ascii_only), *map(Text, item_lines(items, width))]
    lines += _problems(status, width)
    workers, shards, tables = _workers(status), _shards(status), _tables(status)
    shown = shown_warnings(status)
    events = [event for event in status.events if event not in shown and not event.startswith(elsewhere)]
    all_events = _events(events, width, EVENTS_SHOWN * EVENT_LINES)
    if height is None:
        all_rows = [line for table in (workers, shards, *tables) for line in table.lines(width, table.height)]
        return [*lines, *all_rows, *all_events]
    of_tables = [line for table in tables for line in table.lines(width, min(table.height, TABLES_LINES))]
    room = max(0, height - len(lines) - len(of_tables))
    for_events = max(EVENT_LINES_MIN, room - workers.height - shards.height)
    for_events = min(len(all_events), for_events, max(0, room - 2 * TABLE_LINES_MIN))
    room -= for_events
    for_shards = min(shards.height, max(room // 2, room - workers.height))
    lines += [*workers.lines(width, room - for_shards), *shards.lines(width, for_shards), *of_tables]
    return [*lines, *_events(events, width, for_events)][:height]


def shown_warnings(status: pb.GetStatusReply) -> frozenset[str]:
    """Return the events that report problems which the lines of a status show anyway."""
    return frozenset(f"{WARNING}{problem}" for problem in _shown_problems(status))


def plain_line(status: pb.GetStatusReply) -> str:
    """Return the status as one line, for logs."""
    staleness = f"p50 {count(status.staleness_p50)}, max {count(status.staleness_max)} pushes"
    figures = [*progress_figures(status), ("staleness", staleness)]
    return "  ".join([f"step {_steps(status)}", *(ITEM.format(*figure) for figure in figures), _workers_up(status)])


def progress_line(status: pb.GetStatusReply) -> str:
    """Return the status as one line with a bar, without colours, for a notebook's cell."""
    figures = "  ".join(ITEM.format(*figure) for figure in progress_figures(status))
    return f"{_bar(status, PROGRESS_CELLS, ascii_only=True).plain}  {figures}"


@dataclass(frozen=True)
class _Table:
    """A table that may have too many rows: rows in `first` take precedence, and the rest is counted."""

    noun: str  # for a row
    down: list[bool]  # by row
    first: list[bool]  # by row
    columns: list[Column]

    @property
    def height(self) -> int:
        """Lines of the titles and all rows."""
        return len(self.down) + 1

    def lines(self, width: int, most: int) -> Iterator[Text]:
        """Yield at most `most` lines."""
        fits = self.height <= most
        shown = len(self.down) if fits else max(0, most - 2)
        chosen = sorted(sorted(range(len(self.down)), key=lambda row: not self.first[row])[:shown])
        if fits or chosen:
            shown_rows = [column._replace(cells=tuple(column.cells[row] for row in chosen)) for column in self.columns]
            titles, *rows = table_lines(shown_rows, width)
            yield Text(titles, style="dim")
            for row, line in zip(chosen, rows, strict=True):
                yield Text(line, style="red" if self.down[row] else "")
        if not fits and most > 0:
            yield Text(cut(self._rest(chosen), width), style="dim")

    def _rest(self, chosen: list[int]) -> str:
        down = [self.down[row] for row in range(len(self.down)) if row not in set(chosen)]
        what = f"{'more ' if chosen else ''}{self.noun}{'' if len(down) == 1 else 's'}"
        return f"{count(len(down))} {what}: {count(down.count(False))} up, {count(down.count(True))} down"


def _workers(status: pb.GetStatusReply) -> _Table:
    down = [not worker.live for worker in status.workers]
    missing = _missing(status)  # else those that are down were scaled down or have left
    first = [is_down == missing for is_down in down]
    return _Table("worker", down, first, worker_columns(status.workers))


def _shards(status: pb.GetStatusReply) -> _Table:
    down = [not shard.live for shard in status.shards]
    return _Table("shard", down, down, shard_columns(status.shards))


def _tables(status: pb.GetStatusReply) -> list[_Table]:
    """Return the table of embedding tables, if the job has any."""
    down = [False] * len(status.tables)
    return [_Table("table", down, down, table_columns(status.tables))] if down else []


def _head(status: pb.GetStatusReply, width: int) -> list[Text]:
    state = state_of(status)
    short = status.consistency if len(status.consistency) <= CONSISTENCY_SHORT else ""
    items = [status.job, state, short, f"http://{status.http_address}/" if status.http_address else ""]
    lines = [Text(line, style="bold") for line in item_lines([item for item in items if item], width)]
    if not short:
        lines += [Text(line) for line in text_lines(status.consistency, width, REASON_LINES)]
    if state != "running" and status.reason:
        lines += [Text(line, style="yellow") for line in text_lines(status.reason, width, REASON_LINES)]
    return lines


def _bar(status: pb.GetStatusReply, width: int, ascii_only: bool) -> Text:
    text = f"{_steps(status, ' steps')}  {duration(status.elapsed_s)}"
    if 0 < status.steps_complete < status.steps_total:
        left_s = status.elapsed_s * (status.steps_total - status.steps_complete) / status.steps_complete
        text += f", about {duration(left_s)} left"
    cells = min(BAR_CELLS, width - len(text) - 1)
    if cells < BAR_CELLS_MIN:
        return Text(cut(text, width))
    done = int(cells * min(1.0, status.steps_complete / max(1, status.steps_total)))
    filled, empty = ("#", "-") if ascii_only else ("\u2501", "\u2501")
    return Text.assemble((filled * done, "green"), (empty * (cells - done), "dim"), f" {text}")


def _problems(status: pb.GetStatusReply, width: int) -> list[Text]:
    shown = _shown_problems(status)
    if len(status.problems) > len(shown):
        shown.append(f"{count(len(status.problems) - len(shown))} more problems, see the status page")
    lines = [line for text in shown for line in text_lines(f"! {text}", width, PROBLEM_LINES)]
    return [Text(line, style="bold red") for line in lines]


def _shown_problems(status: pb.GetStatusReply) -> list[str]:
    """Return the problems that are shown in full; if there are more than PROBLEMS_SHOWN, one line counts the rest."""
    fit = len(status.problems) <= PROBLEMS_SHOWN
    return list(status.problems[: PROBLEMS_SHOWN if fit else PROBLEMS_SHOWN - 1])


def _events(events: Sequence[str], width: int, most: int) -> list[Text]:
    """Return the newest events that fit into `most` lines, oldest first; an event is truncated only at its end."""
    lines: list[str] = []
    for event in reversed(events[-EVENTS_SHOWN:]):
        room = most - len(lines)
        new = text_lines(event, width, EVENT_LINES)
        if len(new) > room and (lines or not room):
            break
        lines = [*(new if len(new) <= room else text_lines(event, width, room)), *lines]
    return [Text(line, style="dim") for line in lines]


def _steps(status: pb.GetStatusReply, noun: str = "") -> str:
    share = 100 * status.steps_complete / max(1, status.steps_total)
    return f"{count(status.steps_complete)} of {count(status.steps_total)}{noun} ({share:.0f} %)"


def _missing(status: pb.GetStatusReply) -> bool:
    return sum(worker.live for worker in status.workers) < status.workers_wanted


def _workers_up(status: pb.GetStatusReply) -> str:
    up = sum(worker.live for worker in status.workers)
    return (
        f"{count(up)} of {counted(status.workers_wanted, 'worker')} up"
        if _missing(status)
        else f"{counted(up, 'worker')} up"
    )
