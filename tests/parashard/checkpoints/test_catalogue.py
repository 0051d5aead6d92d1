"""The catalogue: what is in a store, by names alone, and records only where they belong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.catalogue import (
    RUN_NAME,
    Catalogue,
    CheckpointId,
    by_age,
    job_name,
    parse_job_id,
    plan_name,
)
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.manifest import RunRecord
from parashard.errors import ConfigurationError, DamagedCheckpoint, NotStored, StoreFailed
from support.checkpoint_cases import DIGEST, PLAN, write_drained, write_job, write_plan, write_shard
from support.store_fakes import MemoryStore

numbers = st.integers(0, 10**9 - 1)


@given(numbers, numbers, numbers, numbers)
def test_an_id_comes_back_from_its_text(plan, shard, incarnation, number):
    id_ = CheckpointId(plan, shard, incarnation, number)
    assert CheckpointId.parse(str(id_)) == id_


def test_ids_are_read_by_people_and_folders_are_sorted_by_age():
    assert str(CheckpointId(1, 0, 3, 7)) == "p1/s0/i3/c7"
    assert CheckpointId(1, 0, 3, 7).folder == "shards/p0001/s0000/i00000003-c00000007"


@pytest.mark.parametrize(
    "text", ["", "j1", "p1/s0/i3", "p1/s0/i3/c7/", "../p1/s0/i3/c7", "p1/s0/i3/c-7", "p²/s0/i3/c7"]
)
def test_what_is_no_id_is_the_users_to_fix(text):
    with pytest.raises(ConfigurationError, match="p1/s0/i3/c7"):
        CheckpointId.parse(text)


def test_drained_checkpoints_have_ids_of_their_own():
    assert [parse_job_id(text) for text in ("j1", "j12", "j", "1", "p1/s0/i3/c7", "j1x")] == [1, 12, *[None] * 4]


# --- shards ---


def test_checkpoints_are_listed_oldest_first_and_a_newer_incarnation_is_newer():
    store = MemoryStore()
    ids = [CheckpointId(1, 0, i, c) for i, c in ((1, 1), (1, 2), (1, 10), (2, 1))]
    for id_ in reversed(ids):
        write_shard(store, id_)
    assert Catalogue(store).shard_checkpoints(1, 0) == ids


def test_a_checkpoint_exists_once_its_manifest_does():
    store = MemoryStore()
    id_ = CheckpointId(1, 0, 1, 1)
    write_shard(store, id_)
    assert Catalogue(store).has(id_)
    del store.contents[id_.manifest_name]
    assert not Catalogue(store).has(id_)
    assert Catalogue(store).shard_checkpoints(1, 0) == []


def test_other_shards_plans_and_folders_do_not_count():
    store = MemoryStore(contents={f"shards/p0001/s0000/{n}/manifest.json": b"" for n in ("x", "i1-c1", "i00000001")})
    for id_ in (CheckpointId(1, 1, 1, 1), CheckpointId(2, 0, 1, 1)):
        write_shard(store, id_)
    assert Catalogue(store).shard_checkpoints(1, 0) == []


def test_all_checkpoints_are_those_of_all_plans_and_shards():
    store = MemoryStore()
    ids = [CheckpointId(p, s, 1, c) for p in (1, 2) for s in (0, 1) for c in (1, 2)]
    for id_ in ids:
        write_shard(store, id_)
    assert Catalogue(store).checkpoints() == ids


def test_a_manifest_in_another_ones_folder_is_not_taken_for_it():
    store = MemoryStore()
    write_shard(store, CheckpointId(1, 0, 1, 1))
    other = CheckpointId(1, 0, 1, 2)
    store.contents[other.manifest_name] = store.contents[CheckpointId(1, 0, 1, 1).manifest_name]
    with pytest.raises(DamagedCheckpoint, match="holds p1/s0/i1/c1, and p1/s0/i1/c2 belongs here"):
        Catalogue(store).manifest(other)


@pytest.mark.parametrize(("old_round", "new_round", "newest"), [(None, None, 2), (7, 6, 1), (6, 6, 2)])
def test_newest_is_by_age_or_in_sync_by_round(old_round, new_round, newest):  # P12
    old_incarnation = write_shard(MemoryStore(), CheckpointId(1, 0, 1, 9), round=old_round)
    new_incarnation = write_shard(MemoryStore(), CheckpointId(1, 0, 2, 1), round=new_round)
    assert max(old_incarnation, new_incarnation, key=by_age).incarnation == newest


# --- drained checkpoints, plans, the run ---


def test_drained_checkpoints_pin_their_parts():  # P8
    store = MemoryStore()
    write_drained(store, number=1)
    write_drained(store, number=2)
    write_shard(store, CheckpointId(1, 0, 1, 3))
    catalogue = Catalogue(store)
    assert catalogue.job_checkpoints() == [1, 2]
    assert catalogue.pinned() == {CheckpointId(1, s, 1, c).folder for s in (0, 1) for c in (1, 2)}


def test_the_newest_drained_checkpoint_is_the_newest_that_is_not_damaged():
    store = MemoryStore()
    for number in (1, 2):
        write_drained(store, number=number)
    store.contents[job_name(3)] = store.contents[job_name(2)][:-1]
    store.contents[job_name(4)] = store.contents[job_name(2)]  # whole, and not this one
    newest = Catalogue(store).newest_job_manifest()
    assert newest is not None
    assert newest.number == 2
    with pytest.raises(DamagedCheckpoint, match="holds j2, and j4 belongs here"):
        Catalogue(store).job_manifest(4)


def test_a_store_that_does_not_answer_is_not_one_without_drained_checkpoints():
    store = MemoryStore()
    write_drained(store)
    for ask in (Catalogue(store).newest_job_manifest, Catalogue(store).pinned):
        fault = store.fail("read", "jobs/")
        with pytest.raises(StoreFailed):
            ask()
        assert fault.fired == 1


def test_a_part_that_is_no_more_the_one_that_was_drained_is_refused():  # P7
    store = MemoryStore()
    manifests = [write_shard(store, CheckpointId(1, s, 1, 1)) for s in (0, 1)]
    job = write_job(store, 1, manifests)
    catalogue = Catalogue(store)
    assert [catalogue.part_manifest(job, s) for s in (0, 1)] == manifests
    store.contents[CheckpointId(1, 0, 1, 1).manifest_name] = encode(manifests[0].replaced(version=8))
    with pytest.raises(DamagedCheckpoint, match="is not the manifest that drained checkpoint j1 was made of"):
        catalogue.part_manifest(job, 0)


def test_the_newest_plan_is_the_one_to_go_by():
    store = MemoryStore()
    assert Catalogue(store).newest_plan() is None
    write_plan(store)
    newest = Catalogue(store).newest_plan()
    assert newest is not None
    assert newest.to_plan() == PLAN
    assert Catalogue(store).plans() == [1]


def test_a_damaged_plan_is_not_passed_over_for_an_older_one():  # P8
    store = MemoryStore()
    write_plan(store)
    store.contents[plan_name(2)] = store.contents[plan_name(1)]
    with pytest.raises(DamagedCheckpoint, match="holds plan 1, and plan 2 belongs here"):
        Catalogue(store).newest_plan()


def test_a_store_belongs_to_one_run():  # P2
    store = MemoryStore()
    assert Catalogue(store).run() is None
    run = RunRecord(run_id="run-1", job_digest=DIGEST, identity={}, job_toml="", created_at=1.0)
    store.create(RUN_NAME, encode(run))
    assert Catalogue(store).run() == run


def test_what_is_not_there_is_reported():
    catalogue = Catalogue(MemoryStore())
    for ask in (lambda: catalogue.manifest(CheckpointId(1, 0, 1, 1)), lambda: catalogue.job_manifest(1)):
        with pytest.raises(NotStored):
            ask()
    assert (catalogue.checkpoints(), catalogue.job_checkpoints(), catalogue.plans()) == ([], [], [])
    assert catalogue.newest_job_manifest() is None
