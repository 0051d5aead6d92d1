"""Which program a run is of, whether it still runs, and which runs read another's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parashard.launch.programs import Program, process_began, program_of, readers_of, write_program


def test_a_program_is_recorded_beside_its_run(tmp_path: Path) -> None:
    program = Program("fit", "/there/train.py", ("python", "train.py", "--seed", "1"), "/there", 7, 8)
    write_program(tmp_path, program)
    assert program_of(tmp_path) == program


def test_a_run_of_a_job_file_has_no_program_and_one_of_an_earlier_version_its_script(tmp_path: Path) -> None:
    assert program_of(tmp_path) is None
    (tmp_path / "origin.json").write_text('{"job_file": "/there/job.toml", "began_at": 1}')
    assert program_of(tmp_path) is None
    (tmp_path / "origin.json").write_text('{"job_file": "/there/train.py", "began_at": 1}')
    assert program_of(tmp_path) == Program("fit", "/there/train.py")


def test_a_process_runs_until_it_ends_and_no_other_is_taken_for_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    program = Program("fit", pid=child.pid, began=process_began(child.pid))
    assert program.is_running
    assert not program._replace(began=program.began + 1).is_running, "its number was used again"
    assert not Program("fit").is_running
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not program.is_running, "not reaped yet"
    child.communicate()
    assert not program.is_running


@pytest.mark.parametrize("content", ["", "{}", '{"call": "fit", "script": ""}', "[]"])
def test_a_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "program.json").write_text(content)
    assert program_of(tmp_path) is None


def test_runs_that_go_on_from_another_are_its_readers(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    for run in (first, second, third):
        run.mkdir()
    (second / "calls.json").write_text(json.dumps([{"call": "evaluate"}, {"call": "fit", "run_dir": str(first)}]))
    assert readers_of(first, [first, second, third]) == [second]
    assert readers_of(second, [first, second, third]) == []
