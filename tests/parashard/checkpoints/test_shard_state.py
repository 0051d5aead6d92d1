"""Restoring: the newest checkpoint that verifies, and why each newer one was passed over."""

import pytest

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.state import ShardState, load, newest_verified
from parashard.errors import DamagedCheckpoint, NotStored, StoreFailed
from parashard.plan.intervals import IntervalSet
from support.checkpoint_cases import PLAN, state_of, write_shard, write_state
from support.store_fakes import MemoryStore

IDS = [CheckpointId(1, 0, 1, number) for number in (1, 2, 3)]


@pytest.fixture
def three_checkpoints(store: MemoryStore) -> MemoryStore:
    """Return a store with three checkpoints of one shard, each with bits of its own."""
    for id_ in IDS:
        write_shard(store, id_, seed=id_.number)
    return store


def damage(store: MemoryStore, id_: CheckpointId, name: str) -> str:
    """Change the last byte of a checkpoint's file."""
    path = f"{id_.folder}/{name}"
    store.contents[path] = store.contents[path][:-1] + bytes([store.contents[path][-1] ^ 1])
    return path


def assert_state_of(state: ShardState | None, seed: int) -> None:
    assert state is not None
    written = state_of(PLAN, 0, seed)
    for found, due in [
        (state.variables, written.variables),
        *((state.slots[s], written.slots[s]) for s in written.slots),
    ]:
        assert {p: array.tobytes() for p, array in found.items()} == {p: array.tobytes() for p, array in due.items()}


# --- one checkpoint ---


def test_a_state_comes_back_whole(store):  # P1
    applied = ((0, 4), (6, 7))
    manifest = write_shard(store, IDS[0], seed=5, applied=applied, version=5, round=2)
    state = load(store, manifest)
    assert_state_of(state, 5)
    assert state.applied == IntervalSet(applied)
    assert (state.version, state.round) == (5, 2)


def test_a_slot_has_the_rows_of_its_variable(store):
    odd = state_of(PLAN, 0, 1)
    p = PLAN.shards[0][0]
    odd.slots["m"][p] = odd.slots["m"][p].reshape(p.rows, 1, -1)
    with pytest.raises(DamagedCheckpoint, match="slot 'm' of variable"):
        load(store, write_state(store, PLAN, IDS[0], odd))


def test_the_applied_set_is_the_shards_to_change(store):
    manifest = write_shard(store, IDS[0])
    load(store, manifest).applied.add(1000)
    assert 1000 not in load(store, manifest).applied


# --- the newest that verifies ---


def test_the_newest_is_restored_and_older_ones_are_not_read(three_checkpoints):
    three_checkpoints.calls.clear()
    state, manifest, skipped = newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert_state_of(state, 3)
    assert manifest is not None
    assert CheckpointId.of(manifest) == IDS[2]
    assert skipped == []
    read = [name for operation, name in three_checkpoints.calls if operation == "read" and "safetensors" in name]
    assert {name.rpartition("/")[0] for name in read} == {IDS[2].folder}


@pytest.mark.parametrize("name", ["manifest.json", "variables-0.safetensors", "slots-1.safetensors"])
def test_a_damaged_one_is_skipped_and_named_with_the_reason(three_checkpoints, name):
    path = damage(three_checkpoints, IDS[2], name)
    state, _, skipped = newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert_state_of(state, 2)
    assert [id_ for id_, _ in skipped] == [IDS[2]]
    assert path in str(skipped[0][1])


def test_several_damaged_ones_are_skipped(three_checkpoints):
    damage(three_checkpoints, IDS[2], "manifest.json")
    damage(three_checkpoints, IDS[1], "slots-0.safetensors")
    state, _, skipped = newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert_state_of(state, 1)
    assert [id_ for id_, _ in skipped] == [IDS[2], IDS[1]]


def test_a_shard_without_a_sound_checkpoint_has_no_state(three_checkpoints):
    for id_ in IDS:
        damage(three_checkpoints, id_, "variables-0.safetensors")
    state, manifest, skipped = newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert (state, manifest) == (None, None)
    assert [id_ for id_, _ in skipped] == IDS[::-1]


def test_a_new_shard_has_no_state(store):
    assert newest_verified(Catalogue(store), 1, 0) == (None, None, [])


def test_other_plans_and_shards_are_not_restored(three_checkpoints):  # P8
    assert newest_verified(Catalogue(three_checkpoints), 2, 0)[1] is None
    assert newest_verified(Catalogue(three_checkpoints), 1, 1)[1] is None


def test_in_sync_the_highest_round_is_the_newest(three_checkpoints):  # P12
    write_shard(three_checkpoints, CheckpointId(1, 0, 2, 1), seed=8, round=8)
    write_shard(three_checkpoints, CheckpointId(1, 0, 3, 1), seed=6, round=6)
    assert_state_of(newest_verified(Catalogue(three_checkpoints), 1, 0)[0], 8)


# --- a store with troubles ---


def test_a_checkpoint_that_is_collected_meanwhile_was_never_there(three_checkpoints):
    fault = three_checkpoints.fail("read", IDS[2].manifest_name, error=NotStored("gone"))
    _, manifest, skipped = newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert fault.fired == 1
    assert manifest is not None
    assert (manifest.number, skipped) == (2, [])


@pytest.mark.parametrize("name", ["manifest.json", "variables-0"])
def test_a_bad_sector_costs_one_checkpoint(three_checkpoints, name):
    fault = three_checkpoints.fail("read", f"{IDS[2].folder}/{name}", times=9)
    state, _, skipped = newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert fault.fired == 1
    assert_state_of(state, 2)
    assert [id_ for id_, _ in skipped] == [IDS[2]]


@pytest.mark.parametrize("operation", ["folders", "names", "read", "size"])
def test_a_store_that_does_not_answer_is_not_an_empty_one(three_checkpoints, operation):  # P20
    # To begin with initial values then would throw the checkpoints away.
    fault = three_checkpoints.fail(operation, times=99)
    with pytest.raises(StoreFailed, match="no space left"):
        newest_verified(Catalogue(three_checkpoints), 1, 0)
    assert fault.fired


def test_damage_and_no_answer_together_are_no_answer(three_checkpoints):
    damage(three_checkpoints, IDS[2], "manifest.json")
    damage(three_checkpoints, IDS[1], "manifest.json")
    three_checkpoints.fail("read", IDS[0].folder, times=9)
    with pytest.raises(StoreFailed, match="no space left"):
        newest_verified(Catalogue(three_checkpoints), 1, 0)
