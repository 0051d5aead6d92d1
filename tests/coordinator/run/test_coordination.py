"""The coordinator's main loop: what a later coordinator needs is stored in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Superseded
from parashard.job.load import job_from_toml
from parashard.process.shell import Stop
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.core import Core
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run import coordination as module
from parashard_coordinator.run.coordination import Coordination
from parashard_coordinator.run.store import RunStore
from parashard_coordinator.shards import ShardChannels
from support.checkpoint_cases import DIGEST, RUN
from support.coordinator_cases import announce, core_of
from support.fake_shards import FakeShards
from support.resolved_job import resolved_here
from support.small_job import SMALL_JOB
from support.store_fakes import MemoryStore

TICKS = 6


class Scripted(Stop):
    """Asks for a stop after TICKS ticks, and does before each what a test says."""

    def __init__(self, before: Mapping[int, Callable[[], object]]) -> None:
        super().__init__()
        self._before = before
        self.ticks = 0

    def wait(self, timeout_s: float | None = None) -> bool:
        self.ticks += 1
        self._before.get(self.ticks, lambda: None)()
        return self.ticks > TICKS


def coordination_of(core: Core, store: MemoryStore, run_dir: Path) -> Coordination:
    resolved = resolved_here(job_from_toml(SMALL_JOB))
    run_store = RunStore(store, claim_incarnation(store, "coordinator"))
    job = pb.GetJobReply(run_id=RUN, job_digest=DIGEST)
    shards = cast(ShardChannels, FakeShards(save=lambda request: pytest.fail("nothing is to be saved")))
    return Coordination(ExclusiveCore(core), resolved, resolved.plan, job, run_dir, run_store, shards)


def test_a_coordinator_that_decides_nothing_ends_too_once_it_has_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P23
    monkeypatch.setattr(module, "SAVE_S", 0.0)
    store = MemoryStore()
    coordination = coordination_of(core_of(steps_total=8), store, tmp_path)
    faults = []

    def succeeded() -> None:
        claim_incarnation(store, "coordinator")
        faults.append(store.fail("names", "claims/"))

    stop = Scripted({2: succeeded})
    with pytest.raises(Superseded):
        coordination.run(stop)
    assert faults[0].fired == 1, "a store that fails says nothing of a successor"
    assert stop.ticks == 3


def test_a_shards_new_incarnation_is_stored_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a coordinator that is killed meanwhile forgets it, and its successor counts one restart less.
    monkeypatch.setattr(module, "SAVE_S", 1e9)
    store, core = MemoryStore(), core_of(steps_total=8)
    coordination = coordination_of(core, store, tmp_path)
    stored: list[list[int]] = []

    def look() -> None:
        saved = RunStore(store, 9).load_saved()
        assert saved is not None
        stored.append(list(saved.shard_incarnations))

    coordination.run(Scripted({2: look, 3: lambda: announce(core, 1, 2), 4: look}))
    assert stored == [[1, 1], [1, 2]]
