"""Every script in scenarios/ goes as it says; `scenario_script` tells how to read and to write one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.scenario_script import transcript

SCRIPTS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_goes_as_it_says(script: Path) -> None:
    text = script.read_text()
    assert transcript(text) == text


def test_the_scripts_are_found() -> None:
    assert len(SCRIPTS) >= 9
