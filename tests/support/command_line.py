"""`parashard` in this process, as a shell runs it: an exit code, and what was said."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from parashard.cli import main


class Ran(NamedTuple):
    """How a command ended."""

    exit_code: int
    out: str
    err: str


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run `parashard` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["parashard", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    said = capsys.readouterr()
    return Ran(int(ended.value.code or 0), said.out, said.err)
