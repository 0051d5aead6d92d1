"""`parashard runs` and `parashard kill`: what is listed, what is removed, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard.job.load import load_job
from parashard.launch.programs import Program, process_began, write_program
from parashard.launch.run_folders import keep_origin, launcher_lock
from parashard.process.shell import ExitCode
from support.command_line import Ran, run_command
from support.small_job import SMALL_JOB

Command = Callable[..., Ran]


@pytest.fixture
def parashard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command in a folder with three runs: done, failed and one that was killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for age, state in enumerate(["done", "failed", ""]):
        folder = Path("runs", f"small-{age}")
        folder.mkdir(parents=True)
        (folder / "job.toml").write_text(SMALL_JOB)
        os.utime(folder / "job.toml", (age, age))
        if state:
            steps = {"steps_applied": [1000 + age, 1200], "steps_total": 1350}
            (folder / "report.json").write_text(json.dumps({"state": state, "reason": "why", **steps}))
    return lambda *words: run_command(monkeypatch, capsys, *words)


@pytest.mark.parametrize("words", [["runs"], ["runs", "list"]], ids=" ".join)
def test_runs_are_listed_the_newest_last(parashard: Command, words: list[str]) -> None:
    lock = launcher_lock(Path("runs/small-2"))
    ran = parashard(*words)
    os.close(lock)
    head, *lines = ran.out.splitlines()
    assert head.split() == ["run", "state", "steps", "began", "size"]
    assert [line.split()[:2] for line in lines] == [["small-0", "done"], ["small-1", "failed"], ["small-2", "running"]]
    assert "1,000 of 1,350" in lines[0]
    rows = json.loads(parashard(*words, "--json").out)
    assert [(row["run"], row["state"], row["steps"], row["job"]) for row in rows] == [
        ("small-0", "done", 1000, "small"),
        ("small-1", "failed", 1001, "small"),
        ("small-2", "stopped", None, "small"),
    ]


def test_a_run_that_was_interrupted_is_stopped(parashard: Command) -> None:
    Path("runs/small-2/report.json").write_text('{"state": "stopped", "reason": "interrupted"}')
    assert parashard("runs").out.splitlines()[-1].split()[:2] == ["small-2", "stopped"]


def test_a_run_that_is_done_is_removed(parashard: Command) -> None:
    assert parashard("runs", "remove", "small-0") == (0, "removed small-0\n", "")
    assert not Path("runs/small-0").exists()
    assert Path("runs/small-1").exists()


def test_a_run_that_could_go_on_is_removed_on_request_only(parashard: Command) -> None:
    ran = parashard("runs", "remove", "small-0", "small-1", "small-2")
    assert (ran.exit_code, ran.err.count("\n")) == (ExitCode.CONFIGURATION, 1)
    assert "small-1, small-2: not done" in ran.err
    assert len(list(Path("runs").iterdir())) == 3, "all or none"
    assert parashard("runs", "remove", "--unfinished", "small-1", "runs/small-2").exit_code == 0
    assert [run.name for run in Path("runs").iterdir()] == ["small-0"]


def test_a_run_in_progress_is_not_removed(parashard: Command) -> None:
    lock = launcher_lock(Path("runs/small-2"))
    told = [parashard("runs", "remove", *flags, "small-0", "small-2") for flags in ([], ["--unfinished"])]
    os.close(lock)
    assert {ran.exit_code for ran in told} == {ExitCode.CONFIGURATION}
    for ran in told:
        assert (
            ran.err
            == f"parashard: small-2 is in progress; stop it first: Ctrl-C where it runs, or kill {os.getpid()}\n"
        )
    assert len(list(Path("runs").iterdir())) == 3, "all or none"


def test_a_run_began_when_it_was_started_first(parashard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed = Path("runs/small-1")
    monkeypatch.setattr("time.time", lambda: 7.5)
    keep_origin(resumed, load_job(resumed / "job.toml", environ={}))  # as it is resumed, and its job file written again
    os.utime(resumed / "job.toml", (9, 9))
    rows = json.loads(parashard("runs", "--json").out)
    assert [(row["run"], row["began_at"]) for row in rows] == [("small-0", 0), ("small-1", 1), ("small-2", 2)]
    new = Path("runs/small-3")
    new.mkdir()
    for now_s in (7.5, 8.5):
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        keep_origin(new, load_job(resumed / "job.toml", environ={}))
        (new / "job.toml").write_text(SMALL_JOB)
    assert json.loads(parashard("runs", "--json").out)[-1]["began_at"] == 7.5


@pytest.mark.parametrize("name", ["small-9", "..", "/", "runs"])
def test_what_is_no_run_is_not_removed(parashard: Command, name: str) -> None:
    ran = parashard("runs", "remove", "--unfinished", name)
    assert ran.exit_code == ExitCode.CONFIGURATION
    assert "is no run" in ran.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["small-2", "worker-0"], "small-2 is not in progress on this machine"),
        (["small-9", "worker-0"], "'small-9' is no run"),
        (["a", "b", "c"], "found 3 words; allowed: [RUN] PROCESS"),
        (["worker-0"], "no run directory under runs/"),
    ],
)
def test_a_process_that_is_not_there_cannot_be_killed(parashard: Command, words: list[str], told: str) -> None:
    ran = parashard("kill", *words)
    assert (ran.exit_code, ran.out) == (ExitCode.CONFIGURATION, "")
    assert told in ran.err


def test_a_run_that_an_unfinished_one_goes_on_from_is_not_removed(parashard: Command) -> None:
    answers = [{"call": "fit", "run_dir": str(Path("runs/small-0").absolute())}]
    Path("runs/small-2/calls.json").write_text(json.dumps(answers))
    ran = parashard("runs", "remove", "small-0")
    assert ran.exit_code == ExitCode.CONFIGURATION
    assert "small-0: small-2 is not done, and goes on from its weights" in ran.err
    assert Path("runs/small-0").exists()
    assert parashard("runs", "remove", "--unfinished", "small-0", "small-2").exit_code == 0


def test_a_run_is_not_removed_while_its_program_runs(parashard: Command) -> None:
    parent = os.getppid()
    write_program(Path("runs/small-0"), Program("fit", pid=parent, began=process_began(parent)))
    ran = parashard("runs", "remove", "small-0")
    assert ran.exit_code == ExitCode.CONFIGURATION
    assert f"process {parent} made this run, and what it calls later reads it" in ran.err
    write_program(Path("runs/small-0"), Program("fit", pid=parent, began=process_began(parent) + 1))
    assert parashard("runs", "remove", "small-0").exit_code == 0
