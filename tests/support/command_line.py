"""`parashard` in this process, as a shell runs it: an exit code, and what was said; runs as it finds them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parashard.cli import main
from parashard.job.layers import parse_set
from parashard.job.load import as_toml, load_job
from parashard.process.shell import ExitCode

REPORT: dict[str, Any] = {
    "job": "small",
    "state": "done",
    "reason": "every step is in",
    "steps_total": 1400,
    "steps_applied": [1400, 1400],
    "skipped_steps": 0,
    "examples_per_s": 1234.5,
    "wall_s": 1.5,
    "training_loss": 0.2,
    "held_out": {"accuracy": 0.9712, "loss": 0.1, "mean_squared_error": 353.1234, "other": None},
    "staleness": {"p50": 0, "p95": 1, "max": 2},
    "step_lag": {"max": 3},
    "network": {"transfer_s": 2.0, "waited_s": 0.5, "overlapped_share": 0.75, "step_share": 0.4, "pipeline": ""},
    "bytes": {
        "pushed": 3 << 20,
        "pushed_float32": 6 << 20,
        "pulled": 1 << 20,
        "pull_unmoved": 0,
        "saved_share": 0.4286,
    },
    "duplicate_pushes": 5,
    "worker_restarts": 1,
    "shard_restarts": 0,
    "coordinator_restarts": 2,
    "weights_sha256": "ab" * 32,
}
"""Of a run that ended well."""


class Ran(NamedTuple):
    """How a command ended."""

    exit_code: int
    out: str
    err: str


Command = Callable[..., Ran]


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run `parashard` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["parashard", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr()
    return Ran(int(ended.value.code or 0), said.out, said.err)


def assert_refused(ran: Ran, *parts: str) -> None:
    """One line, from us, with what is wrong in it."""
    assert ran.exit_code == ExitCode.CONFIGURATION, ran
    assert ran.out == ""
    assert ran.err.startswith("parashard: ")
    assert ran.err.count("\n") == 1, ran.err
    for part in parts:
        assert part in ran.err, f"{part!r} is not in {ran.err!r}"


def begun(name: str, *sets: str) -> Path:
    """Make a run directory as `parashard run --set ...` leaves it, newer than the others; return it."""
    folder = Path("runs", name).absolute()
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(as_toml(load_job("job.toml", [parse_set(text) for text in sets], {}).job))
    (folder / "origin.json").write_text(json.dumps({"job_file": str(Path("elsewhere/job.toml").absolute())}))
    number = int(name.rpartition("-")[2])
    for path in (folder / "job.toml", folder):
        os.utime(path, (number, number))
    return folder
