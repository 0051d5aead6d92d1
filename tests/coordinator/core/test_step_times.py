"""StepTimes: what each worker takes for a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parashard_coordinator.core.leases import StepLeases
from parashard_coordinator.core.policies import Async
from parashard_coordinator.core.progress import KEPT, StepTimes, median


def test_a_step_that_waited_behind_another_one_begins_when_that_was_done() -> None:
    times = StepTimes()
    times.took("worker-0", 1.0, 3.0)
    times.took("worker-0", 1.0, 4.0)
    times.took("worker-0", 9.0, 9.5)
    assert times.of("worker-0") == [2.0, 1.0, 0.5]


def test_what_a_worker_waited_for_others_is_not_its_time() -> None:
    times = StepTimes()
    times.waited("worker-0", 7.0)  # before its first step
    times.took("worker-0", 1.0, 3.0)
    times.waited("worker-0", 7.5)  # a step that was leased ahead, whose pull waited
    times.took("worker-0", 1.0, 4.0)
    times.waited("worker-0", 12.0)  # for its next lease: that is before the grant
    times.took("worker-0", 8.5, 9.5)
    times.waited("worker-0", 11.0)  # another process of this name
    times.took("worker-0", 9.5, 10.0)
    assert times.of("worker-0") == [2.0, 0.5, 1.0, 0.5]


def test_steps_that_are_reported_together_share_the_time() -> None:
    times = StepTimes()
    for _ in range(4):
        times.took("worker-0", 1.0, 3.0)
    assert times.of("worker-0") == [0.5]


def test_the_newest_are_kept_and_a_worker_can_be_forgotten() -> None:
    times = StepTimes()
    for step in range(KEPT + 5):
        times.took("worker-0", float(step), step + 0.5)
    assert times.of("worker-0") == [0.5] * KEPT
    times.forget("worker-0")
    assert times.of("worker-0") == times.of("nobody") == []


def test_a_worker_that_is_overtaken_took_at_least_as_long() -> None:
    leases = StepLeases(8, 0, Async(), speculate_after=1.0)
    leases.grant("slow", 1, 2, 0.0, 8)
    for step in range(1, 8):
        leases.grant("quick", 1, 2, float(step), 8)
        leases.acknowledge("quick", step, [], step + 0.1)
    assert [grant.step for grant in leases.grant("quick", 1, 2, 10.0, 8)] == [0]
    assert leases.acknowledge("quick", 0, [], 10.5)
    assert leases.times.of("slow") == [10.5]
    leases.end("slow")
    assert leases.times.of("slow") == [], "its next process is another one"


def test_a_median_of_an_even_number_is_between_the_two_in_the_middle() -> None:
    assert (median([3.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])) == (2.0, 2.5)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.01, 9.0), st.booleans()), max_size=30),
    st.sampled_from("abcde"),
)
def test_the_others_median_is_that_of_their_medians(reports: list[tuple[str, float, bool]], worker: str) -> None:
    times = StepTimes()
    for now_s, (name, seconds, forgets) in enumerate(reports):
        times.took(name, now_s - seconds, now_s)
        if forgets:
            times.forget(name)
        times.of_others(name)  # a look in between changes nothing
    medians = [median(times.of(other)) for other in "abcd" if other != worker and times.of(other)]
    assert times.of_others(worker) == (median(medians) if medians else None)
