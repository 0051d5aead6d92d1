"""The end of a job whose store is elsewhere: what the run directory has goes there before the job is done."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import load

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.manifest import ShardPart
from parashard.errors import MalformedFrame, Superseded
from parashard.job.load import job_from_toml
from parashard.process.run_files import HISTORY_FILE, REPORT_FILE, WEIGHTS_FILE
from parashard.process.shell import Stop
from parashard.store import Store, open_store
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run import coordination as module
from parashard_coordinator.run.coordination import Coordination
from parashard_coordinator.run.store import RunStore
from parashard_coordinator.shards import ShardChannels
from support.checkpoint_cases import PLAN, RUN, STEPS, model_of, write_drained
from support.coordinator_cases import Caller, announce, core_of
from support.fake_shards import FakeShards
from support.resolved_job import resolved_here
from support.small_job import SMALL_JOB
from support.store_fakes import MemoryStore

RESULTS = {HISTORY_FILE, REPORT_FILE, WEIGHTS_FILE}


def at_its_end(
    store: Store, run_dir: Path, saved: Callable[[], None] = lambda: None
) -> tuple[Coordination, Core, FakeShards]:
    """Return a job of which only what follows the last checkpoint is left to do.

    Its shards have saved checkpoint j1 already and hand it out again; `saved` is called each time.
    """
    resolved = resolved_here(job_from_toml(SMALL_JOB))
    parts = write_drained(store, job_digest=resolved.digest).parts

    def save(request: shard_pb2.TakeCheckpointRequest) -> tuple[ShardPart, list[tuple[int, int]]]:
        saved()
        return parts[request.shard], [(0, STEPS)]

    core = core_of(steps_total=STEPS)
    caller = Caller(core)
    while not core.job.leases.finished:
        caller.lease(STEPS)
        caller.complete_all()
    run_store = RunStore(store, claim_incarnation(store, "coordinator"))
    job = pb.GetJobReply(run_id=RUN, job_digest=resolved.digest)
    shards = FakeShards(save)
    channels = cast(ShardChannels, shards)
    coordination = Coordination(ExclusiveCore(core), resolved, PLAN, job, run_dir, run_store, channels)
    return coordination, core, shards


def test_the_job_is_done_when_the_store_has_them(tmp_path: Path) -> None:  # P7
    store = MemoryStore()
    coordination, core, _ = at_its_end(store, tmp_path)
    fault = store.fail("replace", REPORT_FILE)
    coordination._save_what_is_due()
    assert fault.fired == 1
    assert (core.job.state, REPORT_FILE in store.contents) == (JobState.RUNNING, False)
    coordination._save_what_is_due()
    assert core.job.state is JobState.DONE
    report = json.loads(store.contents[REPORT_FILE])
    assert (report["state"], report["checkpoint"]) == ("done", "j2")
    assert report["steps_applied"] == [STEPS, STEPS], "of the manifests: the shards themselves tell of no step"
    stored, final = load(store.contents[WEIGHTS_FILE]), model_of(0)
    assert {n: a.view(np.uint32).tolist() for n, a in stored.items()} == {
        n: a.view(np.uint32).tolist() for n, a in final.items()
    }
    assert {name: store.contents[name] for name in RESULTS} == {n: (tmp_path / n).read_bytes() for n in RESULTS}


def test_a_store_that_fails_is_waited_for_and_people_see_why(  # P21
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    coordination, core, _ = at_its_end(store, tmp_path)
    store.fail("replace", WEIGHTS_FILE, times=9)
    for _ in range(9):
        coordination._save_what_is_due()
    waits = "the job waits: weights and report cannot be stored: memory://test: no space left on device"
    assert (core.job.state, core.job.reason) == (JobState.RUNNING, waits)
    assert list(core.job.events).count(f"warning: {waits}") == 1, "said once"
    assert REPORT_FILE not in store.contents
    coordination._save_what_is_due()
    assert core.job.state is JobState.DONE


@pytest.mark.parametrize("file", [WEIGHTS_FILE, REPORT_FILE])
def test_a_run_directory_without_room_is_waited_for_and_keeps_no_half_file(  # P21
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    coordination, core, _ = at_its_end(open_store(str(tmp_path / "store")), tmp_path)
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", full)
        coordination._save_what_is_due()
    path = tmp_path / file
    waits = f"the job waits: weights and report cannot be stored: {path} cannot be written: no space left on device"
    assert (core.job.state, core.job.reason) == (JobState.RUNNING, waits)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".tmp")] == []
    coordination._save_what_is_due()
    assert (core.job.state, {entry.name for entry in tmp_path.iterdir()} >= RESULTS) == (JobState.DONE, True)


def test_a_failed_job_s_report_is_written_once_there_is_room(  # P21
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    coordination, core, _ = at_its_end(store, tmp_path)
    core.job.fail("a step failed")
    store.fail("replace", REPORT_FILE)
    coordination.run(Stop())
    assert REPORT_FILE not in store.contents
    for _ in range(2):
        coordination.linger()
    assert json.loads(store.contents[REPORT_FILE])["state"] == "failed"
    assert store.calls.count(("replace", REPORT_FILE)) == 2, "not again once it is there"


def test_a_shard_that_answers_nonsense_for_long_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordination, core, shards = at_its_end(MemoryStore(), tmp_path)
    shards.refusal = MalformedFrame("shard 1: no checkpoint has such a name")
    coordination._save_what_is_due()
    assert core.job.state is JobState.RUNNING
    monkeypatch.setattr(module, "INVALID_ANSWERS_S_MAX", -1.0)
    coordination._save_what_is_due()
    assert core.job.state is JobState.FAILED
    assert "the last checkpoint cannot be stored: shard 1: no checkpoint has such a name" in core.job.reason


def test_a_coordinator_with_a_successor_stores_nothing(tmp_path: Path) -> None:  # P3
    store = MemoryStore()
    coordination, _, _ = at_its_end(store, tmp_path)
    claim_incarnation(store, "coordinator")
    with pytest.raises(Superseded):
        coordination._save_what_is_due()
    assert not RESULTS & set(store.contents)


def test_the_job_ends_with_the_checkpoint_that_is_stored_whatever_becomes_of_a_shard(
    tmp_path: Path,
) -> None:  # P7, P25: nothing is computed again beside it, so weights and metrics belong together
    store = MemoryStore()
    taken: list[int] = []

    def saved() -> None:
        taken.append(1)
        announce(core, 0, 2, [(0, STEPS - 1)])

    coordination, core, _ = at_its_end(store, tmp_path, saved)
    store.fail("replace", REPORT_FILE)
    coordination._save_what_is_due()
    announce(core, 1, 2)
    assert Caller(core).call(want=1).granted == []
    coordination._save_what_is_due()
    assert (len(taken), core.job.state) == (2, JobState.DONE), "once for each shard"


def test_a_successor_ends_the_job_with_the_checkpoint_that_decided_its_end(
    tmp_path: Path,
) -> None:  # P23: its predecessor may have told that the job is done
    coordination, core, _ = at_its_end(MemoryStore(), tmp_path)
    saved = core.job.saved().replaced(final="j1", evaluations={STEPS: {"accuracy": 0.75}})
    core = core_of(steps_total=STEPS, evaluate_after=[STEPS], registered=False)
    core.job.resume(saved)
    coordination._core = ExclusiveCore(core)
    announce(core, 0, 2)
    coordination._save_what_is_due()
    assert not (tmp_path / REPORT_FILE).exists(), "it asks every shard for its counts first"
    announce(core, 1, 2)
    assert Caller(core).call(want=1).granted == [], "whatever the shards have by now"
    coordination._save_what_is_due()
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    assert (core.job.state, report["checkpoint"], report["held_out"]["accuracy"]) == (JobState.DONE, "j1", 0.75)


def test_a_last_checkpoint_that_is_damaged_is_given_up_for_another(tmp_path: Path) -> None:
    store = MemoryStore()
    coordination, core, _ = at_its_end(store, tmp_path)
    variables = next(name for name in store.contents if "variables" in name)
    whole = store.contents[variables]
    store.contents[variables] = whole[:-1]
    coordination._save_what_is_due()
    assert (core.job.state, core.job.ending) == (JobState.RUNNING, None)
    store.contents[variables] = whole
    coordination._save_what_is_due()
    assert core.job.state is JobState.DONE


def test_a_folder_of_this_host_gets_no_copies(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    coordination, core, _ = at_its_end(store, tmp_path)
    coordination._save_what_is_due()
    assert core.job.state is JobState.DONE
    assert (store.names(""), {path.name for path in tmp_path.iterdir()}) == ([], {"store", *RESULTS})


def test_a_job_does_not_end_before_its_early_stop_is_stored(  # P7, P21: a successor would go on past it
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    coordination, core, _ = at_its_end(store, tmp_path)
    catalogue = Catalogue(store)
    core.job.early_stop = "enough"
    fault = store.fail("replace", "coordinator/")
    coordination._save_what_is_due()
    assert (fault.fired, core.job.state, RESULTS & set(store.contents)) == (1, JobState.RUNNING, set())
    assert catalogue.job_checkpoints() == [1], "its manifest would end the job for a successor"
    coordination._save_what_is_due()
    assert catalogue.job_checkpoints() == [1, 2]
