"""Jobs in trouble under a real Prometheus: slow workers, bad steps, wasted pushes, a busy shard and a failed job.

`troubled_model.py` makes the trouble; `test_monitored_run.py` has the alerts of a job whose processes are at fault.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.prometheus.targets import follow
from parashard.launch.local_cluster import MODULES
from parashard.protocol.coordinator_client import ADDRESS_FILE
from support.cluster_run import DEADLINE_S, eventually, sets
from support.command_run import DIES_WITH_US, ROOT
from support.prometheus_server import PrometheusServer, needs_prometheus
from support.troubled_model import NOT_FINITE
from support.watched_run import watch

pytestmark = [
    pytest.mark.xdist_group("more clusters"),
    pytest.mark.timeout(900),
    pytest.mark.full("a real Prometheus over real runs; `promtool` plays the alerts in test_prometheus_rules.py"),
    needs_prometheus,
]

JOB = "tests/support/troubled.toml"
LOST_STEPS = 100
IDLE_ROWS = 1 << 19  # 16 MiB of weights


def test_three_slow_workers_of_four_push_stale_gradients_and_bad_steps_are_skipped(tmp_path: Path) -> None:
    # Of 43 pushes the slow ones do three, which miss the fast one's 40: over 8 for each of four workers.
    troubles = sets(model__folder=str(tmp_path), model__lag_steps=40, model__bad_every=50)
    with watch(tmp_path, [JOB, *troubles, *sets(job__on_bad_step="skip", cluster__workers=4)]) as watched:
        watched.expect_firing("ParashardStalenessHigh", "ParashardStepsSkipped")


def test_what_a_shard_loses_again_and_again_reaches_the_other_one_twice(tmp_path: Path) -> None:
    # No checkpoint is ever due: a shard that is killed begins at 0, and the steps it lacks are pushed to both.
    settings = sets(model__folder=str(tmp_path), cluster__shards=2, cluster__max_restarts=1000, checkpoint__every_s=0)
    partitioner = 'cluster.partitioner={ kind = "fixed-shards" }'  # else the small variable is one shard's
    with watch(tmp_path, [JOB, *settings, "--set", partitioner, "--set", "cluster.restart_backoff_s=0"]) as watched:
        killed = 0

        def kill_once_more() -> bool:
            nonlocal killed
            present = watched.incarnation(0)
            if present > killed and watched.prometheus.query(
                f'parashard_shard_steps_applied{{shard="0"}} > {LOST_STEPS}'
            ):
                watched.run.kill("shard", "0")
                killed = present
            return "ParashardPushesWasted" in watched.prometheus.firing()

        watched.until(kill_once_more, "ParashardPushesWasted fires")


def test_a_shard_that_has_more_to_do_than_four_workers_is_always_busy_until_they_leave(tmp_path: Path) -> None:
    # Adam moves 16 MiB of weights, and reads and writes as much of each slot, at every push; a worker copies them once.
    settings = sets(model__folder=str(tmp_path), model__idle_rows=IDLE_ROWS, optimizer__kind="adam")
    cluster = sets(cluster__workers=4, cluster__shard_threads=1, checkpoint__every_s=0)
    with watch(tmp_path, [JOB, *settings, *cluster]) as watched:
        watched.expect_firing("ParashardShardSaturated")
        client = watched.run.client()
        client.scale(0)
        client.close()
        watched.expect_quiet("ParashardShardSaturated")


def test_a_failed_job_is_reported_after_its_coordinator_has_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = sets(model__folder=str(tmp_path), cluster__launcher="external", cluster__workers=1)
    joined = ("--connect", str(run_dir))
    with ended(tmp_path) as start:
        prometheus = start.prometheus()
        of_job = ("--job", JOB, "--model-folder", str(Path(JOB).parent), *settings)
        coordinator = start(MODULES["coordinator"], *of_job, "--run-dir", str(run_dir))
        eventually((run_dir / ADDRESS_FILE).exists, "the coordinator serves", told=start.told)
        start(MODULES["shard"], *joined, "--index", "0")
        start(MODULES["worker"], *joined, "--host", "localhost")
        threading.Thread(target=follow, args=(run_dir, prometheus.targets), daemon=True).start()
        state = "parashard_coordinator_job_state"
        eventually(lambda: prometheus.query(f"{state} == 2"), "the job is watched", told=start.told)
        (tmp_path / NOT_FINITE).touch()
        eventually(lambda: prometheus.query(f"{state} == 5"), "its failure is seen", told=start.told)
        coordinator.terminate()
        assert coordinator.wait(DEADLINE_S) == 1
        eventually(
            lambda: not prometheus.query(state) and "ParashardJobFailed" in prometheus.firing(),
            "its series is stale and ParashardJobFailed fires",
            told=prometheus.told,
        )


class Starter:
    """Starts services as `python -m MODULE` does, and a Prometheus."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._servers: list[PrometheusServer] = []

    def __call__(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{module}.log").open("w") as log:
            command = [*DIES_WITH_US, sys.executable, "-m", module, *arguments]
            self._processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        return self._processes[-1]

    def prometheus(self) -> PrometheusServer:
        self._servers.append(PrometheusServer(self._folder))
        return self._servers[-1]

    def told(self) -> str:
        """Return what the services have said, for a failure."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.log")))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for server in self._servers:
            server.stop()


@contextmanager
def ended(folder: Path) -> Iterator[Starter]:
    """Yield what starts processes; they end with the block."""
    starter = Starter(folder)
    try:
        yield starter
    finally:
        starter.end()
