"""A clock that leaves out the time in which its process stood still (P22)."""

from __future__ import annotations

from parashard.process.shell import AwakeClock


class Seconds:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_it_counts_on_while_it_is_read_and_leaves_a_standstill_out() -> None:
    seconds = Seconds()
    clock = AwakeClock(2.0, seconds)
    for seconds.now_s, read_s in ((102.0, 102.0), (103.5, 103.5), (203.5, 103.5), (205.5, 105.5), (208.0, 105.5)):
        assert clock.now_s() == read_s


def test_two_readings_at_one_moment_are_one() -> None:
    seconds = Seconds()
    clock = AwakeClock(2.0, seconds)
    seconds.now_s += 50.0
    assert clock.now_s() == clock.now_s() == 100.0
