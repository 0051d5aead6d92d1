"""Incarnations: each is claimed once, also by concurrent processes, and whatever became of earlier ones (P3)."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from parashard.errors import AlreadyStored, ConfigurationError, StoreFailed, Superseded
from parashard.store import claims
from parashard.store.claims import Claims, Rollback, claim_incarnation, newest_claim
from parashard.store.local import LocalStore
from support.store_fakes import MemoryStore


def test_the_first_incarnation_is_1_and_each_next_one_is_higher(local_store):  # P3
    assert newest_claim(local_store, "shard-0") == 0
    for incarnation in (1, 2, 3):
        assert claim_incarnation(local_store, "shard-0") == incarnation
        assert newest_claim(local_store, "shard-0") == incarnation


def test_a_claim_records_its_maker(local_store):
    Claims(local_store, "shard-0", "drawn").next()
    assert local_store.names("claims/shard-0") == ["00000001"]
    assert local_store.read("claims/shard-0/00000001", 1000).decode() == f"{socket.gethostname()} {os.getpid()} drawn\n"


def test_names_do_not_share_numbers(local_store):
    names = ["shard-1", "shard-10", "shard-1.5", "coordinator"]
    assert [claim_incarnation(local_store, name) for name in names for _ in range(2)] == [1, 2] * 4


def test_no_number_is_given_twice_however_many_ask_at_once(local_store):  # P3
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda _: claim_incarnation(local_store, "shard-0"), range(40)))
    assert sorted(claimed) == list(range(1, 41))


def test_a_number_that_another_takes_after_the_list_was_read_is_passed_over(local_store, monkeypatch):  # P3
    for _ in range(3):
        claim_incarnation(local_store, "shard-0")
    monkeypatch.setattr(local_store, "names", lambda folder: ["00000001"])
    assert claim_incarnation(local_store, "shard-0") == 4


def test_a_number_whose_file_was_lost_is_not_given_again_while_a_higher_one_is_there(local_store):  # P3
    for _ in range(3):
        claim_incarnation(local_store, "shard-0")
    local_store.delete("claims/shard-0/00000002")
    assert newest_claim(local_store, "shard-0") == 3
    assert claim_incarnation(local_store, "shard-0") == 4


@pytest.mark.parametrize("other", ["note.txt", "00000007x", "x9", "9.0", "-3"])
def test_other_files_in_the_folder_do_not_count(local_store, other):
    local_store.create(f"claims/shard-0/{other}", b"")
    assert claim_incarnation(local_store, "shard-0") == 1


def test_a_store_that_ignores_the_condition_is_refused(local_store, monkeypatch):  # P3
    monkeypatch.setattr(local_store, "create", local_store.replace)
    with pytest.raises(ConfigurationError, match=r"created claims/shard-0/00000001 twice: .* conditional create"):
        claim_incarnation(local_store, "shard-0")


def test_a_store_that_fails_gives_no_number(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed, match="cannot create claims/shard-0/00000001"):
        claim_incarnation(LocalStore(tmp_path / "file" / "below"), "shard-0")


@pytest.mark.parametrize("name", ["", "../shard-0", "shard 0", ".shard"])
def test_a_name_that_the_store_does_not_take_is_refused(local_store, name):
    with pytest.raises(ConfigurationError, match="store name"):
        claim_incarnation(local_store, name)


def test_incarnations_have_a_bound(local_store, monkeypatch):
    monkeypatch.setattr(claims, "CLAIMS_MAX", 3)
    assert [claim_incarnation(local_store, "shard-0") for _ in range(2)] == [1, 2]
    with pytest.raises(ConfigurationError, match="has had 3 incarnations"):
        claim_incarnation(local_store, "shard-0")


# --- claims that have been made, and their replies ---


def test_a_claim_whose_request_was_sent_again_is_its_maker_s():  # P23
    store = MemoryStore()
    lost = store.lose_reply("create", "claims/", error=AlreadyStored("sent again"))
    mine = Claims(store, "shard-0", "mine")
    assert mine.next() == 1, "no number is passed over"
    assert lost.fired == 1
    mine.check()
    assert mine.next() == 2


def test_a_claim_whose_reply_was_lost_does_not_supersede_its_process():  # P23
    store = MemoryStore()
    mine = Claims(store, "shard-0", "mine")
    mine.next()
    store.lose_reply("create", "claims/", error=StoreFailed("no answer"))
    with pytest.raises(StoreFailed, match="no answer"):
        mine.next()
    assert newest_claim(store, "shard-0") == 2
    mine.check()
    assert mine.superseded is None
    assert mine.next() == 3


def test_a_process_with_a_newer_claim_than_its_own_is_superseded_for_good(local_store):  # P23
    mine = Claims(local_store, "shard-0", "mine")
    mine.next()
    mine.check()
    claim_incarnation(local_store, "shard-0")
    with pytest.raises(Superseded, match="another process has claimed incarnation 2 of shard-0; this one, with inc"):
        mine.check()
    assert isinstance(mine.superseded, Superseded)
    with pytest.raises(Superseded):
        mine.next()
    assert newest_claim(local_store, "shard-0") == 2, "it does not come before the other one again"


def test_a_process_that_has_claimed_before_does_not_pass_another_s_claim_over(local_store, monkeypatch):  # P23
    mine = Claims(local_store, "shard-0", "mine")
    mine.next()
    listed = local_store.names
    seen = iter([["00000001"], ["00000001"]])  # the other one claims after these lists were read
    claim_incarnation(local_store, "shard-0")
    monkeypatch.setattr(local_store, "names", lambda folder: next(seen, None) or listed(folder))
    with pytest.raises(Superseded):
        mine.next()
    assert newest_claim(local_store, "shard-0") == 2


def test_two_processes_of_one_host_do_not_take_each_other_s_claim_for_their_own(local_store, monkeypatch):
    monkeypatch.setattr(local_store, "names", lambda folder: [])
    assert [claim_incarnation(local_store, "shard-0") for _ in range(2)] == [1, 2]


# --- returns to earlier rounds ---


def test_a_claim_tells_where_its_incarnation_returned_to(local_store):  # P12
    mine = Claims(local_store, "shard-0", "mine")
    for round_ in (None, 4, None, 0):
        mine.next(returning_to=round_)
    mine.check()
    assert mine.rollbacks(after=0) == [Rollback(2, 4), Rollback(4, 0)]
    assert mine.rollbacks(after=2) == [Rollback(4, 0)]
    assert Claims(local_store, "shard-0", "later").rollbacks(after=3) == [Rollback(4, 0)]


def test_a_claim_of_an_earlier_version_tells_of_no_return(local_store):
    local_store.create("claims/shard-0/00000001", b"host 17\n")
    assert Claims(local_store, "shard-0", "mine").rollbacks(after=0) == []
