"""What keeps `parashard run` from starting anything: the run directory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from small_job import SMALL_JOB

from parashard.errors import ConfigurationError, ParashardError, StoreFailed
from parashard.job.load import load_job
from parashard.live import NoView
from parashard.process import ExitCode, exit_code_of
from parashard.run import run_job
from parashard.run_files import NEW_JOB_FILE


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
    monkeypatch.setattr("parashard.run.write_durably", refused)
    with pytest.raises(kind, match=says) as raised:
        run_job(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run", NoView(), init=None, output=None)
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
    monkeypatch.setattr("parashard.run.write_durably", lambda path, content: done.append(("file", path.name)))
    monkeypatch.setattr("parashard.run.sync_upwards", folders)
    with pytest.raises(ConfigurationError, match="enough"):
        run_job(load_job(tmp_path / "job.toml", environ={}), tmp_path / "run", NoView(), init=None, output=None)
    assert done == [("file", NEW_JOB_FILE), ("folders", "run")]
