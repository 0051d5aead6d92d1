"""Verification: every byte is read, each damaged file is named, and what is sound is not."""

import numpy as np
import pytest

from parashard.checkpoints.catalogue import RUN_NAME, Catalogue, CheckpointId, job_name, plan_name
from parashard.checkpoints.encoding import encode
from parashard.checkpoints.verify import damage_in_job, damage_in_shard, damage_in_store, restarts_from
from parashard.errors import NotStored, StoreFailed
from parashard.plan.embedding import KeyedRows
from parashard.store.claims import Claims
from parashard_coordinator.run.store import RunStore
from support.checkpoint_cases import DIGEST, model_of, write_drained, write_shard
from support.store_fakes import MemoryStore

FIRST, LATER = CheckpointId(1, 0, 1, 1), CheckpointId(1, 1, 2, 5)


@pytest.fixture
def sound_store(store: MemoryStore) -> MemoryStore:
    """Return a store with a drained checkpoint and a newer one of a shard."""
    write_drained(store)
    write_shard(store, LATER)
    return store


def damage(store: MemoryStore, name: str) -> str:
    store.contents[name] = store.contents[name][:-1] + b"?"
    return name


def test_a_sound_store_has_no_damage_and_every_byte_of_it_was_read(sound_store):
    assert list(damage_in_store(Catalogue(sound_store))) == []
    assert {name for operation, name in sound_store.calls if operation == "read"} == {*sound_store.contents, RUN_NAME}


def test_each_damaged_file_is_named(sound_store):
    names = [
        plan_name(1),
        job_name(1),
        f"{FIRST.folder}/variables-0.safetensors",
        f"{FIRST.folder}/slots-0.safetensors",
        f"{LATER.folder}/manifest.json",
    ]
    for name in names:
        damage(sound_store, name)
    texts = list(damage_in_store(Catalogue(sound_store)))
    assert len(texts) == len(names)
    assert all(f"{sound_store.url}/{name}: " in text for name, text in zip(names, texts, strict=True))


def test_a_damaged_run_record_is_named(sound_store):
    sound_store.contents[RUN_NAME] = b"?"
    [text] = damage_in_store(Catalogue(sound_store))
    assert text.split(": ")[0] == f"{sound_store.url}/{RUN_NAME}"


def test_a_drained_checkpoint_is_verified_with_its_plan_and_its_parts(sound_store):
    catalogue = Catalogue(sound_store)
    damage(sound_store, f"{LATER.folder}/variables-0.safetensors")  # no part of it
    assert list(damage_in_job(catalogue, 1)) == []
    del sound_store.contents[plan_name(1)]
    damage(sound_store, f"{FIRST.folder}/variables-0.safetensors")
    del sound_store.contents[CheckpointId(1, 1, 1, 1).manifest_name]
    texts = list(damage_in_job(catalogue, 1))
    assert [name for name in ("plans/0001", "variables-0", "s0001/") for text in texts if name in text] == [
        "plans/0001",
        "variables-0",
        "s0001/",
    ]
    assert len(texts) == 3


def test_a_part_that_is_gone_is_damage_of_the_drained_checkpoint(sound_store):
    del sound_store.contents[FIRST.manifest_name]
    [text] = damage_in_store(Catalogue(sound_store))
    assert f"{FIRST.manifest_name}: is not there" in text


def test_bytes_that_are_right_with_tensors_that_are_not_are_damage(store):
    write_shard(store, FIRST, slots=("m", "other"))
    texts = list(damage_in_shard(Catalogue(store), FIRST))
    assert len(texts) == 1
    assert "is not one that the manifest says" in texts[0]


def test_a_checkpoint_that_its_shard_deletes_meanwhile_is_not_damaged(sound_store):
    class Collecting(MemoryStore):
        def size(self, name: str) -> int:
            for gone in [n for n in self.contents if n.startswith(LATER.folder)]:
                del self.contents[gone]
            return super().size(name)

    assert list(damage_in_store(Catalogue(Collecting(contents=dict(sound_store.contents))))) == []


def test_one_that_is_not_there_is_reported(sound_store):
    assert "there is nothing" in next(damage_in_shard(Catalogue(sound_store), CheckpointId(1, 0, 9, 9)))
    with pytest.raises(NotStored):
        list(damage_in_job(Catalogue(sound_store), 2))


def test_a_store_that_does_not_answer_is_not_damage(sound_store):
    fault = sound_store.fail("read", "slots-0")
    with pytest.raises(StoreFailed, match="no space left"):
        list(damage_in_store(Catalogue(sound_store)))
    assert fault.fired == 1


def test_what_coordinators_saved_is_verified_too(sound_store):  # P7
    name = "coordinator/i00000002.json"
    sound_store.create(name, encode(Catalogue(sound_store).plan(1)))  # a record of any kind
    assert list(damage_in_store(Catalogue(sound_store))) == []
    damage(sound_store, name)
    [text] = damage_in_store(Catalogue(sound_store))
    assert f"{sound_store.url}/{name}: " in text


@pytest.mark.parametrize(
    "name", ["manifest.json", "i00000002/variables-0.safetensors", "i00000002/tables-0.safetensors"]
)
def test_so_are_a_run_s_first_values_and_rows(sound_store, name):
    rows = KeyedRows(np.array([3, 5], np.uint64), np.ones((2, 4), np.float32))
    RunStore(sound_store, 2).keep_initial(DIGEST, model_of(1), {"user": rows})
    assert list(damage_in_store(Catalogue(sound_store))) == []
    damage(sound_store, f"initial/{DIGEST}/{name}")
    [text] = damage_in_store(Catalogue(sound_store))
    assert f"{sound_store.url}/initial/{DIGEST}/{name}: " in text


# --- what a shard restarts from ---


def restarts(store: MemoryStore) -> list[str]:
    damaged: set[CheckpointId] = set()
    assert list(damage_in_store(Catalogue(store), damaged))
    return list(restarts_from(Catalogue(store), damaged))


def test_a_damaged_newest_one_sends_its_shard_to_the_newest_that_is_sound(sound_store):
    damage(sound_store, f"{LATER.folder}/slots-0.safetensors")
    assert restarts(sound_store) == [
        "shard 1 restarts from p1/s1/i1/c1, with 9 of 9 steps; what is newer is computed again"
    ]
    damage(sound_store, f"{CheckpointId(1, 1, 1, 1).folder}/slots-0.safetensors")
    assert restarts(sound_store) == [
        "shard 1 restarts from what its plan began with: no checkpoint of it is sound; what is newer is computed again"
    ]


def test_damage_of_an_older_one_changes_nothing(sound_store):
    damage(sound_store, f"{CheckpointId(1, 1, 1, 1).folder}/slots-0.safetensors")
    assert restarts(sound_store) == []


def test_in_rounds_what_a_return_discarded_is_no_newest_one(store):  # P12
    write_drained(store)
    for number in (2, 3, 4):
        write_shard(store, CheckpointId(1, 0, 1, number), round=number)
    damage(store, f"{CheckpointId(1, 0, 1, 3).folder}/slots-0.safetensors")
    assert restarts(store) == []
    claims = Claims(store, "shard-0", "test")
    assert [claims.next(), claims.next(returning_to=3)] == [1, 2]
    assert restarts(store) == [
        "shard 0 restarts from p1/s0/i1/c2, with 9 of 9 steps, and all shards from the newest round that each has; "
        "what is newer is computed again"
    ]
