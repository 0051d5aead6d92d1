"""A PyTorch module with state on a real cluster: running statistics and counters are right whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.cluster_run import eventually
from support.script_run import ScriptRun
from support.torch_ledger import TORCH_LEDGER

pytestmark = [pytest.mark.xdist_group("frameworks"), pytest.mark.timeout(900)]
pytest.importorskip("torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it")


def told(run: ScriptRun) -> Any:
    assert run.wait() == 0, run.complaint()
    return json.loads(run.output().splitlines()[-1])


def test_every_example_and_every_step_counts_once_whatever_is_killed(start: Callable[..., ScriptRun]) -> None:
    run = start(TORCH_LEDGER, "40", "async")
    eventually(lambda: {"worker-0", "worker-1", "shard-1"} <= set(run.processes()), "all are up", told=run.complaint)
    for name in ("worker-1", "shard-1", "worker-0", "coordinator"):
        run.kill(name)
    found = told(run)
    assert found["counts"] == [40.0, 40.0], "the least and the most that an example counts"
    assert (found["steps"], found["tracked"], found["examples"]) == (600, 600, 2400)
    assert found["variance"] > 0


def test_in_rounds_the_state_has_the_same_bits_for_any_number_of_workers(start: Callable[..., ScriptRun]) -> None:
    quiet = told(start(TORCH_LEDGER, "40", "sync:4", "1"))
    run = start(TORCH_LEDGER, "40", "sync:4", "3")
    eventually(lambda: {"worker-0", "worker-1", "shard-1"} <= set(run.processes()), "all are up", told=run.complaint)
    for name in ("worker-1", "shard-0", "coordinator"):
        run.kill(name)
    assert told(run) == quiet
    assert (quiet["counts"], quiet["steps"], quiet["examples"]) == ([40.0, 40.0], 600, 2400)
