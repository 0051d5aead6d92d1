"""What keeps `parashard run` from starting anything, and what it puts right when it was stopped."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.checkpoints.catalogue import CheckpointId
from parashard.cli.options import begin_run
from parashard.display.live import JobView
from parashard.errors import ConfigurationError, JobFailed, ParashardError, StoreFailed
from parashard.job.load import load_job
from parashard.launch.run import INTERRUPTED, run_job
from parashard.launch.run_folders import read_report, write_report
from parashard.launch.runs import Run
from parashard.process.run_files import NEW_JOB_FILE
from parashard.process.shell import ExitCode, exit_code_of
from parashard.store.local import LocalStore
from support.checkpoint_cases import write_plan, write_shard
from support.small_job import SMALL_JOB


@pytest.mark.parametrize(
    ("number", "kind", "code", "says"),
    [
        (errno.ENOSPC, StoreFailed, ExitCode.IO_ERROR, "no space left on device; make room and start it again"),
        (errno.EACCES, ConfigurationError, ExitCode.CONFIGURATION, "Permission denied"),
    ],
)
def test_a_run_directory_that_cannot_be_written_says_whether_to_start_again(  # P21
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[ParashardError],
    code: ExitCode,
    says: str,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, {errno.ENOSPC: "No space left on device", errno.EACCES: "Permission denied"}[number])

    (tmp_path / "run").mkdir()
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    monkeypatch.setattr("parashard.launch.run.write_durably", refused)
    with pytest.raises(kind, match=says) as raised:
        run_job(Run(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run"), JobView())
    assert exit_code_of(raised.value) == code


def test_the_first_job_file_and_the_folders_above_it_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []

    def folders(path: Path) -> None:
        done.append(("folders", path.name))
        raise OSError(errno.EACCES, "enough")

    (tmp_path / "run").mkdir()
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    monkeypatch.setattr("parashard.launch.run.write_durably", lambda path, content: done.append(("file", path.name)))
    monkeypatch.setattr("parashard.launch.run.sync_upwards", folders)
    with pytest.raises(ConfigurationError, match="enough"):
        run_job(Run(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run"), JobView())
    assert done == [("file", NEW_JOB_FILE), ("folders", "run")]


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [(KeyboardInterrupt(), "stopped", INTERRUPTED), (JobFailed("no worker is left"), "failed", ExitCode.FAILED)],
    ids=["stopped", "failed"],
)
def test_the_report_of_a_run_that_is_not_done_has_what_its_shards_saved_as_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, state: str, code: int
) -> None:
    run_dir = tmp_path / "run"

    class Stopped:
        accepted, failure_code = True, ExitCode.FAILED
        raised = None
        status = pb.GetStatusReply(steps_complete=1190, steps_total=1500)

        def __init__(self, *_: object, **about: object) -> None:
            pass

        def start_coordinator(self) -> None:
            pass

        def until_over(self) -> None:
            """End as the coordinator writes its report, before the shards save."""
            write_report(run_dir, {"state": state, "reason": "why", "steps_applied": [1182, 1202]})
            store = LocalStore(run_dir / "checkpoints")
            write_plan(store)
            for shard in range(2):
                write_shard(store, CheckpointId(1, shard, 1, 1), applied=((0, 1234),))
            raise end

        def tell_stop(self, reason: str) -> None:
            pass

    monkeypatch.setattr("parashard.launch.run.Running", Stopped)
    run_dir.mkdir()
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    outcome = run_job(Run(load_job(tmp_path / "job.toml", environ={}), run_dir), JobView())
    assert (outcome.exit_code, outcome.report["steps_applied"]) == (code, [1234, 1234])
    assert read_report(run_dir) == outcome.report
    if code == INTERRUPTED:
        assert outcome.reason.startswith("stopped at step 1,234 of 1,500 (saved). Continue: ")


def test_a_second_signal_while_a_run_stops_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    class Signalled:
        accepted, failure_code = False, ExitCode.FAILED
        raised = None

        def __init__(self, *_: object, **about: object) -> None:
            pass

        def start_coordinator(self) -> None:
            signal.raise_signal(signal.SIGTERM)

        def tell_stop(self, reason: str) -> None:
            signal.raise_signal(signal.SIGINT)
            said.append(reason)

    monkeypatch.setattr("parashard.launch.run.Running", Signalled)
    (tmp_path / "run").mkdir()
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    before = signal.getsignal(signal.SIGTERM)

    outcome = run_job(Run(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run"), JobView())

    assert (outcome.exit_code, said) == (INTERRUPTED, ["interrupted"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_is_interrupted_while_hosts_are_connected_to_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("parashard.launch.run.open_hosts", interrupted)
    (tmp_path / "hosts").write_text("one\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "job.toml").write_text(f'{SMALL_JOB}\n[cluster]\nlauncher = "ssh:{tmp_path / "hosts"}"\n')
    before = signal.getsignal(signal.SIGTERM)
    run = Run(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run")
    outcome = begin_run(tmp_path / "run", JobView(), lambda: run_job(run, JobView()), keep=False)
    assert (outcome.exit_code, outcome.reason) == (INTERRUPTED, "interrupted before the run began")
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("output", "problem"),
    [("folder", "this is a folder; allowed: a file"), ("file/model.npz", "cannot be written: .*file is no folder")],
)
def test_weights_that_cannot_be_copied_are_refused_before_the_run(tmp_path: Path, output: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    loaded = load_job(tmp_path / "job.toml", environ={})
    with pytest.raises(ConfigurationError, match=problem):
        run_job(Run(loaded, tmp_path / "run", output=tmp_path / output), JobView())


def test_a_run_that_does_not_begin_makes_no_place_for_its_weights(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(SMALL_JOB)
    loaded = load_job(tmp_path / "job.toml", environ={})
    with pytest.raises(ConfigurationError):
        run_job(Run(loaded, tmp_path / "no" / "run", output=tmp_path / "new" / "model.npz"), JobView())
    assert not (tmp_path / "new").exists()
