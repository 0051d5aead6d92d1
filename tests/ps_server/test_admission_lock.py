"""AdmissionLock: one at a time, a bounded line, and no way on after a broken invariant (P19)."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from parashard.errors import NonFiniteGradient, QueueFull
from parashard_server.shard_host import AdmissionLock
from support.waiting import DEADLINE_S

Result = TypeVar("Result")


def never(error: BaseException) -> None:
    raise AssertionError(f"the process would have ended: {error!r}")


def run(lock: AdmissionLock, call: Callable[[], Result], timeout_s: float) -> Result:
    with lock.held(timeout_s):
        return call()


@contextlib.contextmanager
def held(lock: AdmissionLock) -> Iterator[None]:
    """Hold the lock's turn, on a thread that ends whatever happens."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        done.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(run, lock, hold, DEADLINE_S)
        try:
            assert inside.wait(DEADLINE_S)
            yield
        finally:
            done.set()
        holding.result(DEADLINE_S)


def test_the_result_comes_back() -> None:
    assert run(AdmissionLock(1, never), lambda: 42, DEADLINE_S) == 42


def test_one_more_than_the_line_holds_is_turned_away() -> None:
    lock = AdmissionLock(1, never)
    with held(lock), pytest.raises(QueueFull, match="1 requests are waiting"):
        run(lock, lambda: pytest.fail("it ran"), DEADLINE_S)
    assert run(lock, lambda: "its place is free again", DEADLINE_S)


def test_who_waits_too_long_is_turned_away_without_having_run() -> None:
    lock = AdmissionLock(2, never)
    with held(lock):
        for _ in range(3):  # each gives its place back
            with pytest.raises(QueueFull, match=r"busy for 0\.0 s"):
                run(lock, lambda: pytest.fail("it ran"), 0.0)


def test_who_waits_gets_the_turn_when_it_is_free_and_not_before() -> None:
    lock, order = AdmissionLock(2, never), []
    with ThreadPoolExecutor(1) as pool:
        with held(lock):
            waiting = pool.submit(run, lock, lambda: order.append("the second"), DEADLINE_S)
            order.append("the first")
        waiting.result(DEADLINE_S)
    assert order == ["the first", "the second"]


def test_an_error_of_ours_passes_and_frees_the_turn() -> None:
    lock = AdmissionLock(1, never)

    def refuse() -> None:
        raise NonFiniteGradient("no")

    with pytest.raises(NonFiniteGradient):
        run(lock, refuse, DEADLINE_S)
    assert run(lock, lambda: 1, DEADLINE_S) == 1


def test_it_is_busy_while_a_request_is_served() -> None:
    now_s = [100.0]
    lock = AdmissionLock(2, never, lambda: now_s[0])
    assert lock.busy_s == 0
    with held(lock):
        now_s[0] += 2
        assert lock.busy_s == 2  # a scrape sees what is not over yet
        with pytest.raises(QueueFull):
            run(lock, lambda: pytest.fail("it ran"), 0.0)
        now_s[0] += 3
    now_s[0] += 10
    assert lock.busy_s == 5
    run(lock, lambda: now_s.append(now_s.pop() + 1), DEADLINE_S)
    assert lock.busy_s == 6


def test_it_is_busy_while_the_next_in_line_has_not_woken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]

    class LateLock:
        def acquire(self, timeout: float) -> bool:
            now_s[0] += 4  # it is free, and the thread has no core
            return True

        def release(self) -> None:
            pass

    lock = AdmissionLock(2, never, lambda: now_s[0])
    monkeypatch.setattr(lock, "_lock", LateLock())
    run(lock, lambda: None, DEADLINE_S)
    assert lock.busy_s == 4


@pytest.mark.parametrize("error", [ValueError("bad"), AssertionError("broken"), KeyboardInterrupt()])
def test_any_other_error_ends_the_process_with_the_lock_held(error: BaseException) -> None:  # P14
    seen: list[tuple[BaseException, str]] = []

    def broken(reason: BaseException) -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(QueueFull) as refusal:
            pool.submit(run, lock, lambda: pytest.fail("it ran"), 0.0).result(DEADLINE_S)
        seen.append((reason, str(refusal.value)))

    def fail() -> None:
        raise error

    lock = AdmissionLock(2, broken)
    with pytest.raises(type(error)):
        run(lock, fail, DEADLINE_S)
    assert seen == [(error, "this shard was busy for 0.0 s")]
