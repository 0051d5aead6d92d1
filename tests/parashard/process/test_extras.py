"""The command that installs an extra works where no package index has parashard."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from parashard.process import extras

ROOT = Path(__file__).parents[3]


def test_it_names_the_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert extras.install("torch") == f"pip install '{ROOT}[torch]'"
    monkeypatch.setattr(extras, "SOURCE", tmp_path / "site-packages")
    assert extras.install("torch") == "pip install 'PATH[torch]' (PATH: the source tree of parashard)"


def test_no_error_and_no_page_names_a_package_of_an_index() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for folder, kind in (
        ("parashard", "py"),
        ("coordinator", "py"),
        ("ps_server", "py"),
        ("worker", "py"),
        ("docs", "md"),
    ):
        for file in (ROOT / folder).rglob(f"*.{kind}"):
            text = file.read_text()
            assert not re.search(r"pip install ['\"]?parashard\[", text), file
            for extra in re.findall(r"\binstall\(['\"](\w+)['\"]\)", text):
                assert extra in known, file
