"""What a command's own output costs it: a place that takes nothing is told in one line, and never in a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parashard.cli import run as run_commands
from parashard.display.text_table import print_table
from parashard.launch.run import Outcome
from support.command_line import run_command
from support.small_job import SMALL_JOB
from support.waiting import DEADLINE_S

PROGRAM = """
import sys
from pathlib import Path
from parashard.cli import main, run
from parashard.launch.run import Outcome
run.run_job = lambda *_, **__: Outcome(0, {"state": "done"}, "done", Path("runs/x"))
sys.argv = ["parashard", "run", "job.toml", "--json"]
main.main()
"""


def test_a_report_that_cannot_be_printed_is_reported_with_its_place(tmp_path: Path) -> None:  # P21
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            timeout=DEADLINE_S,
            check=False,
        )
    assert ended.stderr == "parashard: the report cannot be printed: no space left on device; see runs/x\n"
    assert ended.returncode == 1


def test_an_error_ends_a_command_with_its_code_even_if_it_cannot_be_printed(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "parashard", "run", "none.toml"]
        ended = subprocess.run(command, stdout=full, stderr=full, cwd=tmp_path, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 2


def test_a_finished_job_whose_progress_could_not_be_printed_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # P21
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(SMALL_JOB)
    monkeypatch.setattr(run_commands, "run_job", lambda *_, **__: Outcome(0, {"state": "done"}, "done", tmp_path))
    monkeypatch.setattr(run_commands, "print_summary", lambda report, run_dir, console, copy: console.print("summary"))
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        ran = run_command(monkeypatch, capsys, "run", "job.toml")
        monkeypatch.undo()
    assert ran.exit_code == 0


def test_a_table_in_a_pipe_is_not_wrapped(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("key", "value"), [("optimizer.schedule.warmup_steps", "x" * 200)])
    assert f"optimizer.schedule.warmup_steps {'x' * 200}" in " ".join(capsys.readouterr().out.split())
