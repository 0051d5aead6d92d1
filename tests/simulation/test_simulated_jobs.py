"""Whole jobs in virtual time, under faults of every kind and any role: the oracles of the protocol find nothing.

More seeds: `python tests/simulation --seeds 10000`.

Rule P23.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sim_judge import faultless_digest
from sim_run import simulate
from sim_settings import FOLLOWED, JOBS, Setting, drawn_setting
from sim_world import Faults

from parashard.job.policy import Policy
from parashard_server.state.rows import embedding_tables
from support.logs import quiet_log
from support.tiers import by_tier

SEEDS_MIN = by_tier(quick=3, full=6)
SEEDS_MAX = 120  # where a fault has not struck by then
SEEDS_OFTEN = by_tier(quick=2, full=4)  # at least, of a setting whose faults strike far more often
SEEDS_OFTEN_MAX = 240  # a change of the product changes what a seed meets
FAULTS = (
    "lost",
    "late",
    "duplicated",
    "reordered",
    "crash",
    "pause",
    "leave",
    "shard_crash",
    "shard_pause",
    "shard_stop",
    "coordinator_crash",
    "coordinator_pause",
    "replaced",
    "store_fails",
    "store_slow",
    "store_reply_lost",
    "hang",
    "shard_hang",
    "coordinator_hang",
    "a claim's reply lost",
    "stray coordinator",
    "stray shard",
    "message from the dead",
    "message after its deadline",
)
CONSEQUENCES = (
    "silent worker",
    "speculative lease",
    "worker started again",
    "worker joined again",
    "coordinator started again",
    "could not start",
    "shard restored a checkpoint",
    "pushes beside a checkpoint",
    "operation done again",
    "drained checkpoint",
    "early stop",
    "ack: duplicate",
    "push cut in the middle",
    "refused: queue-full",
    "refused: stale-incarnation",
    "stray: wrong-run",
)
RARE = (
    "crash between two shards",
    "crash between two messages",
    "crash between cut and manifest",
    "pause past the lease time",
    "poison",
    "refused: non-finite-gradient",
    "two of one worker",
    "two of one shard",
    "two of one coordinator",
    "killed for its silence",
)
OFTEN = Faults(
    lost=0.05,
    late=0.05,
    duplicated=0.1,
    crash=0.005,
    pause=0.002,
    shard_crash=0.003,
    shard_pause=0.001,
    coordinator_crash=0.002,
    coordinator_pause=0.001,
    replaced=0.5,
    poison=0.1,
    until_s=20.0,
)
FAILED_ONCE = (
    (
        "torn",
        "sync:4",
        9000337,
        False,
    ),  # two shards saved the last round, the third came back empty: all computed again
    ("digest", "sync:4", 41001965, False),  # acks that died with a worker, of steps that every shard had committed
    ("ledger", "sync:4", 958852363579, True),  # a process that hung before its first sign of life
    ("torn", "sync:4", 958852363692, True),  # likewise
    ("ledger", "sync:4", 637417636428, True),  # an abandoned half of a push kept all others out
    ("rows", "async", 126443652564, True),  # a coordinator died after it had stored the end, and before it knew
)
REPEATED = (("ledger", "async"), ("torn", "ssp:2"), ("digest", "sync:4"), ("rows", "auto:2"))
ASYNC, SYNC = Policy("async"), Policy("sync", 4)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """The product's own log costs as much time as a run."""
    with quiet_log():
        yield


@pytest.mark.parametrize(("oracle", "policy"), JOBS)
def test_a_job_keeps_its_promise_whatever_is_lost_late_or_killed(oracle: str, policy: str) -> None:
    """P1-P14: every oracle, and progress once the faults have stopped."""
    for seed in range(SEEDS_MIN):
        assert simulate(seed, drawn_setting(seed, oracle, policy)).violations == [], f"seed {seed}"


@pytest.mark.full("as many seeds as it takes; the test above has the first ones")
@pytest.mark.parametrize(("oracle", "policy"), JOBS)
def test_every_fault_strikes_every_job_and_it_keeps_its_promise(oracle: str, policy: str) -> None:
    """P1-P14: likewise, until each fault and each of its consequences has been there."""
    due = {*FAULTS, *CONSEQUENCES}
    if policy.startswith("ssp"):  # P9
        due.add("the bound is reached")
    if policy.startswith("auto"):  # P39
        due |= {"lag changed", "ack: buffered"}
    if (oracle, policy) in FOLLOWED:  # P37
        due.add("learning rate changed")
    fired: Counter[str] = Counter()
    for seed in range(SEEDS_MAX):
        run = simulate(seed, drawn_setting(seed, oracle, policy))
        assert run.violations == [], f"seed {seed}"
        fired.update(run.fired)
        fired["the bound is reached"] += run.step_lag_max >= Policy.parse(policy).bound
        if seed + 1 >= SEEDS_MIN and all(fired[fault] for fault in due):
            return
    pytest.fail(f"never struck: {[fault for fault in due if not fired[fault]]}")


@pytest.mark.parametrize("policy", [ASYNC, SYNC], ids=["async", "sync"])
def test_after_a_damaged_file_of_rows_shards_go_back_to_the_chain_before(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12, P33: with the newest checkpoint alone kept, but for the one of the chain before."""
    monkeypatch.setattr(embedding_tables, "CHAIN_MAX", 2)
    faults = Faults(shard_crash=0.006, crash=0.003, lost=0.02, rows_damaged=0.4, until_s=30.0)
    setting = Setting("rows", policy, shards=2, workers=2, checkpoint_every_steps=1, checkpoints_kept=1, faults=faults)
    due = ["rows_damaged", "shard went back to an earlier chain", *(["rollback"] if policy == SYNC else [])]
    fired: Counter[str] = Counter()
    for seed in range(SEEDS_OFTEN_MAX):
        run = simulate(seed, setting)
        assert run.violations == [], f"seed {seed}"
        fired.update(run.fired)
        if seed + 1 >= SEEDS_OFTEN and all(fired[event] for event in due):
            return
    pytest.fail(f"never happened: {[event for event in due if not fired[event]]}")


@pytest.mark.parametrize(("oracle", "policy", "seed", "environment"), FAILED_ONCE)
def test_a_seed_that_failed_once_passes(oracle: str, policy: str, seed: int, environment: bool) -> None:
    assert simulate(seed, drawn_setting(seed, oracle, policy, environment=environment)).violations == []


@pytest.mark.full("many seeds, until rare faults have struck; the first test has faults of every kind")
@pytest.mark.parametrize(("oracle", "policy"), [("torn", ASYNC), ("digest", SYNC)], ids=["async", "sync"])
def test_a_job_keeps_its_promise_under_far_more_frequent_faults(oracle: str, policy: Policy) -> None:
    """P1-P14: what is rare elsewhere."""
    setting = Setting(oracle, policy, shards=3, workers=3, depth=1, messages=3, faults=OFTEN)
    due = [*RARE, "rollback"] if policy.kind == "sync" else RARE
    fired: Counter[str] = Counter()
    for seed in range(SEEDS_OFTEN_MAX):
        every_steps = 3 if seed % 8 < 4 else 8
        varied = replace(setting, supervised=bool(seed % 2), checkpoint_every_steps=every_steps)
        run = simulate(seed, varied)
        assert run.violations == [], f"seed {seed}"
        fired.update(run.fired)
        if seed + 1 >= SEEDS_OFTEN and all(fired[fault] for fault in due):
            return
    pytest.fail(f"never struck: {[fault for fault in due if not fired[fault]]}")


def test_a_process_that_hangs_before_it_has_spoken_is_replaced() -> None:
    """P22: where many hang, some do at their start."""
    faults = Faults(shard_crash=0.01, hang=0.02, shard_hang=0.02, until_s=10.0)
    setting = Setting("ledger", ASYNC, shards=3, workers=2, faults=faults)
    seeds = (1, 14, 33, 41, 44, 48, 50, 51)[: by_tier(quick=3, full=8)]
    runs = {seed: simulate(seed, setting) for seed in seeds}
    assert {seed: run.violations for seed, run in runs.items() if run.violations} == {}
    assert all(run.fired["killed for its silence"] for run in runs.values())


@pytest.mark.parametrize("kills", [False, True], ids=["fails", "kills"])
@pytest.mark.parametrize(
    ("oracle", "policy"),
    [
        ("ledger", ASYNC),
        ("ledger", SYNC),
        pytest.param("digest", SYNC, marks=pytest.mark.full("the ledger sees the same steps")),
    ],
)
def test_a_step_that_is_given_up_after_a_partial_push_is_the_same_everywhere_or_reported(
    oracle: str, policy: Policy, kills: bool
) -> None:
    """P24, P26: attempts at one step fail more often than not, or kill; workers die between two shards."""
    faults = Faults(lost=0.02, crash=0.06, shard_crash=0.002, coordinator_crash=0.002, until_s=20.0)
    setting = Setting(
        oracle, policy, shards=4, workers=3, depth=1, bad_step_fails=0.7, bad_step_kills=kills, faults=faults
    )
    due = ["skipped", *(["killed by its model"] if kills else [])]
    due += ["skip after a partial push", "round began again"] if policy.kind == "sync" else []
    fired: Counter[str] = Counter()
    for seed in range(SEEDS_OFTEN_MAX):
        varied = replace(setting, bad_step=seed % 21, checkpoint_every_steps=3 * (seed % 3))
        run = simulate(seed, varied)
        assert run.violations == [], f"seed {seed}"
        fired.update(run.fired)
        if seed + 1 >= SEEDS_OFTEN and all(fired[event] for event in due):
            return
    pytest.fail(f"never happened: {[event for event in due if not fired[event]]}")


@pytest.mark.parametrize(("oracle", "policy"), REPEATED)
def test_the_same_seed_is_the_same_run(oracle: str, policy: str) -> None:
    first, again, other = (simulate(seed, drawn_setting(3, oracle, policy)) for seed in (1, 1, 2))
    assert first == again
    assert first.trace != other.trace


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_rounds_give_the_same_bits_for_any_number_of_shards_and_workers(shards: int, workers: int) -> None:  # P13
    run = simulate(7, Setting("digest", SYNC, shards=shards, workers=workers, depth=1, messages=3))
    assert (run.violations, run.weights) == ([], faultless_digest("digest", SYNC))


def test_without_a_lag_no_gradient_is_stale_and_the_weights_are_those_of_one_machine() -> None:  # P39
    for workers in (1, 3):
        run = simulate(7, Setting("digest", Policy("auto", 2), shards=2, workers=workers, depth=1, messages=3))
        assert run.violations == []


def test_without_faults_nothing_is_lost_repeated_or_refused() -> None:
    run = simulate(0, Setting("ledger", ASYNC, shards=3, workers=2, messages=3))
    assert run.violations == []
    assert not any(run.fired[fault] for fault in FAULTS if fault != "reordered")
    assert run.fired["ack: applied"] == 3 * 21


def test_a_job_without_workers_is_seen_to_be_stuck() -> None:
    stuck = Setting("ledger", ASYNC, workers=0, calm_events_max=500)
    [violation] = simulate(0, stuck).violations
    assert violation.startswith("progress: not over 500 events after the last fault")


def test_a_job_whose_every_message_is_lost_goes_on_when_faults_stop() -> None:
    faults = Faults(lost=1.0, until_s=5.0)
    run = simulate(0, Setting("torn", ASYNC, shards=2, workers=2, messages=2, faults=faults))
    assert run.violations == []
    assert run.fired["lost"] > 10


@pytest.mark.parametrize(("fault", "deaths"), [("crash", 20), ("shard_crash", 20), ("coordinator_crash", 10)])
def test_a_role_that_dies_at_every_step_of_its_work_stops_nothing(fault: str, deaths: int) -> None:
    """Crashes at each event of a role in turn: the rate is so high that little is done in one incarnation."""
    faults = replace(Faults(until_s=20.0), **{fault: 0.05})
    setting = Setting("digest", SYNC, shards=3, workers=2, messages=3, checkpoint_every_steps=4, faults=faults)
    runs = [simulate(seed, replace(setting, supervised=bool(seed % 2))) for seed in range(4)]
    assert [run.violations for run in runs] == [[]] * 4
    assert sum(run.fired[fault] for run in runs) >= deaths
