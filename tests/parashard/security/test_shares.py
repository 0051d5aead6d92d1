"""Shares: a greedy peer leaves room for others, and a peer that is alone may take everything."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.security.shares import ALONE_S, TIMES_FREE, Shares

PEERS = st.sampled_from(["a", "b", "c", ""])
EVENTS = st.lists(st.tuples(PEERS, st.integers(1, 40), st.booleans(), st.floats(0, 2 * ALONE_S)), max_size=60)


def grab(shares: Shares, peer: str, amount: int, now_s: float = 0.0) -> int:
    """Take as often as may be; return how much it was."""
    taken = 0
    while shares.take(peer, amount, now_s):
        taken += amount
    return taken


class TestAlone:
    """No other peer holds anything, or has asked lately."""

    def test_a_peer_has_everything(self):
        shares = Shares(64)
        assert grab(shares, "a", 1) == 64
        assert shares.refused == 0, "there was nothing left, for any peer"

    def test_it_has_not_while_another_peer_asks(self):
        shares = Shares(64)
        assert shares.take("b", 1, 0.0)
        shares.give_back("b", 1)
        assert grab(shares, "a", 1, ALONE_S - 0.1) == 48
        assert shares.refused == 1
        assert grab(shares, "a", 1, ALONE_S) == 16, "b has not asked for long"

    def test_nor_while_another_peer_holds_something(self):
        shares = Shares(64)
        assert shares.take("b", 4, 0.0)
        assert grab(shares, "a", 1, 10 * ALONE_S) == 45

    def test_of_what_is_kept_for_ever_no_peer_has_everything(self):
        shares = Shares(1024, alone_s=math.inf)
        assert grab(shares, "a", 1) == 768
        assert grab(shares, "b", 1) == 192

    def test_who_took_all_alone_gets_no_more_than_a_share_once_another_has_asked(self):
        shares = Shares(64)
        assert grab(shares, "hog", 1) == 64
        assert not shares.take("b", 1, 1.0)
        for _ in range(64):
            shares.give_back("hog", 1)
        assert grab(shares, "hog", 1, 2.0) == 48
        assert shares.take("b", 1, 2.0)


class TestWithOthers:
    """There may always be others."""

    def test_the_first_taking_needs_room_only(self):
        shares = Shares(100, alone_s=math.inf)
        assert shares.take("a", 60, 0.0)
        assert grab(shares, "a", 1) == 15, "75 are three times the 25 that are left"
        assert not shares.take("b", 26, 0.0)
        assert shares.take("b", 25, 0.0)

    def test_one_alone_may_be_larger_than_all_there_is(self):
        shares = Shares(100, alone_s=math.inf)
        assert shares.take("a", 500, 0.0)
        assert not shares.take("b", 1, 0.0)
        shares.give_back("a", 500)
        assert shares.take("b", 1, 0.0)

    def test_a_peer_without_a_name_has_no_limit(self):
        shares = Shares(100, alone_s=math.inf)
        assert grab(shares, "", 1) == 100

    def test_a_place_is_passed_on(self):
        shares = Shares(4, alone_s=math.inf)
        grab(shares, "", 1)
        shares.transfer("", "b", 1)
        assert (shares.of(""), shares.of("b"), shares.held) == (3, 1, 4)

    def test_giving_back_more_than_was_taken_is_a_bug(self):
        shares = Shares(4)
        shares.take("a", 1, 0.0)
        with pytest.raises(AssertionError):
            shares.give_back("a", 2)


@given(total=st.integers(1, 200), events=EVENTS, ever=st.booleans())
def test_the_invariants_hold_whatever_happens(total, events, ever):
    shares, now_s = Shares(total, math.inf if ever else ALONE_S), 0.0
    taken: dict[str, list[int]] = {}
    for peer, amount, gives, passed_s in events:
        now_s += passed_s
        if gives and taken.get(peer):
            shares.give_back(peer, taken[peer].pop())
        else:
            before, others = shares.of(peer), any(taken.get(other) for other in taken if other != peer)
            if shares.take(peer, amount, now_s):
                taken.setdefault(peer, []).append(amount)
                if before and peer and (others or ever):
                    assert shares.of(peer) <= TIMES_FREE * (total - shares.held)
        held = [amount for amounts in taken.values() for amount in amounts]
        assert shares.held == sum(held)
        assert shares.held <= total or len(held) == 1
        assert all(shares.of(peer) == sum(amounts) for peer, amounts in taken.items())


@given(total=st.integers(8, 1000), one=st.integers(1, 100), hogs=st.integers(1, 3))
def test_each_hog_leaves_a_quarter_of_what_it_found_or_all_but_one(total, one, hogs):
    shares = Shares(total, alone_s=math.inf)
    free = total
    for number in range(hogs):
        if one > free:
            return
        grab(shares, f"hog-{number}", one)
        left = total - shares.held
        assert left >= min(free / (TIMES_FREE + 1), free - one)
        free = left
    assert one > free or shares.take("newcomer", one, 0.0)
