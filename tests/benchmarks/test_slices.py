"""Turns of two jobs: the same time for each, in an order that favours none, and nothing counted but the turns."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field

import pytest

from benchmarks.slices import STEPS, Pace, duel, with_descendants


@dataclass
class Counted:
    """A job with a fixed speed. A step costs a millisecond of processor time."""

    name: str
    steps_per_s: int
    turns: list[str]
    done: Pace = field(default=Pace(70, 0.0, 3.0))  # what it did before it was stopped

    def signalled(self, number: signal.Signals) -> None:
        """Record the signal."""
        self.turns.append(f"{self.name} {number.name}")

    def turn(self, seconds: float) -> None:
        """Run for so long."""
        self.turns.append(self.name)
        steps = int(seconds * self.steps_per_s)
        self.done = Pace(self.done.steps + steps, self.done.seconds + seconds, self.done.cpu_s + steps / 1000)

    def so_far(self) -> Pace:
        """Return what it has done."""
        return self.done


def test_each_has_as_much_time_and_what_was_before_is_not_counted() -> None:
    turns: list[str] = []
    jobs = [Counted("slow", 100, turns), Counted("fast", 200, turns)]
    slow, fast = duel(jobs, rounds=4, slice_s=0.5)
    assert (slow.steps, slow.seconds, slow.step_ms) == (200, 2.0, 10.0)
    assert (fast.steps, fast.seconds, fast.step_ms) == (400, 2.0, 5.0)
    assert slow.cpu_ms == pytest.approx(1.0)
    assert turns == ["slow SIGSTOP", "fast SIGSTOP", *["slow", "fast", "fast", "slow"] * 2]


def test_steps_are_those_of_the_coordinators_metrics() -> None:
    page = "# TYPE parashard_coordinator_steps_complete gauge\nparashard_coordinator_steps_complete 1.25e+03\n"
    assert [float(steps) for steps in STEPS.findall(page)] == [1250.0]


def test_a_job_s_processes_are_what_it_has_started() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        sleep = int(shell.stdout.readline())
        try:
            assert with_descendants([shell.pid]) == {shell.pid, sleep}
            assert {shell.pid, sleep} < with_descendants([os.getpid()])
        finally:
            os.kill(sleep, signal.SIGKILL)
