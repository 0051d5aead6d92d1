"""history.jsonl: one JSON object a line, whole, also when a figure is not a number."""

from __future__ import annotations

import json
import math
from pathlib import Path

from coordinator.history import History
from parashard.run_files import HISTORY_FILE
from protos import coordinator_pb2 as pb

PHASES = pb.PhaseSeconds(pull=0.5, push=1.0, transfer=6.0)
STATUS = pb.GetStatusReply(
    elapsed_s=1.23456,
    steps_complete=7,
    examples_per_s=12.34,
    training_loss=0.5,
    held_out={"accuracy": 0.75, "loss": math.nan},
    staleness_p50=1,
    staleness_p95=2,
    staleness_max=3,
    step_lag_max=4,
    workers=[pb.WorkerStatus(name="worker-0", live=True, phases=PHASES), pb.WorkerStatus(name="worker-1")],
)
ROW = {
    "elapsed_s": 1.235,
    "steps_complete": 7,
    "examples_per_s": 12.3,
    "training_loss": 0.5,
    "held_out": {"accuracy": 0.75},
    "staleness_p50": 1,
    "staleness_p95": 2,
    "staleness_max": 3,
    "step_lag_max": 4,
    "network_overlapped_share": 0.75,
    "workers_live": 1,
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_lines_are_there_as_soon_as_they_are_added_and_are_appended(tmp_path: Path) -> None:
    for lines in (1, 2):
        history = History(tmp_path)
        history.add(STATUS)
        text = (tmp_path / HISTORY_FILE).read_text()
        history.close()
        assert text.endswith("\n")
        assert [json.loads(line, parse_constant=refuse) for line in text.splitlines()] == [ROW] * lines
