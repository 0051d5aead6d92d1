"""history.jsonl: one JSON object a line, whole, also when a figure is not a number."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.process.backoff import STEADY_S
from parashard.process.run_files import HISTORY_FILE
from parashard_coordinator.endpoints import history as module
from parashard_coordinator.endpoints.history import HistoryFile, Timeline

PHASES = pb.PhaseSeconds(pull=0.5, push=1.0, transfer=6.0)
STATUS = pb.GetStatusReply(
    elapsed_s=1.23456,
    steps_complete=7,
    examples_per_s=12.34,
    training_loss=0.5,
    training={"accuracy": 0.5, "auc": math.nan},
    held_out={"accuracy": 0.75, "loss": math.nan},
    staleness_p50=1,
    staleness_p95=2,
    staleness_max=3,
    step_lag_max=4,
    workers=[pb.WorkerStatus(name="worker-0", live=True, phases=PHASES), pb.WorkerStatus(name="worker-1")],
    shards=[pb.ShardStatus(shard=0, live=True), pb.ShardStatus(shard=1)],
)
ROW = {
    "elapsed_s": 1.235,
    "steps_complete": 7,
    "examples_per_s": 12.3,
    "training_loss": 0.5,
    "training": {"accuracy": 0.5},
    "held_out": {"accuracy": 0.75},
    "staleness_p50": 1,
    "staleness_p95": 2,
    "staleness_max": 3,
    "step_lag_max": 4,
    "network_overlapped_share": 0.75,
    "workers_live": 1,
    "shards_live": 1,
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def fail_with(text: str, over: bool) -> None:
    raise AssertionError(text)


def test_lines_are_there_as_soon_as_they_are_added_and_are_appended(tmp_path: Path) -> None:
    for lines in (1, 2):
        HistoryFile(tmp_path, fail_with).add(STATUS)
        text = (tmp_path / HISTORY_FILE).read_text()
        assert text.endswith("\n")
        assert [json.loads(line, parse_constant=refuse) for line in text.splitlines()] == [ROW] * lines


class FullDisk:
    """A file that takes `room` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, content: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return int(taken)


@pytest.mark.parametrize("room", [0, 1, 70])
def test_a_line_that_finds_no_room_leaves_no_part_and_raises_nothing(  # P21
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    told: list[tuple[str, bool]] = []
    now_s = [0.0]
    history = HistoryFile(tmp_path, lambda *line: told.append(line), lambda: now_s[0])
    history.add(STATUS)
    whole, opened = (tmp_path / HISTORY_FILE).read_text(), Path.open
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda *a, **k: FullDisk(opened(*a, **k), room))
        history.add(STATUS)
        history.add(STATUS)
    assert (tmp_path / HISTORY_FILE).read_text() == whole
    now_s[0] = STEADY_S
    history.add(STATUS)
    assert (tmp_path / HISTORY_FILE).read_text() == 2 * whole
    assert told == [
        ("history lines cannot be written: no space left on device", False),
        ("history lines are written again; 2 writes failed", True),
    ]


def test_a_history_whose_folder_is_a_file_stops_no_coordinator(tmp_path: Path) -> None:  # P21
    (tmp_path / "file").touch()
    told: list[tuple[str, bool]] = []
    HistoryFile(tmp_path / "file", lambda *line: told.append(line)).add(STATUS)
    assert told == [("history lines cannot be written: not a directory", False)]


def times_of(history: HistoryFile) -> list[float]:
    return history.look(lambda timeline: [point.elapsed_s for point in timeline.since()])


def test_a_later_coordinator_begins_with_the_lines_of_the_earlier_ones(tmp_path: Path) -> None:
    first = HistoryFile(tmp_path, fail_with)
    assert times_of(first) == []
    first.add(STATUS)
    later = HistoryFile(tmp_path, fail_with)
    later.add(pb.GetStatusReply(elapsed_s=9.0))
    assert times_of(later) == [1.235, 9.0]
    assert later.look(lambda timeline: timeline.since()[0].figures) == {
        **{name: value for name, value in ROW.items() if name not in ("elapsed_s", "training", "held_out")},
        "training.accuracy": 0.5,
        "held_out.accuracy": 0.75,
    }


def test_lines_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    lines = [b'{"elapsed_s": 1}', b"\xff\x00", b"[1]", b"", b"[" * 100_000, b'{"elapsed_s": 2}', b'{"elapsed_s": 3']
    (tmp_path / HISTORY_FILE).write_bytes(b"\n".join(lines))
    assert times_of(HistoryFile(tmp_path, fail_with)) == [1, 2]


def test_of_a_long_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HISTORY_FILE).write_text("".join(f'{{"elapsed_s": {i}}}\n' for i in range(100, 200)))
    monkeypatch.setattr(module, "READ_BYTES_MAX", 60)  # three lines and a part of one
    history = HistoryFile(tmp_path, fail_with)
    assert times_of(history) == [197, 198, 199]
    assert not history.look(lambda timeline: timeline.complete)


def test_points_are_there_although_no_line_can_be_written(tmp_path: Path) -> None:  # P21
    (tmp_path / "file").touch()
    history = HistoryFile(tmp_path / "file", lambda text, over: None)
    history.add(STATUS)
    assert history.look(Timeline.since)[0].elapsed_s == 1.235
