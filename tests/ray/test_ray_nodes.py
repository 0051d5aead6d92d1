"""What nodes do by themselves: an autoscaler starts them, one stands still and is given up, and the head is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from ray_run import LEDGER, RayRun, ledger

from parashard.process.shell import ExitCode
from support.cluster_run import ClusterRun, eventually
from support.command_run import ROOT

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]
SILENT_MS = 2000  # three times in turn: a node that stands still is dead for Ray after some six seconds
PLACED_S = 300.0  # the autoscaler starts node after node


@pytest.fixture
def autoscaled(ray: None) -> Iterator[RayNodes]:
    """Return a head without a CPU, whose autoscaler starts nodes of one CPU each."""
    nodes = RayNodes(1, autoscales=True)
    yield nodes
    nodes.down()


@pytest.fixture
def two(ray: None) -> Iterator[RayNodes]:
    """Return a head and two nodes, each with room for a whole job."""
    nodes = RayNodes(3, cpus=5, silent_ms=SILENT_MS)
    yield nodes
    nodes.down()


def test_an_autoscaler_starts_nodes_for_shards_and_workers_that_wait(autoscaled: RayNodes, tmp_path: Path) -> None:
    assert autoscaled.cpus() == [0]
    job = ledger(tmp_path, "ledger.toml")
    run = RayRun(autoscaled, tmp_path, job.file, *LEDGER, "--set", "cluster.workers=2")
    try:
        eventually(lambda: len(run.processes()) == 4, "nodes come", deadline_s=PLACED_S, told=run.told, poll_s=0.5)
        run.until_live(2)
        head, *others = autoscaled.cpus()
        assert (head, set(others)) == (0, {1})
        assert len(others) >= 4, "a node for each shard and worker; of nodes that come slowly Ray starts more"
        job.let_end()
        assert run.report()["ledger_wrong"] == 0
        run.until_gone()
        assert run.shared_memory() == []
    finally:
        run.clean_up()


@pytest.mark.parametrize("with_all", [False, True], ids=["the raylet alone", "with all processes"])
def test_a_node_that_stands_still_is_given_up_and_does_no_harm_when_it_goes_on(
    two: RayNodes, tmp_path: Path, with_all: bool
) -> None:
    job = ledger(tmp_path, "ledger.toml")
    run = RayRun(two, tmp_path, job.file, *LEDGER)
    stopped: list[int] = []
    try:
        run.until_live(3)
        run.wait_for_steps(40)
        node = run.node_of("worker-0")  # each node has a shard
        there = [name for name, at in run.places().items() if at == node]
        assert [name for name in there if name.startswith("shard")], run.places()
        stopped += two.stop(node, with_all=with_all)
        run.until(lambda status: any(worker.restarts for worker in status.workers), "workers are started elsewhere")
        run.until_live(3)
        steps = run.status().steps_complete
        run.wait_for_steps(steps + 8)
        if with_all:  # its old processes wake up, and learn that others have replaced them
            _go_on(stopped)
        job.let_end()
        report = run.report()
        assert (report["ledger_wrong"], report["shard_restarts"]) == (0, 1)
        eventually(
            lambda: not run.processes(), "every process ends, on the node that stands still, too", told=run.processes
        )
        _go_on(stopped)
        run.until_gone()
        eventually(lambda: not two.is_up(node), "Ray ends the node", told=two.processes)
        assert run.shared_memory() == []
    finally:
        _go_on(stopped)
        run.clean_up()


def test_a_killed_raylet_takes_its_processes_along(two: RayNodes, tmp_path: Path) -> None:
    job = ledger(tmp_path, "ledger.toml")
    run = RayRun(two, tmp_path, job.file, *LEDGER)
    try:
        run.until_live(3)
        run.wait_for_steps(40)
        node = run.node_of("worker-0")
        places = run.places()
        there = {pid for name, pid in run.processes().items() if places.get(name) == node}
        os.kill(two.raylet(node), signal.SIGKILL)
        eventually(lambda: not there & {*run.processes().values()}, "none of its processes is left", told=run.processes)
        run.until_live(3)
        job.let_end()
        report = run.report()
        assert (report["ledger_wrong"], report["shard_restarts"]) == (0, 1)
        assert run.output().count("\n") == 1, "the report alone: Ray would print the end of the raylet's log"
        run.until_gone()
        assert run.shared_memory() == []
    finally:
        run.clean_up()


@pytest.mark.parametrize("another", [False, True], ids=["no head", "another head"])
def test_a_run_whose_head_is_lost_is_saved_says_how_it_goes_on_and_leaves_nothing(
    two: RayNodes, tmp_path: Path, another: bool
) -> None:
    job = ledger(tmp_path, "ledger.toml")
    run = RayRun(two, tmp_path, job.file, *LEDGER)
    again = None
    try:
        run.until_live(3)
        run.wait_for_steps(40)
        start_another = two.lose_head()
        if another:
            start_another()
        run.wait()
        assert run.process.returncode == ExitCode.FAILED
        said = run.complaint()
        why = "another head" if another else "the head of the Ray cluster (its GCS) has not answered for 3"
        assert why in said
        assert f"checkpoints are in {run.dir / 'checkpoints'}. Continue: parashard resume {run.dir}" in said
        assert "rpc_client" not in said, "Ray ends the driver by itself"
        assert run.processes() == {}
        for name in () if another else ("shard-0", "shard-1"):  # nodes that another head does not know may end first
            assert "event=stopping reason=SIGTERM" in (run.dir / "logs" / f"{name}.log").read_text(), "it saves"
        assert another or run.shared_memory() == []
        job.let_end()
        again = ClusterRun(run.dir, [job.file, *LEDGER, "--resume", "--on", "local"], ROOT)
        assert again.report()["ledger_wrong"] == 0
        assert run.shared_memory() == []
    finally:
        run.clean_up()
        if again is not None:
            again.clean_up()


def _go_on(stopped: list[int]) -> None:
    while stopped:
        with suppress(ProcessLookupError):
            os.kill(stopped.pop(), signal.SIGCONT)
