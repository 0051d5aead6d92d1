"""The model lock: one thread of a process after the other, and one that waits for ever is told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from parashard.process.threads import abandon_model_lock, holding_model_lock
from support.waiting import DEADLINE_S


def test_a_thread_may_enter_again() -> None:
    @holding_model_lock()
    def computed() -> int:
        with holding_model_lock():
            return 1

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.submit(computed).result(DEADLINE_S) for _ in range(8)) == 8


def test_one_that_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parashard.process.threads.LOCK_WAIT_S", 0.01)
    taken, over = threading.Event(), threading.Event()

    def stays() -> None:
        with holding_model_lock():
            taken.set()
            over.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(stays)
        assert taken.wait(DEADLINE_S)
        try:
            with (
                pytest.raises(TimeoutError, match="another thread of this process has computed for 0 s"),
                holding_model_lock(),
            ):
                pytest.fail("it is not its turn")
        finally:
            over.set()


def test_the_turn_of_one_that_is_given_up_is_another_s_and_it_has_none_again() -> None:
    taken, over, left = threading.Event(), threading.Event(), threading.Event()
    told: list[str] = []

    def stays() -> None:
        with holding_model_lock():
            taken.set()
            over.wait(DEADLINE_S)
        try:
            with holding_model_lock():
                pytest.fail("it was given up")
        except TimeoutError as error:
            told.append(str(error))
        left.set()

    hangs = threading.Thread(target=stays, daemon=True)
    hangs.start()
    assert taken.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(holding_model_lock()(lambda: "computed"))
        abandon_model_lock(hangs)
        assert waits.result(DEADLINE_S) == "computed"
    with holding_model_lock():
        over.set()
        assert left.wait(DEADLINE_S), "it leaves its block, and the turn stays this thread's"
    assert told == ["this thread was given up, and does not get the model lock again"]
