"""RayRun: `parashard run --on ray`, which is asked as a `ClusterRun` is; and ledgers that last while nodes are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_nodes import RayNodes, processes_of_run

from parashard.protocol.coordinator_client import coordinator_in
from support.cluster_run import ClusterRun, eventually
from support.command_run import ROOT
from support.long_job import LongJob

LEDGER = ["--set", "job.epochs=2", "--set", "checkpoint.every_s=0.5"]
SHARED_MEMORY = Path("/dev/shm")
QUICK_UNTIL = 40
"""Steps after so many take a second each, until a test lets the job end."""


class RayRun(ClusterRun):
    """`parashard run --on ray`, and what it has on the nodes."""

    def __init__(self, nodes: RayNodes, folder: Path, *words: str) -> None:
        self.nodes = nodes
        super().__init__(folder / "run", [*words, "--on", f"ray:{nodes.address}"], ROOT)

    def processes(self) -> dict[str, int]:
        """Return shards and workers by name."""
        return processes_of_run(str(coordinator_in(self.dir).get("address")))

    def places(self) -> dict[str, str]:
        """Return the nodes of shards and workers by name."""
        nodes = {name: self.nodes.node_of(pid) for name, pid in self.processes().items()}
        return {name: node for name, node in nodes.items() if node}

    def node_of(self, name: str) -> str:
        """Return the node of a shard or worker, waiting until it has one."""
        return str(eventually(lambda: self.places().get(name), f"{name} runs", told=self.told))

    def until_live(self, workers: int) -> None:
        """Wait until so many workers and both shards are heard."""
        self.until(
            lambda status: (
                sum(worker.live for worker in status.workers) == workers and all(shard.live for shard in status.shards)
            ),
            f"{workers} workers and the shards are live",
        )

    def until_gone(self) -> None:
        """Wait until nothing of the run is left on the nodes and in Ray."""
        eventually(lambda: not self.processes(), "every process ends", told=self.processes)
        eventually(lambda: self.nodes.left() == ([], []), "nothing is left in Ray", told=self.nodes.left)

    def shared_memory(self) -> list[Path]:
        """Return what the run has in shared memory."""
        return list(SHARED_MEMORY.glob(f"parashard-*/{coordinator_in(self.dir).get('run_id')}*"))


def ledger(folder: Path, example: str) -> LongJob:
    """Return a ledger as a job that lasts."""
    return LongJob(folder, example, QUICK_UNTIL)


def quiet_run(folder: Path, example: str, consistency: str) -> dict[str, Any]:
    """Return the report of a ledger on this machine, without Ray and without faults."""
    job = ledger(folder, example)
    job.let_end()
    run = ClusterRun(folder / "run", [job.file, *LEDGER, "--consistency", consistency], ROOT)
    try:
        return run.report()
    finally:
        run.clean_up()
