"""Run directories: who works in one, whether its run is over, and what is left of one that never began."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from parashard.errors import ConfigurationError
from parashard.launch import run_folders
from parashard.launch.run_folders import (
    LOCK_FILE,
    check_in_progress,
    discard_unbegun,
    how_it_ended,
    launcher_lock,
    launcher_of,
    locked,
    locked_run,
    new_run_dir,
    resumed_run_dir,
    run_named,
    runs_here,
    unchanged_if_refused,
    unfinished_run,
)
from parashard.process.durable import write_durably
from parashard.process.run_files import CHECKPOINTS, JOB_FILE, REPORT_FILE
from parashard.protocol.coordinator_client import ADDRESS_FILE


def report(folder: Path, state: str) -> None:
    (folder / REPORT_FILE).write_text(json.dumps({"state": state, "reason": "so it was"}))


def test_the_holder_of_the_lock_is_the_launcher(tmp_path: Path) -> None:
    assert launcher_of(tmp_path) is None
    lock = launcher_lock(tmp_path)
    assert launcher_of(tmp_path) == os.getpid()
    with pytest.raises(ConfigurationError, match="another `parashard run` works in it"):
        locked(tmp_path)
    os.close(lock)
    assert launcher_of(tmp_path) is None, "the process is alive and works elsewhere"


@pytest.mark.parametrize("content", ["", "no number", "0", "4194305"])
def test_a_lock_file_that_names_no_process_locks_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    assert launcher_of(tmp_path) is None


def test_a_launcher_that_was_killed_is_none(tmp_path: Path) -> None:
    program = (
        "import sys, signal; from pathlib import Path; from parashard.launch.run_folders import launcher_lock; "
        "lock = launcher_lock(Path(sys.argv[1])); print('locked', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as launcher:
        try:
            assert launcher.stdout is not None
            launcher.stdout.readline()
            assert launcher_of(tmp_path) == launcher.pid
        finally:
            launcher.kill()
    assert launcher_of(tmp_path) is None


@pytest.mark.parametrize(
    ("state", "local", "ended"),
    [
        ("done", True, True),
        ("done", False, True),
        ("failed", True, True),
        ("failed", False, False),  # a coordinator that others start may be started again
        ("running", True, False),
        (None, True, False),
    ],
)
def test_a_run_is_over_when_its_report_says_so_and_no_launcher_has_it(
    tmp_path: Path, state: str | None, local: bool, ended: bool
) -> None:
    if state is not None:
        report(tmp_path, state)
    if local:
        lock = launcher_lock(tmp_path)
        assert how_it_ended(tmp_path) is None
        os.close(lock)
    assert how_it_ended(tmp_path) == ((state, "so it was") if ended else None)


def test_a_place_that_is_no_folder_is_not_over() -> None:
    check_in_progress("host:7000")


def test_a_name_that_is_no_text_is_refused_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "d_") + b"\xe9"))
    folder.mkdir()
    with pytest.raises(
        ConfigurationError, match=r"run directory: the path b'.*d_\\xe9/r' is not text in UTF-8; rename"
    ):
        new_run_dir(folder / "r", "small")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigurationError, match="is not text in UTF-8"):
        new_run_dir(None, "small")
    assert list(folder.iterdir()) == []


def test_a_run_has_a_path_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in (("one", JOB_FILE), ("two", ADDRESS_FILE)):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, file).touch()
    assert run_named("one") == run_named("runs/one") == tmp_path / "runs" / "one"
    assert run_named("two") == tmp_path / "runs" / "two"
    for text in ("three", "runs", "."):
        with pytest.raises(ConfigurationError, match="is no run; allowed"):
            run_named(text)


def test_a_job_file_alone_is_no_run_to_resume(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text("[job]\n")
    with pytest.raises(ConfigurationError, match=r"no run began in this folder; its job\.toml alone is none"):
        unfinished_run(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"has no job\.toml of a run"):
        resumed_run_dir(tmp_path, "digits")
    (tmp_path / CHECKPOINTS).mkdir()
    assert unfinished_run(str(tmp_path)) == resumed_run_dir(tmp_path, "digits") == tmp_path


def test_only_what_never_began_is_discarded(tmp_path: Path) -> None:
    unbegun, begun, others = (tmp_path / name for name in ("unbegun", "begun", "others"))
    for folder in (unbegun, begun, others):
        (folder / "logs").mkdir(parents=True)
    (begun / JOB_FILE).touch()
    lock = launcher_lock(others)
    for folder in (unbegun, begun, others):
        discard_unbegun(folder, keep=False)
    os.close(lock)
    assert [folder.exists() for folder in (unbegun, begun, others)] == [False, True, True]


def test_only_the_owner_is_in_the_block(tmp_path: Path) -> None:
    with locked_run(tmp_path):
        assert launcher_of(tmp_path) == os.getpid()
        with pytest.raises(ConfigurationError, match="works in it"), locked_run(tmp_path):
            pytest.fail("two are")
    assert launcher_of(tmp_path) is None
    with pytest.raises(ConfigurationError, match="No such file or directory"), locked_run(tmp_path / "gone"):
        pytest.fail("there is none")


@pytest.mark.parametrize("error", [ConfigurationError, KeyboardInterrupt, None])
def test_files_are_put_back_where_a_start_is_refused(tmp_path: Path, error: type[BaseException] | None) -> None:
    (tmp_path / "a").write_text("before")
    (tmp_path / "b.kept").write_text("of a start that was killed")
    with suppress(KeyboardInterrupt, ConfigurationError), unchanged_if_refused(tmp_path, ["a", "b", "c"]):
        write_durably(tmp_path / "a", b"after")
        if error is not None:
            raise error("refused")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a": "before" if error is ConfigurationError else "after"
    }


def test_the_newest_run_is_the_one_that_began_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "RUNS", tmp_path)
    for number, name in enumerate(("old", "new"), start=1):
        (tmp_path / name).mkdir()
        (tmp_path / name / JOB_FILE).touch()
        (tmp_path / name / "origin.json").write_text(json.dumps({"job_file": "job.toml", "began_at": number}))
    os.utime(tmp_path / "old" / JOB_FILE, (2**31, 2**31))
    assert [run.name for run in runs_here()] == ["old", "new"]
