"""What a process adds to its metrics is shown from the next scrape on."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import Gauge
from prometheus_client.core import Metric

from parashard.telemetry.http import Metrics


def test_what_is_added_after_a_scrape_is_in_the_next_one_with_what_was_there() -> None:
    metrics = Metrics("worker")
    metrics.add(Gauge("first", "First.", registry=None).collect)
    assert b"first 0.0" in metrics.scrape()[1]
    metrics.add(Gauge("second", "Second.", registry=None).collect)
    text = metrics.scrape()[1]
    assert b"first 0.0" in text
    assert b"second 0.0" in text
    assert b'role="worker"' in text


def test_families_that_cannot_be_read_yet_are_read_at_a_later_scrape() -> None:
    asked: list[None] = []

    def families() -> Iterable[Metric]:
        asked.append(None)
        if len(asked) == 1:
            raise OSError("not yet")
        return Gauge("late", "Late.", registry=None).collect()

    metrics = Metrics("shard")
    metrics.add(families)
    with pytest.raises(OSError, match="not yet"):
        metrics.scrape()
    assert b"late 0.0" in metrics.scrape()[1]
