"""Lanes share the runs of large vectors: which runs there are, who waits for whom, and what an exception leaves."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.process import lanes
from parashard.process.lanes import Lanes, cut
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS
from support.waiting import DEADLINE_S


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vectors of a few blocks be large."""
    monkeypatch.setattr(lanes, "SHARED_MIN_BYTES", 8 * BLOCK_ELEMENTS)
    monkeypatch.setattr(lanes, "RUN_MIN_BYTES", 4 * BLOCK_ELEMENTS)


@pytest.fixture
def two() -> Iterator[Lanes]:
    """Return lanes of the calling thread and one more."""
    pair = Lanes(2)
    yield pair
    pair.close()


def vector(blocks: int) -> np.ndarray:
    """Return as many blocks of ones, and a few elements more."""
    return np.ones(blocks * BLOCK_ELEMENTS + 5, np.float32)


def let_the_other_finish(two: Lanes) -> None:
    """Wait until the other thread has nothing more to do."""
    assert two._others is not None
    two._others.submit(lambda: None).result(DEADLINE_S)


# --- which runs there are ---


@given(elements=st.integers(0, 1 << 27), arrays=st.integers(1, 4), threads=st.integers(1, 64))
def test_runs_are_the_whole_vector_in_order(elements: int, arrays: int, threads: int) -> None:
    with pytest.MonkeyPatch.context() as as_shipped:
        as_shipped.setattr(lanes, "SHARED_MIN_BYTES", 32 << 20)
        as_shipped.setattr(lanes, "RUN_MIN_BYTES", 4 << 20)
        runs = cut(elements, 4 * arrays * elements, threads)
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == elements
    if len(runs) > 1:
        lengths = [run.stop - run.start for run in runs]
        assert all(length % BLOCK_ELEMENTS == 0 for length in lengths[:-1])
        assert min(lengths[:-1]) * 4 * arrays >= 4 << 20, "a run is worth its hand-over"
        assert len(runs) <= 4 * threads


def test_what_is_small_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SHARED_MIN_BYTES", 32 << 20)
    assert len(cut((4 << 20) - 1, (32 << 20) - 8, 2)) == 1
    assert len(cut(4 << 20, 32 << 20, 2)) == 8


def test_one_thread_cuts_nothing() -> None:
    assert cut(1 << 24, 1 << 26, 1) == [slice(0, 1 << 24)]


# --- who does them ---


def test_a_small_call_stays_in_its_thread(two: Lanes) -> None:
    given_, seen = vector(0), []
    two.run(lambda array: seen.append((array, threading.current_thread())), (given_,))
    assert seen == [(given_, threading.current_thread())]


def test_both_threads_work_and_answers_are_in_the_order_of_the_runs(two: Lanes) -> None:
    array = np.repeat(np.arange(8, dtype=np.float32), BLOCK_ELEMENTS)
    both, names = threading.Barrier(2), set()

    def first(run: np.ndarray, add: float) -> float:
        if threading.current_thread().name not in names:
            names.add(threading.current_thread().name)
            both.wait(DEADLINE_S)  # neither goes on before the other has a run
        return float(run[0] + add)

    assert two.run(first, (array,), 0.5) == [i + 0.5 for i in range(8)]
    assert len(names) == 2


def test_every_element_is_in_one_run(two: Lanes) -> None:
    counts, ones = np.zeros_like(vector(9)), vector(9)
    for _ in range(20):
        two.run(lambda total, added: np.add(total, added, out=total), (counts, ones))
    assert np.all(counts == 20)


def test_a_thread_that_is_busy_elsewhere_is_not_waited_for(two: Lanes) -> None:
    assert two._others is not None
    freed = threading.Event()
    elsewhere = two._others.submit(freed.wait, DEADLINE_S)
    workers = two.run(lambda run: threading.current_thread(), (vector(6),))
    assert set(workers) == {threading.current_thread()}
    freed.set()
    assert elsewhere.result(DEADLINE_S)


def test_several_threads_may_call_at_once() -> None:
    shared, begun, sums = Lanes(3), threading.Barrier(4), {}

    def call(number: int) -> None:
        begun.wait(DEADLINE_S)
        sums[number] = sum(shared.run(lambda run: float(run.sum()), (vector(4) * number,)))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    shared.close()
    assert sums == {number: float(number * vector(4).size) for number in range(4)}


# --- exceptions ---


def test_an_exception_in_the_other_thread_reaches_the_caller_and_no_run_begins_after_it(two: Lanes) -> None:
    caller, begun = threading.current_thread(), []

    def loop(run: np.ndarray) -> None:
        begun.append(threading.current_thread())
        if threading.current_thread() is not caller:
            raise ZeroDivisionError("in a lane")
        let_the_other_finish(two)

    with pytest.raises(ZeroDivisionError, match="in a lane"):
        two.run(loop, (vector(8),))
    assert len(begun) == len(set(begun)), "one run of each thread at most"
    assert set(two.run(lambda run: run.dtype, (vector(8),))) == {np.dtype(np.float32)}, "and all is well again"


def test_an_exception_of_the_caller_waits_for_the_run_under_way(two: Lanes) -> None:
    caller, at_work, failing, ended = threading.current_thread(), threading.Event(), threading.Event(), []

    def loop(run: np.ndarray) -> None:
        if threading.current_thread() is caller:
            assert at_work.wait(DEADLINE_S)
            failing.set()
            raise ZeroDivisionError("in the caller")
        at_work.set()
        assert failing.wait(DEADLINE_S)
        for _ in range(1000):
            run += 1.0
        ended.append(run[0])

    with pytest.raises(ZeroDivisionError, match="in the caller"):
        two.run(loop, (vector(8),))
    assert ended == [1001.0], "the run under way has ended, and no other began"


# --- their end ---


def test_threads_end_when_closed() -> None:
    pair = Lanes(3)
    pair.run(lambda run: None, (vector(6),))
    pair.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lane")]


def test_threads_end_with_their_process() -> None:
    program = (
        "import numpy\nfrom parashard.process.lanes import Lanes\n"
        "Lanes(3).run(len, (numpy.ones(1 << 24, 'f4'),))\nprint('end')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
