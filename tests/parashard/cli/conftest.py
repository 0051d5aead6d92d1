"""`parashard` in this process, in a folder with `job.toml` in it.

Commands run through `main` as the console script does; an exception that escapes it fails the test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import Command, Ran, run_command
from support.small_job import SMALL_JOB


@pytest.fixture
def parashard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("job.toml").write_text(SMALL_JOB)

    def run(*arguments: str) -> Ran:
        return run_command(monkeypatch, capsys, *arguments)

    return run
