"""The coordinator's metrics: they parse, they keep to base units, and their labels are bounded."""

from __future__ import annotations

import math
import time

import pytest
from coordinator_cases import Caller, core_of, done
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.core import Core
from coordinator.metrics import CoordinatorCollector
from coordinator.pods.ledger import REASONS, ROLES
from coordinator.status import StatusView


def scraped(core: Core) -> dict[str, float]:
    """Return what a scrape shows, by name; a metric with a label fails, but for the ends of pods."""
    registry = CollectorRegistry()
    registry.register(CoordinatorCollector(core, lambda: StatusView("digits", "async", 2).message(core, 2.0)))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter")
        assert family.type == "counter" or not family.name.endswith("_total")
        for sample in family.samples:
            if sample.name == "parashard_coordinator_pod_ends_total":
                assert sample.labels["role"] in ROLES
                assert sample.labels["reason"] in REASONS
            elif not sample.name.endswith("_created"):
                assert not sample.labels, "no step, worker or shard names: they have no bound"
                found[sample.name.removeprefix("parashard_coordinator_")] = sample.value
                assert sample.name.startswith("parashard_coordinator_")
    return found


def test_a_job_on_its_way() -> None:
    core = core_of()
    caller = Caller(core)
    Caller(core, "worker-0")
    Caller(core, "worker-0")
    caller.lease(1)
    caller.call(completed=done(0, loss=0.25), want=1)
    shown = scraped(core)
    expected = {
        "steps": 40,
        "steps_complete_total": 1,
        "examples_total": 8,
        "leases": 1,
        "speculative_leases_total": 0,
        "workers_live": 2,
        "workers_wanted": 2,
        "shard_restarts_total": 0,
        "worker_restarts_total": 1,
        "worker_exits_total": 0,
        "rollbacks_total": 0,
        "loss": 0.25,
        "step_lag_max": 0,
        "job_state": 2,
    }
    assert {name: shown[name] for name in expected} == expected
    assert set(shown) - set(expected) == {"last_progress_timestamp_seconds"}


@pytest.mark.parametrize("ago_s", [0.0, 100.0])
def test_the_time_of_the_last_progress_is_wall_clock_time(ago_s: float) -> None:
    core = core_of()
    core.progress.last_step_s = time.monotonic() - ago_s
    assert math.isclose(scraped(core)["last_progress_timestamp_seconds"], time.time() - ago_s, abs_tol=5.0)
