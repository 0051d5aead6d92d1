"""The coordinator's metrics: they parse, they keep to base units, and their labels are bounded."""

from __future__ import annotations

import math
import time

import pytest

from parashard_coordinator.core.core import Core
from parashard_coordinator.core.supervision import REASONS, ROLES
from parashard_coordinator.endpoints.status import StatusView, coordinator_families
from parashard_coordinator.exclusive_core import ExclusiveCore
from support.coordinator_cases import Caller, announce, core_of, done
from support.shown_metrics import shown_families

NOW_S = 2.0  # of the coordinator's clock


def scraped(core: Core) -> dict[str, float]:
    """Return what a scrape shows, by name; a metric with a label fails, but for the ends of pods."""
    exclusive, status = ExclusiveCore(core, lambda: NOW_S), StatusView("digits", "async")
    found = {}
    for family in shown_families(coordinator_families(exclusive, status)):
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
        "steps_complete": 1,
        "examples_total": 8,
        "leases": 1,
        "speculative_leases_total": 0,
        "workers_live": 2,
        "workers_wanted": 2,
        "shards": 2,
        "shards_live": 2,
        "shard_restarts_total": 0,
        "worker_restarts_total": 1,
        "worker_exits_total": 0,
        "rollbacks_total": 0,
        "partly_skipped_steps": 0,
        "pod_watch_errors_total": 0,
        "training_loss": 0.25,
        "lag": 0,
        "step_lag_max": 0,
        "job_state": 2,
    }
    assert {name: shown[name] for name in expected} == expected
    assert set(shown) - set(expected) == {"last_progress_timestamp_seconds"}


def test_steps_that_a_shard_lost_are_no_longer_complete_and_their_examples_count_once() -> None:
    core = core_of()
    caller = Caller(core)
    caller.lease(1)
    caller.call(completed=done(0))
    assert (scraped(core)["steps_complete"], scraped(core)["examples_total"]) == (1, 8)
    announce(core, 1, incarnation=2)
    assert (scraped(core)["steps_complete"], scraped(core)["examples_total"]) == (0, 8)
    caller.lease(1)
    caller.call(completed=done(0, incarnations=(1, 2)))
    assert (scraped(core)["steps_complete"], scraped(core)["examples_total"]) == (1, 8)


def test_a_shard_that_is_silent_is_not_live_until_it_is_restarted() -> None:
    core = core_of(registered=False)
    assert (scraped(core)["shards"], scraped(core)["shards_live"]) == (2, 0)
    announce(core, 0)
    announce(core, 1)
    core.shard_silent(1, 3.5, "no answer")
    assert scraped(core)["shards_live"] == 1
    announce(core, 1, incarnation=2)
    assert scraped(core)["shards_live"] == 2


@pytest.mark.parametrize("ago_s", [0.0, 100.0])
def test_the_time_of_the_last_progress_is_wall_clock_time(ago_s: float) -> None:
    core = core_of()
    core.job.progress.last_step_s = NOW_S - ago_s
    assert math.isclose(scraped(core)["last_progress_timestamp_seconds"], time.time() - ago_s, abs_tol=5.0)
