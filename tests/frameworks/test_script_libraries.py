"""Large libraries of scripts that are no frameworks: a fork server has imported them, and may fork nevertheless."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from parashard.launch.forks import Forks, Request, script_modules
from parashard.process.resources import thread_variables

LIBRARIES = ("pandas", "pyarrow", "scipy.stats", "sklearn", "torch._dynamo")
DEADLINE_S = 60.0


def test_a_worker_finds_them_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        pytest.importorskip(name, reason=f"NO TEST OF {name}: it is not installed; `make test-frameworks` has it")
    (tmp_path / "child.py").write_text(f"import sys\nprint(sorted({set(LIBRARIES)} & sys.modules.keys()))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("JE_ARROW_MALLOC_CONF", "dirty_decay_ms:500")  # the user's own
    command = [sys.executable, "-P", "-m", "child"]
    preload = script_modules({name: import_module(name) for name in LIBRARIES})
    lifeline, held = os.pipe()
    forks = Forks(lifeline, thread_variables(1, {}, override=True))
    try:
        with (tmp_path / "log").open("wb") as log:
            child = forks.start(Request(command, str(tmp_path), {**os.environ}, preload), log.fileno())
        assert child.wait(DEADLINE_S) == 0
    finally:
        forks.close()
        os.close(lifeline)
        os.close(held)
    assert forks._threaded == set()
    assert (tmp_path / "log").read_text().strip() == str(list(LIBRARIES))
