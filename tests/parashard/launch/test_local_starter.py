"""Children of this process keep what every starter promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.launch.local_cluster import LocalCluster
from support.starter_conformance import CHILDREN, StarterConformance


class TestLocalCluster(StarterConformance):
    STARTER = "from parashard.launch.local_cluster import LocalCluster\nstarter = LocalCluster(folder)"
    FORKS = True

    @pytest.fixture
    def starter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
        monkeypatch.setenv("PYTHONPATH", str(CHILDREN))
        cluster = LocalCluster(tmp_path, forks=self.FORKS)
        yield cluster
        if cluster.running:
            cluster.end(grace_s=0.0)


class TestLocalClusterWithoutForks(TestLocalCluster):
    STARTER = TestLocalCluster.STARTER.replace("(folder)", "(folder, forks=False)")
    FORKS = False
