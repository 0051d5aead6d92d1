"""RunControl: what a program wishes of its run arrives, and what the run tells wakes the program."""

from __future__ import annotations

import threading

import pytest

from parashard.launch import run_control
from parashard.launch.run_control import RunControl
from parashard.plan.intervals import IntervalSet
from support.waiting import DEADLINE_S


def test_a_wish_ends_a_pause() -> None:
    steered = RunControl(open_length=True)
    steered.schedule(3)
    steered.schedule(2)
    steered.pause(DEADLINE_S)
    assert (steered.scheduled, steered.closed) == (3, False)
    steered.close()
    steered.pause(DEADLINE_S)
    assert steered.closed
    steered.stop()
    with pytest.raises(KeyboardInterrupt):
        steered.pause(DEADLINE_S)


def test_a_pause_is_short_while_the_program_may_wait_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    steered = RunControl(open_length=True)
    monkeypatch.setattr(steered._wake, "wait", lambda pause_s: bool(waited.append(pause_s)))
    steered.pause(5.0)
    steered.schedule(2)
    steered.pause(5.0)
    steered.report(IntervalSet([(0, 2)]))
    steered.pause(5.0)
    assert waited == [5.0, run_control.EAGER_S, 5.0]


def test_what_is_complete_wakes_who_waits_for_it_and_its_errors_are_known_by_then() -> None:
    noted: list[int] = []
    steered = RunControl(open_length=True, on_report=lambda complete: noted.append(len(complete)))
    found: list[tuple[bool, list[int]]] = []
    waiting = threading.Thread(
        target=lambda: found.append((steered.wait_for(lambda: 1 in steered.complete, DEADLINE_S), list(noted)))
    )
    waiting.start()
    steered.report(IntervalSet([(0, 1)]))
    steered.report(IntervalSet([(0, 2)]))
    waiting.join(DEADLINE_S)
    assert found == [(True, [1, 2])]


def test_a_wait_ends_with_its_time_and_with_the_run() -> None:
    steered = RunControl()
    assert not steered.wait_for(lambda: False, 0.0)
    assert not steered.accepted
    steered.tell(accepted=True)
    assert steered.wait_for(lambda: steered.accepted, 0.0)
    steered.tell(ended=True)
    assert not steered.wait_for(lambda: False, DEADLINE_S)
