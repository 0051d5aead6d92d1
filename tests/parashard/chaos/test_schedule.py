"""The schedule: the same seed draws the same strikes, every kind and target has its turn, gaps are exponential."""

from collections import Counter
from itertools import islice, pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.chaos.campaign import (
    DISK,
    DISK_KINDS,
    LENGTHS_S,
    LINK_KINDS,
    PROCESS_KINDS,
    ScheduledFault,
    scheduled_faults,
    targets_of,
)

PROCESSES = ("coordinator", "shard-0", "shard-1", "worker-0", "worker-1", "worker-2")
LINKS = ("coordinator", "shard-0", "worker-0>coordinator")
KINDS = tuple(LENGTHS_S)


def first(
    count: int, seed: int = 7, mean_interval_s: float = 5.0, kinds: tuple[str, ...] = KINDS
) -> list[ScheduledFault]:
    return list(islice(scheduled_faults(seed, mean_interval_s, kinds, PROCESSES, LINKS), count))


def test_a_seed_repeats_its_strikes_and_another_draws_others():
    assert first(200) == first(200)
    assert first(200) != first(200, seed=8)


def test_the_first_strikes_do_not_depend_on_how_many_are_asked_for():
    assert first(200)[:10] == first(10)


@given(st.integers(0, 2**63), st.floats(0.01, 100.0), st.sets(st.sampled_from(KINDS), min_size=1))
def test_faults_come_in_order_with_allowed_targets_and_durations(seed, mean_interval_s, kinds):
    drawn = first(30, seed, mean_interval_s, tuple(sorted(kinds)))
    assert [fault.at_s for fault in drawn] == sorted(fault.at_s for fault in drawn)
    for fault in drawn:
        shortest_s, longest_s = LENGTHS_S[fault.kind]
        assert fault.kind in kinds
        assert fault.target in targets_of(fault.kind, PROCESSES, LINKS)
        assert shortest_s <= fault.length_s <= longest_s


def test_every_kind_of_fault_happens_to_each_of_its_targets():
    struck = Counter((fault.kind, fault.target) for fault in first(2000))
    assert set(struck) == {(kind, target) for kind in KINDS for target in targets_of(kind, PROCESSES, LINKS)}
    of_kind = Counter(fault.kind for fault in first(2000))
    assert min(of_kind.values()) > 0.5 * max(of_kind.values())
    ways = Counter(fault.towards_backend for fault in first(2000) if fault.kind == "one_way")
    assert min(ways.values()) > 0.5 * max(ways.values())


def test_times_between_strikes_are_exponential():
    drawn = first(5000, mean_interval_s=2.0)
    gaps_s = [after.at_s - before.at_s for before, after in pairwise(drawn)]
    assert mean(gaps_s) == pytest.approx(2.0, rel=0.1)
    assert sum(gap_s > 2.0 for gap_s in gaps_s) / len(gaps_s) == pytest.approx(0.368, abs=0.05)  # 1/e


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("kill_worker", ["worker-0", "worker-1", "worker-2"]),
        ("pause_shard", ["shard-0", "shard-1"]),
        ("kill_coordinator", ["coordinator"]),
        ("partition", list(LINKS)),
        ("duplicate", list(LINKS)),
        ("fill_disk", [DISK]),
    ],
)
def test_a_kind_names_its_targets(kind, targets):
    assert list(targets_of(kind, PROCESSES, LINKS)) == targets


def test_faults_of_a_process_are_a_kill_a_pause_a_hang_or_a_stray():
    assert {kind.partition("_")[0] for kind in PROCESS_KINDS} == {"kill", "pause", "hang", "stray"}
    assert set(LINK_KINDS) == {"partition", "one_way", "reset", "delay", "duplicate"}
    assert set(KINDS) == {*PROCESS_KINDS, *LINK_KINDS, *DISK_KINDS}
