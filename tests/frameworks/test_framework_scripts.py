"""The examples of each framework on a real cluster: they learn, and rounds give the same bits whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cluster_run import eventually
from support.command_run import ROOT
from support.script_run import ScriptRun

pytestmark = [pytest.mark.xdist_group("frameworks"), pytest.mark.timeout(900)]


@pytest.fixture(params=["torch", "jax"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ScriptRun]]:
    why = f"NO TEST OF ps.{request.param}: it is not installed; `make test-frameworks` has it"
    pytest.importorskip(request.param, reason=why)
    text = (ROOT / "examples" / f"digits_{request.param}.py").read_text()
    runs: list[ScriptRun] = []

    def begin(*words: str) -> ScriptRun:
        runs.append(ScriptRun(tmp_path, text, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


def told(run: ScriptRun) -> Any:
    assert run.wait() == 0, run.complaint()
    return json.loads(run.output().splitlines()[-1])


def test_it_learns_and_what_is_the_user_s_own_has_the_weights(start: Callable[..., ScriptRun]) -> None:
    found = told(start())
    assert found["own"] == pytest.approx(found["accuracy"])
    assert found["accuracy"] > 0.93


def test_rounds_give_the_same_bits_for_any_number_of_workers_and_whatever_is_killed(
    start: Callable[..., ScriptRun],
) -> None:
    rounds = "--consistency", "sync:4", "--epochs", "40"
    expected = told(start(*rounds, "--workers", "1"))
    run = start(*rounds, "--workers", "3")
    eventually(lambda: {"worker-0", "worker-1", "shard-1"} <= set(run.processes()), "all are up", told=run.complaint)
    for name in ("worker-1", "shard-1"):
        run.kill(name)
    assert told(run) == expected
