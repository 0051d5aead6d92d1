"""History: one JSON line a second of how the job goes, for plots; `history.jsonl` in the run directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from parashard.run_files import HISTORY_FILE
from parashard.transfer import Overlap
from protos import coordinator_pb2 as pb


class History:
    """Appends to a file; a line is written whole.

    Parameters
    ----------
    folder : Path
        The run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / HISTORY_FILE).open("a", buffering=1)

    def add(self, status: pb.GetStatusReply) -> None:
        """Append how the job goes now."""
        self._file.write(json.dumps(row(status)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def row(status: pb.GetStatusReply) -> dict[str, Any]:
    """Return the figures of one moment."""
    return {
        "elapsed_s": round(status.elapsed_s, 3),
        "steps_complete": status.steps_complete,
        "examples_per_s": round(status.examples_per_s, 1),
        "training_loss": status.training_loss if status.HasField("training_loss") else None,
        "held_out": {name: value for name, value in status.held_out.items() if math.isfinite(value)},
        "staleness_p50": status.staleness_p50,
        "staleness_p95": status.staleness_p95,
        "staleness_max": status.staleness_max,
        "step_lag_max": status.step_lag_max,
        "network_overlapped_share": Overlap.of(worker.phases for worker in status.workers).share,
        "workers_live": sum(worker.live for worker in status.workers),
    }
