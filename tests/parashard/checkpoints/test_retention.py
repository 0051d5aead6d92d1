"""Retention: what newer checkpoints have replaced goes, what anyone may still need stays."""

from collections.abc import Collection, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.retention import (
    CommonRounds,
    StoredCheckpoint,
    chain_rounds,
    collect,
    given_up,
    superseded,
)
from parashard.errors import DamagedCheckpoint, StoreFailed
from parashard.store.claims import Rollback
from support.checkpoint_cases import write_shard
from support.store_fakes import MemoryStore


def held(numbers: Iterable[int], incarnation: int = 1) -> list[StoredCheckpoint]:
    return [StoredCheckpoint(CheckpointId(1, 0, incarnation, n), None) for n in numbers]


def rounds(rounds_: Iterable[int], incarnation: int = 1) -> list[StoredCheckpoint]:
    return [StoredCheckpoint(CheckpointId(1, 0, incarnation, r), r) for r in rounds_]


def deleted(
    held_: list[StoredCheckpoint],
    *,
    keep: int = 1,
    keep_every: int = 0,
    pinned: Collection[str] = (),
    cut_round: int | None = None,
    rollbacks: Collection[Rollback] = (),
    kept: frozenset[int] | None = None,
) -> list[tuple[int, int]]:
    common = CommonRounds(cut_round, kept)
    found = superseded(held_, keep=keep, keep_every=keep_every, pinned=pinned, common=common, rollbacks=rollbacks)
    return [(id_.incarnation, id_.number) for id_ in found]


# --- which ---


def test_the_newest_are_kept():
    assert deleted(held([1, 2, 3, 4, 5]), keep=3) == [(1, 1), (1, 2)]
    assert deleted(held([1, 2]), keep=3) == []


def test_a_newer_incarnation_is_newer_whatever_its_numbers():
    assert deleted(held([7, 8]) + held([1], incarnation=2), keep=2) == [(1, 7)]


def test_every_mth_is_kept_for_ever():
    assert deleted(held(range(1, 10)), keep=1, keep_every=3) == [(1, n) for n in (1, 2, 4, 5, 7, 8)]


def test_what_a_drained_checkpoint_is_made_of_is_kept():  # P8
    pinned = {CheckpointId(1, 0, 1, 2).folder}
    assert deleted(held([1, 2, 3]), pinned=pinned) == [(1, 1)]


def test_a_round_is_kept_until_a_newer_one_is_complete_on_every_shard():  # P12
    assert deleted(rounds([2, 4, 6, 8]), cut_round=None) == []
    assert deleted(rounds([2, 4, 6, 8]), cut_round=4) == [(1, 2)]
    assert deleted(rounds([2, 4, 6, 8]), cut_round=8) == [(1, 2), (1, 4), (1, 6)]
    assert deleted(rounds([2, 4, 6, 8]), keep=3, cut_round=8) == [(1, 2)]


def test_in_sync_the_newest_are_those_of_the_highest_rounds():  # P12
    # After a rollback a newer incarnation stands at an older round.
    assert deleted(rounds([10]) + rounds([6, 8], incarnation=2), keep=2, cut_round=10) == [(2, 6)]


def test_what_a_return_has_given_up_is_no_newest_one():  # P12
    rollbacks = [Rollback(3, 4)]
    before, after = rounds([2, 4, 6, 8], incarnation=2), rounds([6], incarnation=3)
    assert [given_up(h, rollbacks) for h in before + after] == [False, False, True, True, False]
    assert deleted(before + after, keep=2, cut_round=6, rollbacks=rollbacks) == [(2, 6), (2, 8), (2, 2)]
    pinned = {CheckpointId(1, 0, 2, 8).folder}
    assert deleted(before + after, keep=2, cut_round=6, rollbacks=rollbacks, pinned=pinned) == [(2, 6), (2, 2)]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(0, 9)), unique_by=lambda t: t[:2]),
    st.lists(st.builds(Rollback, st.integers(1, 5), st.integers(0, 9)), max_size=3),
    st.integers(1, 5),
    st.integers(0, 5),
    st.none() | st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_whatever_there_is(drawn, rollbacks, keep, keep_every, cut_round, random):
    all_held = [StoredCheckpoint(CheckpointId(1, 0, i, n), r) for i, n, r in drawn]
    rule = {
        "keep": keep,
        "keep_every": keep_every,
        "pinned": (),
        "common": CommonRounds(cut_round),
        "rollbacks": rollbacks,
    }
    gone = superseded(all_held, **rule)
    left = [h for h in all_held if h.id not in gone]
    good = [h for h in all_held if not given_up(h, rollbacks)]
    assert all(h in good for h in left)
    assert len(left) >= min(keep, len(good))
    assert superseded(left, **rule) == []  # twice is once
    assert gone == superseded(random.sample(all_held, len(all_held)), **rule)  # any order is the same
    if cut_round in [h.round for h in good]:
        assert cut_round in [h.round for h in left]  # what all shards can return to


# --- chains ---


def chained(*rows_since: int) -> list[StoredCheckpoint]:
    """Return checkpoints 1, 2 ..., each with the number of the one that its chain began with."""
    return [StoredCheckpoint(CheckpointId(1, 0, 1, n), None, (1, since)) for n, since in enumerate(rows_since, 1)]


def test_the_newest_of_the_chain_before_is_kept():  # P33
    assert deleted(chained(1, 1, 1, 4, 4, 4), keep=2) == [(1, 1), (1, 2), (1, 4)]
    assert deleted(chained(1, 1, 3, 3, 5, 5)) == [(1, 1), (1, 2), (1, 3), (1, 5)], "and not one of a third"
    assert deleted(chained(1, 1, 1)) == [(1, 1), (1, 2)], "there is none"


def test_what_has_no_rows_yet_is_of_no_chain_and_before_all():  # P33
    without = StoredCheckpoint(CheckpointId(1, 0, 1, 1), None)
    assert deleted([without, *chained(1, 2, 2)[1:]]) == [(1, 2)]


def test_in_rounds_the_coordinator_says_which_are_kept_for_that():  # P33
    of_rounds = [h._replace(round=h.id.number) for h in chained(1, 1, 3, 4, 4)]
    assert deleted(of_rounds, cut_round=5, kept=frozenset({2})) == [(1, 1), (1, 3), (1, 4)]
    assert deleted(of_rounds, cut_round=5, kept=frozenset()) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert deleted(of_rounds, cut_round=5) == [(1, 1), (1, 2), (1, 4)], "a shard that is alone decides"


def test_where_there_is_no_room_the_chain_before_goes():  # P21, P33
    all_held = chained(1, 1, 3, 3)
    rule = {"keep": 1, "keep_every": 0, "pinned": (), "earlier_chain": False}
    assert len(superseded(all_held, common=CommonRounds(), **rule)) == 3
    of_rounds = [h._replace(round=h.id.number) for h in all_held]
    assert len(superseded(of_rounds, common=CommonRounds(4, frozenset({2})), **rule)) == 3


def test_the_first_rounds_of_chains():
    of_rounds = [h._replace(round=10 + h.id.number) for h in chained(1, 1, 3, 3, 5)]
    assert chain_rounds(of_rounds) == [11, 13, 15]
    assert chain_rounds(of_rounds[1:]) == [12, 13, 15], "of those that are there"
    assert chain_rounds(rounds([2, 3])) == chain_rounds(chained(1, 2)) == []


# --- deletion ---

ID = CheckpointId(1, 0, 1, 1)


def test_a_checkpoint_is_deleted_manifest_first_and_then_what_it_listed():
    store = MemoryStore()
    manifest = write_shard(store, ID)
    store.calls.clear()
    collect(Catalogue(store), ID)
    names = [name for operation, name in store.calls if operation == "delete"]
    assert names == [ID.manifest_name, *(f"{ID.folder}/{file.name}" for file in manifest.files)]
    assert store.contents == {}


def test_what_no_manifest_of_ours_lists_is_never_deleted():
    store = MemoryStore()
    write_shard(store, ID)
    write_shard(store, CheckpointId(1, 0, 1, 2))
    others = {name: content for name, content in store.contents.items() if not name.startswith(ID.folder)}
    others[f"{ID.folder}/notes.txt"] = store.contents[f"{ID.folder}/notes.txt"] = b"mine"
    collect(Catalogue(store), ID)
    assert store.contents == others


def test_of_a_damaged_manifest_nothing_is_believed_and_nothing_deleted():
    store = MemoryStore()
    write_shard(store, ID)
    store.contents[ID.manifest_name] = store.contents[ID.manifest_name].replace(b"variables-0", b"variables-1")
    before = dict(store.contents)
    with pytest.raises(DamagedCheckpoint):
        collect(Catalogue(store), ID)
    assert store.contents == before


def test_twice_is_once():
    store = MemoryStore()
    write_shard(store, ID)
    collect(Catalogue(store), ID)
    collect(Catalogue(store), ID)
    assert store.contents == {}


def test_a_deletion_that_was_interrupted_leaves_no_checkpoint():
    store = MemoryStore()
    write_shard(store, ID)
    fault = store.fail("delete", "variables-0")
    with pytest.raises(StoreFailed):
        collect(Catalogue(store), ID)
    assert fault.fired == 1
    assert Catalogue(store).shard_checkpoints(1, 0) == []
