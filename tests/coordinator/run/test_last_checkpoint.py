"""A last checkpoint that is damaged, and shards that cannot save: others are taken, and every repetition ends (P7)."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.encoding import encode, sha256_of
from parashard.checkpoints.manifest import ShardPart
from parashard.errors import ParashardError, Superseded, Unreachable
from parashard.job.load import job_from_toml
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.draining import READS_MAX, TAKING_S_MAX
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run import coordination as module
from parashard_coordinator.run.coordination import Coordination
from parashard_coordinator.run.store import RunStore
from parashard_coordinator.shards import ShardChannels
from support.checkpoint_cases import PLAN, RUN, STEPS, write_plan, write_shard
from support.coordinator_cases import Caller, core_of
from support.fake_shards import FakeShards
from support.resolved_job import resolved_here
from support.small_job import SMALL_JOB
from support.store_fakes import MemoryStore

JOB = resolved_here(job_from_toml(SMALL_JOB))


class Saves:
    """Two shards that hand out what they have saved, unless it is said to be damaged.

    Parameters
    ----------
    damages : int
        So many of the first shard's checkpoints are not what was written by the time that they are read.
    """

    def __init__(self, store: MemoryStore, damages: int = 0) -> None:
        self._store = store
        self._left = damages
        self._number = [0, 0]
        self._parts: dict[int, ShardPart] = {}

    def __call__(self, request: shard_pb2.TakeCheckpointRequest) -> tuple[ShardPart, list[tuple[int, int]]]:
        part = self._parts.get(request.shard)
        if part is None or part.name == request.damaged:
            self._parts[request.shard] = self._saved(request.shard)
        return self._parts[request.shard], [(0, STEPS)]

    def _saved(self, shard: int) -> ShardPart:
        self._number[shard] += 1
        id_ = CheckpointId(1, shard, 1, self._number[shard])
        content = encode(write_shard(self._store, id_, job_digest=JOB.digest))
        if shard == 0 and self._left:
            self._left -= 1
            name = next(name for name in self._store.contents if name.startswith(f"{id_.folder}/variables-"))
            self._store.contents[name] = self._store.contents[name][:10]
        return ShardPart(name=id_.folder, size_bytes=len(content), sha256=sha256_of(content))


class Case:
    """A job whose steps are all in."""

    def __init__(self, run_dir: Path, damages: int = 0) -> None:
        self.now_s = 0.0
        self.store = MemoryStore()
        write_plan(self.store)
        self.core = core_of(steps_total=STEPS)
        caller = Caller(self.core)
        while not self.core.job.leases.finished:
            caller.lease(STEPS)
            caller.complete_all()
        self.shards = FakeShards(Saves(self.store, damages))
        run_store = RunStore(self.store, claim_incarnation(self.store, "coordinator"))
        job = pb.GetJobReply(run_id=RUN, job_digest=JOB.digest)
        exclusive = ExclusiveCore(self.core, clock=lambda: self.now_s)
        channels = cast(ShardChannels, self.shards)
        self.coordination = Coordination(exclusive, JOB, PLAN, job, run_dir, run_store, channels)

    def manifests(self) -> int:
        return len(self.store.names("jobs"))


@pytest.mark.parametrize("damages", [0, 1, READS_MAX - 1])
def test_another_one_is_taken_for_one_that_is_damaged(tmp_path: Path, damages: int) -> None:
    case = Case(tmp_path, damages)
    for _ in range(damages):
        case.coordination._save_what_is_due()
        assert case.core.job.state is JobState.RUNNING
    case.coordination._save_what_is_due()
    assert (case.core.job.state, case.manifests()) == (JobState.DONE, damages + 1)


def test_a_store_that_damages_every_one_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    case = Case(tmp_path, damages=100)
    while not case.core.job.over:
        case.coordination._save_what_is_due()
    assert (case.core.job.state, case.manifests()) == (JobState.FAILED, READS_MAX)
    assert f"the last checkpoint was taken {READS_MAX} times and never found as it was written" in case.core.job.reason
    assert "variables-" in case.core.job.reason, "it says which file"


def test_at_the_end_a_shard_that_is_superseded_is_waited_for(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.shards.refusal = Superseded("another process has claimed incarnation 2 of shard-0")
    case.coordination._save_what_is_due()
    assert case.core.job.state is JobState.RUNNING
    case.shards.refusal = None
    case.coordination._save_what_is_due()
    assert case.core.job.state is JobState.DONE


def test_a_shard_that_refuses_for_long_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path)
    case.shards.refusal = Superseded("another process has claimed incarnation 2 of shard-0")
    monkeypatch.setattr(module, "INVALID_ANSWERS_S_MAX", -1.0)
    case.coordination._save_what_is_due()
    assert case.core.job.state is JobState.FAILED
    assert "another process has claimed incarnation 2 of shard-0" in case.core.job.reason


@pytest.mark.parametrize("drained", [False, True])
def test_a_coordinator_that_shards_obey_no_more_ends_if_another_has_claimed_the_run(
    tmp_path: Path, drained: bool
) -> None:  # P23
    case = Case(tmp_path)
    case.shards.refusal = Superseded("this shard obeys incarnation 2 of the coordinator, not 1")
    claim_incarnation(case.store, "coordinator")
    if drained:
        case.core.create_checkpoint(request=7)
    with pytest.raises(Superseded, match=r"obeys incarnation 2|a later coordinator has this run"):
        case.coordination._save_what_is_due()


@pytest.mark.parametrize("refusal", [Unreachable("no answer"), Superseded("another process has claimed it")])
def test_a_drained_checkpoint_that_no_try_brings_about_is_given_up(tmp_path: Path, refusal: ParashardError) -> None:
    case = Case(tmp_path)
    case.core.create_checkpoint(request=7)
    case.shards.refusal = refusal
    for case.now_s in (0.0, 0.0, TAKING_S_MAX):
        case.coordination._save_what_is_due()
        assert case.core.job.draining.target is not None, "it is tried again"
    case.now_s = TAKING_S_MAX + 1.0
    case.coordination._save_what_is_due()
    answer = case.core.create_checkpoint(request=7)
    assert answer.error == f"not every shard has saved within {TAKING_S_MAX:.0f} s: {refusal}"
    assert case.core.job.draining.target is None, "leasing goes on"
