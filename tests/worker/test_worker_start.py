"""What `parashard worker` says, as a process of its own, where there is nothing to join."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parashard.launch.run_folders import LOCK_FILE
from parashard.process.run_files import REPORT_FILE
from parashard.protocol.coordinator_client import ADDRESS_FILE

WORKER = [sys.executable, "-P", "-m", "parashard", "worker", "--connect"]
DEADLINE_S = 50.0  # below the 60 s for which a coordinator that is away is waited for


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ("done", 0, "left: {run} is done: every step is in"),
        ("failed", 4, "parashard worker: {run} has failed: every step is in; `parashard resume {run}` goes on with it"),
    ],
)
def test_a_run_that_is_over_is_not_waited_for(tmp_path: Path, state: str, code: int, said: str) -> None:
    (tmp_path / ADDRESS_FILE).write_text('{"address": "127.0.0.1:1", "run_id": "r"}')
    (tmp_path / LOCK_FILE).touch()
    (tmp_path / REPORT_FILE).write_text(json.dumps({"state": state, "reason": "every step is in"}))
    ran = subprocess.run([*WORKER, str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (code, 1), ran.stderr
    assert said.format(run=tmp_path) in ran.stderr


def test_programs_have_json_lines_on_request(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).write_text('{"state": "done", "reason": "every step is in"}')
    command = [*WORKER, str(tmp_path), "--log-format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert [json.loads(line)["event"] for line in ran.stderr.splitlines()] == ["left"]
