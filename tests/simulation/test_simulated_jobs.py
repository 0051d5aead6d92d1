"""Whole jobs in virtual time, under faults of every kind: the oracles of the protocol find nothing.

More seeds: `python tests/simulation --seeds 10000`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from sim_run import JOBS, Outcome, Setting, drawn_setting, faultless_digest, simulate
from sim_world import Faults

from parashard.job.policy import Policy

SEEDS = range(60)
FAULTS = (
    "lost",
    "late",
    "duplicated",
    "reordered",
    "crash",
    "crash between two shards",
    "crash between two chunks",
    "pause",
    "pause past the lease time",
    "replaced",
    "leave",
    "poison",
    "message from the dead",
    "message after its deadline",
)
CONSEQUENCES = (
    "silent worker",
    "speculative lease",
    "worker started again",
    "receipt: duplicate",
    "receipt: pending",
    "refused: non-finite-gradient",
    "refused: queue-full",
)
SYNC = Policy("sync", 4)


def outcomes(oracle: str, policy: str) -> dict[int, Outcome]:
    return {seed: simulate(seed, drawn_setting(seed, oracle, policy)) for seed in SEEDS}


@pytest.mark.parametrize(("oracle", "policy"), JOBS)
def test_a_job_keeps_its_promise_whatever_is_lost_late_or_killed(oracle: str, policy: str) -> None:
    """P1, P4, P5, P9, P10, P11, P14: every oracle, and progress once the faults have stopped."""
    runs = outcomes(oracle, policy)
    assert {seed: run.violations for seed, run in runs.items() if run.violations} == {}
    fired = sum((run.fired for run in runs.values()), Counter())
    assert [fault for fault in (*FAULTS, *CONSEQUENCES) if not fired[fault]] == []  # every injected fault struck
    if policy.startswith("ssp"):  # P9: the bound is reached, and never passed
        assert max(run.step_lag_max for run in runs.values()) == Policy.parse(policy).bound


@pytest.mark.parametrize(("oracle", "policy"), JOBS)
def test_the_same_seed_is_the_same_run(oracle: str, policy: str) -> None:
    first, again, other = (simulate(seed, drawn_setting(3, oracle, policy)) for seed in (1, 1, 2))
    assert first == again
    assert first.trace != other.trace


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_rounds_give_the_same_bits_for_any_number_of_shards_and_workers(shards: int, workers: int) -> None:  # P13
    run = simulate(7, Setting("digest", SYNC, shards=shards, workers=workers, depth=1, chunks=3))
    assert (run.violations, run.weights) == ([], faultless_digest("digest", SYNC))


def test_without_faults_nothing_is_lost_repeated_or_refused() -> None:
    run = simulate(0, Setting("ledger", Policy("async"), shards=3, workers=2, chunks=3))
    assert run.violations == []
    assert not any(run.fired[fault] for fault in FAULTS if fault != "reordered")
    assert run.fired["receipt: applied"] == 3 * 21


def test_a_job_without_workers_is_seen_to_be_stuck() -> None:
    stuck = Setting("ledger", Policy("async"), workers=0, calm_events_max=500)
    [violation] = simulate(0, stuck).violations
    assert violation.startswith("progress: not over 500 events after the last fault")


def test_a_job_whose_every_message_is_lost_goes_on_when_faults_stop() -> None:
    faults = Faults(lost=1.0, until_s=5.0)
    run = simulate(0, Setting("torn", Policy("async"), shards=2, workers=2, chunks=2, faults=faults))
    assert run.violations == []
    assert run.fired["lost"] > 10


def test_a_worker_that_dies_at_every_step_of_its_work_stops_nothing() -> None:
    """Crashes at each event of a worker in turn: the rate is so high that few steps are done in one life."""
    faults = Faults(crash=0.05, until_s=20.0)
    setting = Setting("digest", SYNC, shards=3, workers=2, chunks=3, faults=faults)
    runs = [simulate(seed, replace(setting, supervised=bool(seed % 2))) for seed in range(4)]
    assert [run.violations for run in runs] == [[]] * 4
    assert all(run.fired["crash"] >= 20 for run in runs)
