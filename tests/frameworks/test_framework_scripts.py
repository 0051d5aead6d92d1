"""The examples of each framework on a real cluster: they learn, and rounds give the same bits whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.cluster_run import eventually
from support.command_run import ROOT
from support.mnist_files import written_as_mnist
from support.script_run import ScriptRun

pytestmark = [pytest.mark.xdist_group("frameworks"), pytest.mark.timeout(900)]


@pytest.fixture
def start(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., ScriptRun]
) -> Callable[..., ScriptRun]:
    framework, _, backend = request.param.partition(" on ")
    for name in filter(None, (framework, backend)):
        why = f"NO TEST OF ps.{framework}: no {name}; `make test-frameworks` has it"
        if find_spec(name) is None:
            pytest.skip(why)
    example, given = f"digits_{framework}.py", list[str]()
    if backend:
        monkeypatch.setenv("KERAS_BACKEND", backend)
        example, given = "mnist_keras.py", ["--data", str(written_as_mnist(tmp_path))]
    text = (ROOT / "examples" / example).read_text()
    return lambda *words: start(text, *given, *words)


def told(run: ScriptRun) -> Any:
    assert run.wait() == 0, run.complaint()
    return json.loads(run.output().splitlines()[-1])


@pytest.mark.full("JAX learns below, and PyTorch in the program of its page")
@pytest.mark.parametrize("start", ["torch"], indirect=True)
def test_it_learns_and_what_is_the_user_s_own_has_the_weights(start: Callable[..., ScriptRun]) -> None:
    found = told(start("--epochs", "40"))
    assert found["own"] == pytest.approx(found["accuracy"])
    assert found["accuracy"] > 0.93


@pytest.mark.parametrize(
    "start",
    [
        "jax",
        pytest.param("keras on torch", marks=pytest.mark.full("JAX has the same kills, test_torch_state.py PyTorch")),
    ],
    indirect=True,
)
def test_rounds_give_the_same_bits_for_any_number_of_workers_and_whatever_is_killed(
    start: Callable[..., ScriptRun],
) -> None:
    rounds = "--consistency", "sync:4", "--epochs", "20"
    expected = told(start(*rounds, "--workers", "1"))
    assert expected["own"] == pytest.approx(expected["accuracy"])
    assert expected["accuracy"] > 0.93
    run = start(*rounds, "--workers", "3")
    eventually(lambda: {"worker-0", "worker-1", "shard-1"} <= set(run.processes()), "all are up", told=run.complaint)
    for name in ("worker-1", "shard-1"):
        run.kill(name)
    assert told(run) == expected
