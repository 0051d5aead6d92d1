"""A small valid job, and a way to put a job file on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.small_job import SMALL_JOB


@pytest.fixture
def minimal() -> str:
    """Return the text of a job file with only what is required."""
    return SMALL_JOB


@pytest.fixture
def write_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes `job.toml` into the working directory and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = SMALL_JOB) -> Path:
        Path("job.toml").write_text(text)
        return Path("job.toml")

    return write
