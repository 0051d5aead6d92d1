"""Processes that Ray places keep what every starter promises, and what its nodes do is no more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes

from parashard.job.load import load_job
from parashard.launch.ray_cluster import Ray, RayCluster
from parashard.launch.runs import Run
from support.small_job import SMALL_JOB
from support.starter_conformance import StarterConformance

pytestmark = pytest.mark.xdist_group("ray")


class TestRayCluster(StarterConformance):
    STARTER = """
from parashard.job.load import load_job
from parashard.launch.ray_cluster import Ray, RayCluster
from parashard.launch.runs import Run
starter = RayCluster(Run(load_job(folder / "small.toml"), folder), Ray(), print)
"""

    @pytest.fixture
    def starter(self, nodes: RayNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        (tmp_path / "small.toml").write_text(SMALL_JOB)
        (tmp_path / "logs").mkdir()
        run = Run(load_job(tmp_path / "small.toml"), tmp_path)
        last = {"CPU": 1.0, nodes.last: 0.01}
        cluster = RayCluster(run, Ray(worker_resources=last, shard_resources=last), print)
        yield cluster
        cluster.end(grace_s=0.0)

    @pytest.fixture
    def machine_goes(self, nodes: RayNodes) -> Iterator[Callable[[], None]]:
        last = nodes.last
        yield lambda: nodes.drain(last, deadline_s=60)
        nodes.kill(last)
        nodes.add()

    @pytest.fixture
    def machine_dies(self, nodes: RayNodes) -> Iterator[Callable[[], None]]:
        last = nodes.last
        yield lambda: nodes.kill(last)
        nodes.add()
