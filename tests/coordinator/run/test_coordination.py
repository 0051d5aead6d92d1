"""The coordinator's main loop: what a later coordinator needs is stored in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import Superseded
from parashard.job.load import job_from_toml
from parashard.process.shell import Stop
from parashard.store.claims import claim_incarnation
from parashard_coordinator.run import coordination as module
from parashard_coordinator.run.coordination import Coordination
from parashard_coordinator.run.exclusive import ExclusiveCore
from parashard_coordinator.run.store import RunStore
from support.checkpoint_cases import DIGEST, RUN
from support.coordinator_cases import core_of
from support.resolved_job import resolved_here
from support.small_job import SMALL_JOB
from support.store_fakes import MemoryStore

TICKS = 6
REGISTERS_AT = 3


def test_a_coordinator_that_decides_nothing_ends_too_once_it_has_a_successor(tmp_path: Path) -> None:  # P23
    store = MemoryStore()
    resolved = resolved_here(job_from_toml(SMALL_JOB))
    run_store = RunStore(store, claim_incarnation(store, "coordinator"))
    job = pb.GetJobReply(run_id=RUN, job_digest=DIGEST)
    coordination = Coordination(ExclusiveCore(core_of()), resolved, resolved.plan, job, tmp_path, run_store)
    coordination._save_if_changed()
    coordination._save_if_changed()
    claim_incarnation(store, "coordinator")
    fault = store.fail("names", "claims/")
    coordination._save_if_changed()
    assert fault.fired == 1, "a store that fails says nothing of a successor"
    with pytest.raises(Superseded):
        coordination._save_if_changed()


def test_a_shards_new_life_is_stored_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a coordinator that is killed meanwhile forgets it, and its successor counts one restart less.
    store, core = MemoryStore(), core_of(steps_total=8)
    resolved = resolved_here(job_from_toml(SMALL_JOB))
    run_store = RunStore(store, claim_incarnation(store, "coordinator"))
    coordination = Coordination(
        ExclusiveCore(core), resolved, resolved.plan, pb.GetJobReply(run_id=RUN, job_digest=DIGEST), tmp_path, run_store
    )
    ticks, saved_at = [0], []

    class Ticking(Stop):
        def wait(self, timeout_s: float | None = None) -> bool:
            ticks[0] += 1
            if ticks[0] == REGISTERS_AT:
                core.shards.view += 1
            return ticks[0] > TICKS

    monkeypatch.setattr(module, "SAVE_S", 1e9)
    monkeypatch.setattr(coordination, "_look", lambda: True)
    monkeypatch.setattr(coordination, "_command_shards", lambda: None)
    monkeypatch.setattr(coordination, "_save_if_changed", lambda: saved_at.append(ticks[0]))
    coordination.run(Ticking())
    assert saved_at == [1, REGISTERS_AT, TICKS + 1], "at the beginning, for the new life, and at the end"
