"""Steps of the next batches, leased before their turn: to whom, how many, and what goes before them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parashard_coordinator.core.leases import SPECULATION_MIN_S, NextBatches, StepLeases
from parashard_coordinator.core.policies import Auto

FREE = 1 << 62
ALL = (0, 1)


def leases_of(steps: int, parts: int = 2, **options: float) -> StepLeases:
    return StepLeases(steps, 2, Auto(parts), **options)  # type: ignore[arg-type]


FOUR = NextBatches(batches=4, batch_steps=2)


def ahead(leases: StepLeases, worker: str, want: int, now_s: float = 0.0, workers: int = 2) -> list[int]:
    return [found.step for found in leases.grant(worker, want, workers, now_s, FREE, FOUR)]


def test_a_worker_gets_its_share_of_each_of_the_next_batches() -> None:
    leases = leases_of(100)
    assert ahead(leases, "a", 4) == [0, 2, 4, 6]
    assert ahead(leases, "b", 9) == [1, 3, 5, 7, 8], "and no step of the batch after"
    assert ahead(leases, "a", 9) == [9]
    assert [*leases.grant("c", 1, 2, 0.0, FREE)] == [], "no step is due"


def test_steps_that_come_back_are_leased_before_those_ahead() -> None:
    leases = leases_of(100)
    ahead(leases, "a", 2)
    ahead(leases, "b", 2)
    leases.end("b")
    assert ahead(leases, "a", 2, workers=1) == [1, 3], "a is alone, and may have whole batches"


def test_a_straggler_comes_before_a_step_ahead() -> None:
    leases = leases_of(100)
    ahead(leases, "a", 1)
    ahead(leases, "slow", 1)
    leases.acknowledge("a", 0, ALL, 0.1)
    assert ahead(leases, "a", 1, now_s=0.1) == [2], "not yet late"
    leases.acknowledge("a", 2, ALL, 0.2)
    assert ahead(leases, "a", 1, now_s=0.1 + 2 * SPECULATION_MIN_S) == [1]


@given(
    wants=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans()), max_size=30),
    parts=st.integers(1, 4),
)
def test_whatever_is_leased_ahead_no_step_has_two_holders_and_none_is_forgotten(
    wants: list[tuple[str, int, bool]], parts: int
) -> None:
    leases, held = leases_of(40, parts, speculate_after=0.0), dict[str, list[int]]()
    for worker, want, finishes in wants:
        found = leases.grant(worker, want, 3, 0.0, FREE, NextBatches(3, parts))
        mine = held.setdefault(worker, [])
        mine += [one.step for one in found]
        assert max(mine, default=0) < (leases.lowest_incomplete // parts + 4) * parts
        if finishes and mine:
            leases.acknowledge(worker, mine.pop(0), ALL, 0.0)
    everything = [step for steps in held.values() for step in steps]
    assert len(everything) == len(set(everything))
    for worker in held:
        leases.end(worker)
    left = [leases.grant("last", 99, 1, 0.0, FREE, NextBatches(40, parts)) for _ in range(40)]
    assert sorted(one.step for few in left for one in few) == [s for s in range(40) if s not in leases.complete]
