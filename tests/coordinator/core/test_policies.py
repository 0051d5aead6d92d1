"""A policy says which steps may be leased, how many at once, and where weights can be judged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.job.policy import Policy
from parashard_coordinator.core.policies import Async, Auto, LeasingPolicy, Ssp, Sync, leasing_policy

steps = st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("text", "policy"),
    [("auto:4", Auto(4)), ("async", Async()), ("ssp:0", Ssp(0)), ("ssp:8", Ssp(8)), ("sync:4", Sync(4))],
)
def test_the_job_file_s_policy_is_found(text: str, policy: LeasingPolicy) -> None:
    found = leasing_policy(Policy.parse(text))
    assert (type(found), found.limit(7)) == (type(policy), policy.limit(7))


@given(steps)
def test_async_leases_freely(lowest: int) -> None:
    assert Async().limit(lowest) > lowest + 2**40


@given(st.integers(0, 64), steps, st.integers(0, 100))
def test_ssp_leases_a_step_while_its_lag_is_within_the_bound(bound: int, lowest: int, ahead: int) -> None:  # P9
    step = lowest + ahead
    assert (step < Ssp(bound).limit(lowest)) == (step - lowest <= bound)


@given(st.integers(1, 64), steps, st.integers(0, 200))
def test_sync_leases_the_lowest_incomplete_round_only(round_steps: int, lowest: int, ahead: int) -> None:  # P10
    step = lowest + ahead
    assert (step < Sync(round_steps).limit(lowest)) == (step // round_steps == lowest // round_steps)


@given(st.integers(1, 64), steps)
def test_sync_judges_weights_at_the_start_of_a_round(round_steps: int, step: int) -> None:
    boundary = Sync(round_steps).boundary(step)
    assert boundary % round_steps == 0
    assert step <= boundary < step + round_steps
    assert Sync(round_steps).round_after(boundary) == boundary // round_steps


def test_after_a_short_last_round_comes_a_round_of_its_own() -> None:
    assert Sync(4).round_after(10) == 3  # steps 8 and 9 are round 2


@pytest.mark.parametrize("policy", [Async(), Ssp(3)])
def test_without_rounds_any_step_is_a_boundary(policy: LeasingPolicy) -> None:
    assert policy.round_after(7) is None
    assert policy.boundary(7) == 7


@pytest.mark.parametrize(
    ("policy", "leasable", "workers", "share"),
    [
        (Async(), 1000, 2, 250),  # half of an even share
        (Async(), 3, 2, 1),
        (Async(), 0, 2, 1),
        (Async(), 8, 0, 4),
        (Ssp(8), 8, 2, 2),
        (Ssp(8), 1, 16, 1),
        (Sync(8), 8, 2, 4),  # even: a barrier follows
        (Sync(8), 8, 3, 3),
        (Sync(8), 0, 3, 1),
        (Sync(8), 8, 0, 8),
    ],
)
def test_shares(policy: LeasingPolicy, leasable: int, workers: int, share: int) -> None:
    assert policy.share(leasable, workers) == share


def test_each_policy_says_what_it_waits_for() -> None:
    assert Async().reason(7) == "every step is leased or complete"
    assert Ssp(8).reason(7) == "ssp:8 waits for step 7"
    assert Sync(4).reason(7) == "sync:4 waits for round 1"


@given(st.integers(1, 16), st.integers(0, 4), steps, st.integers(0, 200))
def test_auto_leases_a_batch_while_those_before_it_are_complete_but_for_the_lag(
    parts: int, lag: int, lowest: int, ahead: int
) -> None:
    policy, step = Auto(parts), lowest + ahead
    policy.lag = lag
    assert (step < policy.limit(lowest)) == (step // parts - lowest // parts <= lag)


@given(st.integers(1, 16), steps)
def test_auto_judges_weights_between_batches(parts: int, step: int) -> None:
    boundary = Auto(parts).boundary(step)
    assert boundary % parts == 0
    assert step <= boundary < step + parts
    assert Auto(parts).round_after(boundary) is None
