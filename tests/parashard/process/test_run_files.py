"""Paths as messages show them."""

from pathlib import Path

import pytest

from parashard.process.run_files import short_path


def test_paths_below_the_working_directory_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "models" / "mine.py")) == "models/mine.py"
    assert short_path(tmp_path / "runs") == "runs"
    assert short_path("runs") == "runs"


@pytest.mark.parametrize("path", ["/elsewhere/mine.py", "../elsewhere"])
def test_other_paths_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(path) == path
    assert short_path(f"{tmp_path}-beside/x") == f"{tmp_path}-beside/x"
