"""What a process adds to its metrics is shown from the next scrape on."""

from __future__ import annotations

import pytest
from prometheus_client import Gauge
from prometheus_client.registry import Collector

from parashard.telemetry.metrics import Metrics


def test_what_is_added_after_a_scrape_is_in_the_next_one_with_what_was_there() -> None:
    metrics = Metrics("worker")
    metrics.add(lambda: Gauge("first", "First.", registry=None))
    assert b"first 0.0" in metrics.scrape()[1]
    metrics.add(lambda: Gauge("second", "Second.", registry=None))
    text = metrics.scrape()[1]
    assert b"first 0.0" in text
    assert b"second 0.0" in text
    assert b'role="worker"' in text


def test_a_collector_that_cannot_be_made_yet_is_made_at_a_later_scrape() -> None:
    made: list[Collector] = []

    def collector() -> Collector:
        if not made:
            made.append(Gauge("late", "Late.", registry=None))
            raise OSError("not yet")
        return made[0]

    metrics = Metrics("shard")
    metrics.add(collector)
    with pytest.raises(OSError, match="not yet"):
        metrics.scrape()
    assert b"late 0.0" in metrics.scrape()[1]
