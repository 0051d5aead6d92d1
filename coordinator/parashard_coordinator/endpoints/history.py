"""The history of a job: one line of figures per second in `history.jsonl`, and a bounded timeline of these in memory.

A point is a flattened line of the file: figures by name, with the prefix `HELD_OUT` or `TRAINING` for metrics. The
status page draws the timeline, which has the last `RECENT_POINTS` points in full, and older ones thinned; a later
coordinator initializes it from the file.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from parashard._proto import coordinator_pb2 as pb
from parashard.process.backoff import STEADY_S
from parashard.process.best_effort import BestEffort
from parashard.process.run_files import HISTORY_FILE
from parashard.telemetry.transfer import Overlap

RECENT_POINTS = 900  # the last quarter of an hour, at a point a second
OLDER_POINTS = 1000
HELD_OUT, TRAINING = "held_out.", "training."
METRICS_MAX = 16  # with each prefix; those of the newest evaluation or epoch
COMPLETE_S = 10.0  # a job's first point is at most this late
FIGURES: Mapping[str, Callable[[pb.GetStatusReply], float | None]] = {
    "steps_complete": lambda status: status.steps_complete,
    "examples_per_s": lambda status: round(status.examples_per_s, 1),
    "training_loss": lambda status: status.training_loss if status.HasField("training_loss") else None,
    "staleness_p50": lambda status: status.staleness_p50,
    "staleness_p95": lambda status: status.staleness_p95,
    "staleness_max": lambda status: status.staleness_max,
    "step_lag_max": lambda status: status.step_lag_max,
    "network_overlapped_share": lambda status: Overlap.of(worker.phases for worker in status.workers).share,
    "workers_live": lambda status: sum(worker.live for worker in status.workers),
    "shards_live": lambda status: sum(shard.live for shard in status.shards),
}
"""A point's figures besides `elapsed_s` and the metrics; None: not known."""


class Point(NamedTuple):
    """One moment."""

    number: int  # rises by one with each added point
    elapsed_s: float  # as in the status
    figures: dict[str, float]  # finite numbers by name, without the unknown ones


class Timeline:
    """The points of one job, their times strictly ascending; at most `RECENT_POINTS + OLDER_POINTS`.

    When there are too many older ones, every second one is dropped, and from then on half as many are added. The first
    point of the job always stays.
    """

    def __init__(self) -> None:
        self._recent: deque[Point] = deque()
        self._older: list[Point] = []
        self._stride = 1  # every `_stride`-th point that leaves `_recent` is kept
        self._skipped = 0
        self.last = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of the history; ignore a row without a time, and values that are no known figures."""
        # Points at its time or later are dropped: an earlier coordinator wrote them after it had last stored its state.
        elapsed_s = _finite(row.get("elapsed_s"))
        if elapsed_s is None:
            return
        for points in (self._recent, self._older):
            while points and points[-1].elapsed_s >= elapsed_s:
                points.pop()
        given = {name: row.get(name) for name in FIGURES}
        for prefix in (HELD_OUT, TRAINING):
            metrics = row.get(prefix.removesuffix("."))
            given |= {f"{prefix}{name}": metrics[name] for name in metrics} if isinstance(metrics, Mapping) else {}
        figures = {name: value for name in given if (value := _finite(given[name])) is not None}
        self.last += 1
        self._recent.append(Point(self.last, elapsed_s, figures))
        if len(self._recent) > RECENT_POINTS:
            self._take_up(self._recent.popleft())

    def _take_up(self, point: Point) -> None:
        if self._older and self._skipped + 1 < self._stride:
            self._skipped += 1
            return
        self._skipped = 0
        self._older.append(point)
        if len(self._older) > OLDER_POINTS:
            self._older = self._older[::2]
            self._stride *= 2

    def since(self, number: int = 0) -> list[Point]:
        """Return the points after point `number`, in order."""
        return [point for point in (*self._older, *self._recent) if point.number > number]

    @property
    def begins_s(self) -> float | None:
        """The time of the first point; None if there is none."""
        first = self._older or self._recent
        return first[0].elapsed_s if first else None

    @property
    def complete(self) -> bool:
        """The timeline begins with the job; it does not if an earlier coordinator's history is missing."""
        return self.begins_s is None or self.begins_s <= COMPLETE_S

    def metrics(self, prefix: str) -> list[str]:
        """Return the names of the metrics with this prefix in the newest point that has any, at most `METRICS_MAX`."""
        for point in (*reversed(self._recent), *reversed(self._older)):
            names = sorted(name for name in point.figures if name.startswith(prefix))
            if names:
                return names[:METRICS_MAX]
        return []


def columns(points: list[Point], names: list[str]) -> dict[str, list[float | None]]:
    """Return the points' times and the named figures as columns; None if a point lacks a figure."""
    times: list[float | None] = [point.elapsed_s for point in points]
    return {"elapsed_s": times} | {name: [point.figures.get(name) for point in points] for name in names}


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) <= sys.float_info.max else None


Seen = TypeVar("Seen")

READ_BYTES_MAX = 16 << 20  # read of an earlier coordinator's lines: about half a day


class HistoryFile:
    """Appends to a file; a line is written atomically, and a failed write is counted and dropped."""

    def __init__(
        self, folder: Path, tell: Callable[[str, bool], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = folder / HISTORY_FILE
        self._lines = BestEffort("history lines", tell, STEADY_S, clock)
        self._lock = threading.Lock()
        self._timeline = Timeline()
        for earlier in stored_rows(self._path):
            self._timeline.add(earlier)

    def look(self, read: Callable[[Timeline], Seen]) -> Seen:
        """Call a function on the timeline under the lock, and return its result."""
        with self._lock:
            return read(self._timeline)

    def add(self, status: pb.GetStatusReply) -> None:
        """Append the present figures."""
        new = row(status)
        with self._lock:
            self._timeline.add(new)
        line = (json.dumps(new) + "\n").encode()
        self._lines.attempt(lambda: self._append(line))

    def _append(self, line: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            before, left = file.tell(), memoryview(line)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(before)  # remove a partial line
                raise


def stored_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in the last `READ_BYTES_MAX` of a file; skip damaged lines, and a file that cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if file.seek(max(0, end - READ_BYTES_MAX)):
            file.readline(READ_BYTES_MAX)  # skip a partial line
        for line in file.read(READ_BYTES_MAX).splitlines():
            with suppress(ValueError, RecursionError):
                stored = json.loads(line)
                if isinstance(stored, dict):
                    yield stored


def row(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the figures of one moment."""
    return {
        "elapsed_s": round(status.elapsed_s, 3),
        "training": {name: value for name, value in status.training.items() if math.isfinite(value)},
        "held_out": {name: value for name, value in status.held_out.items() if math.isfinite(value)},
        **{name: read(status) for name, read in FIGURES.items()},
    }
