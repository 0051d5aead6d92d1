"""HistoryFile: one JSON line of the job's figures per second, for plots; `history.jsonl` in the run directory.

It keeps a bounded timeline of the same in memory, for the status page; a later coordinator begins it with the file.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from parashard._proto import coordinator_pb2 as pb
from parashard.process.backoff import STEADY_S
from parashard.process.best_effort import BestEffort
from parashard.process.run_files import HISTORY_FILE
from parashard.telemetry.transfer import Overlap
from parashard_coordinator.endpoints.timeline import Timeline

Seen = TypeVar("Seen")

READ_BYTES_MAX = 16 << 20  # of an earlier coordinator's lines: about half a day


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
        """Return what a function reads of the timeline; no point is added meanwhile."""
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
    """Yield the rows in the last `READ_BYTES_MAX` of a file; none of one that cannot be read, nor of a damaged line."""
    with suppress(OSError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        if file.seek(max(0, end - READ_BYTES_MAX)):
            file.readline(READ_BYTES_MAX)  # the rest of a line
        for line in file.read(READ_BYTES_MAX).splitlines():
            with suppress(ValueError, RecursionError):
                stored = json.loads(line)
                if isinstance(stored, dict):
                    yield stored


def row(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the figures of one moment."""
    return {
        "elapsed_s": round(status.elapsed_s, 3),
        "steps_complete": status.steps_complete,
        "examples_per_s": round(status.examples_per_s, 1),
        "training_loss": status.training_loss if status.HasField("training_loss") else None,
        "training": {name: value for name, value in status.training.items() if math.isfinite(value)},
        "held_out": {name: value for name, value in status.held_out.items() if math.isfinite(value)},
        "staleness_p50": status.staleness_p50,
        "staleness_p95": status.staleness_p95,
        "staleness_max": status.staleness_max,
        "step_lag_max": status.step_lag_max,
        "network_overlapped_share": Overlap.of(worker.phases for worker in status.workers).share,
        "workers_live": sum(worker.live for worker in status.workers),
        "shards_live": sum(shard.live for shard in status.shards),
    }
