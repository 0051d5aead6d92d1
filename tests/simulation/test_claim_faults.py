"""Claims whose replies are lost, and processes that claim and die: each costs a restart at most, not the job (P23)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import sim_run
from sim_run import Outcome, simulate
from sim_settings import drawn_setting
from sim_store import SimulatedStore

from parashard.errors import AlreadyStored
from parashard.store.claims import claim_incarnation
from support.logs import quiet_log
from support.tiers import by_tier

JOBS = (
    ("digest", "sync:4", by_tier(quick=8, full=20)),
    ("ledger", "async", by_tier(quick=5, full=10)),
)
CLAIMS_MADE_BY_OTHERS_MAX = 6
NO_HANGS = {"hang": 0.0, "shard_hang": 0.0, "coordinator_hang": 0.0}  # what makes up for those is not judged here


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_log():
        yield


class LostReplies(SimulatedStore):
    """Makes some of the claims, and says that the name was taken: a library sent the request again."""

    rng: random.Random
    fired: Counter[str]

    def create(self, name: str, content: bytes | memoryview) -> None:
        lost = name.startswith("claims/") and name not in self.contents and self.rng.random() < 0.3
        super().create(name, content)
        if lost:
            self.fired["reply lost"] += 1
            raise AlreadyStored("sent again")


class Strays(SimulatedStore):
    """Lets a process that dies at once claim a shard, or the coordinator, while another one is about to write."""

    rng: random.Random
    fired: Counter[str]

    def create(self, name: str, content: bytes | memoryview) -> None:
        if name.startswith("shards/") and self.rng.random() < 0.05:
            self._claim(f"shard-{int(name.split('/')[2][1:])}")
        super().create(name, content)

    def replace(self, name: str, content: bytes | memoryview) -> None:
        if self.rng.random() < 0.05:
            self._claim("coordinator")
        super().replace(name, content)

    def _claim(self, name: str) -> None:
        if sum(self.fired.values()) < CLAIMS_MADE_BY_OTHERS_MAX:
            self.fired[name.partition("-")[0]] += 1
            claim_incarnation(self, name)


@pytest.mark.parametrize(("oracle", "policy", "seeds"), JOBS)
@pytest.mark.parametrize("kind", [LostReplies, Strays])
def test_no_claim_costs_a_job_its_end_or_its_promise(
    monkeypatch: pytest.MonkeyPatch, kind: type[LostReplies | Strays], oracle: str, policy: str, seeds: int
) -> None:
    runs: dict[int, Outcome] = {}
    fired: Counter[str] = Counter()
    for seed in range(seeds):
        faulty = type("Faulty", (kind,), {"rng": random.Random(seed), "fired": Counter()})
        monkeypatch.setattr(sim_run, "SimulatedStore", faulty)
        setting = drawn_setting(seed, oracle, policy)
        runs[seed] = simulate(seed, replace(setting, faults=replace(setting.faults, **NO_HANGS)))
        fired += faulty.fired  # type: ignore[attr-defined]
    assert {seed: run.violations for seed, run in runs.items() if run.violations} == {}
    assert all(fired[fault] for fault in (["reply lost"] if kind is LostReplies else ["shard", "coordinator"])), fired
