"""The profile `monitoring`: a real Prometheus finds every container of the job by the names of the services."""

from __future__ import annotations

import json

import pytest
from composed_job import eventually
from container_engine import prometheus_image

ASK = "import urllib.request as r; print(r.urlopen('http://prometheus:9090/api/v1/targets', timeout=5).read().decode())"


@pytest.fixture(scope="module")
def prometheus(image: str) -> str:
    """Return the name of an image with Debian's Prometheus."""
    return prometheus_image()


def test_prometheus_scrapes_the_coordinator_both_shards_and_every_worker(compose, prometheus):
    job = compose("ledger.toml", workers=2, prometheus=prometheus)
    up: list[str] = []
    answers: list[str] = [""]

    def all_up() -> bool:
        asked = job.ask("coordinator_1", "python", "-c", ASK)
        answers[:] = [asked.stdout + asked.stderr]
        if asked.returncode != 0:
            return False  # it is starting
        targets = json.loads(asked.stdout)["data"]["activeTargets"]
        up[:] = sorted(target["labels"]["instance"] for target in targets if target["health"] == "up")
        return len(up) == 5

    eventually(all_up, "coordinator, two shards and two workers are scraped", told=lambda: answers[-1])
    assert len(set(up)) == 5
    assert all(instance.endswith(":9100") for instance in up)
