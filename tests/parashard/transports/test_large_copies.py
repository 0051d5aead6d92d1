"""Large copies are divided among threads: the same bytes, and each partition still of one version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import StaleRound
from parashard.process import lanes
from parashard.protocol.messages import Buffers
from parashard.transports import memory
from parashard.transports.shared_weights import WeightsReader
from support.waiting import DEADLINE_S

SIZE = 4096
CUTS = st.lists(st.integers(0, SIZE), max_size=12)


@pytest.fixture(autouse=True)
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let two threads copy from 1 KiB on, in runs of 256 bytes and more."""
    monkeypatch.setattr(lanes, "SHARED_MIN_BYTES", 2 << 10)
    monkeypatch.setattr(lanes, "RUN_MIN_BYTES", 2 << 8)
    monkeypatch.setattr(lanes, "RUN_GRAIN", 8)
    pair = lanes.Lanes(2)
    monkeypatch.setattr(memory, "lanes", pair)
    yield
    pair.close()


def drawn(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def pieces_of(content: np.ndarray, cuts: list[int]) -> Buffers:
    return Buffers(content[begin:end].data for begin, end in pairwise([0, *sorted(cuts), content.size]))


def reader_of(content: np.ndarray, starts: list[int], moved: int | None = None) -> WeightsReader:
    """Return a reader of partitions that begin at these elements, each of version 5, one of them being moved."""
    done = np.full(len(starts) - 1, 5, np.uint64)
    begun = done.copy()
    if moved is not None:
        begun[moved] += 1
    return WeightsReader(content, begun, done, starts)


@given(cuts=CUTS)
def test_pieces_arrive_whole_and_in_order(cuts: list[int]) -> None:
    content, gathered, scattered = drawn(SIZE), np.zeros(SIZE + 3, np.uint8), np.zeros(SIZE + 5, np.uint8)
    memory.gather(pieces_of(content, cuts), gathered)
    assert np.array_equal(gathered, [*content, 0, 0, 0]), "and nothing behind them"
    memory.scatter(content, pieces_of(scattered, cuts), 2)
    assert np.array_equal(scattered, [0, 0, *content, 0, 0, 0])


@given(cuts=CUTS, begin=st.integers(0, SIZE // 2))
def test_weights_are_read_as_by_one_thread(cuts: list[int], begin: int) -> None:
    content = drawn(SIZE)
    starts = [0, *sorted(cut // 4 for cut in cuts), SIZE // 4]
    into = np.zeros(SIZE - begin, np.uint8)
    end = reader_of(content, starts).read(begin, SIZE, Buffers([into.data]), known=None, version=5, exact=True)
    assert end == SIZE
    assert np.array_equal(into, content[begin:])


@given(cuts=CUTS, begin=st.integers(0, SIZE - 1), data=st.data())
def test_no_run_ends_within_a_partition(cuts: list[int], begin: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(begin, SIZE))
    starts = [0, *sorted(cut // 4 for cut in cuts), SIZE // 4]
    runs = reader_of(drawn(SIZE), starts)._runs(begin, end)
    assert (runs[0].start, runs[-1].stop) == (begin, end)
    assert all(a.stop == b.start and a.stop // 4 in starts and a.start < a.stop for a, b in pairwise(runs))


def test_a_partition_that_moves_is_where_the_reading_ends() -> None:
    content, starts = drawn(SIZE), list(range(0, SIZE // 4 + 1, 64))
    for moved in range(len(starts) - 1):
        into = np.zeros(SIZE, np.uint8)
        end = reader_of(content, starts, moved).read(0, SIZE, Buffers([into.data]), known=None, version=5, exact=False)
        assert end == 4 * starts[moved]
        assert np.array_equal(into[:end], content[:end])


def test_what_is_known_is_left_and_a_round_that_is_over_is_refused() -> None:
    reader, into = reader_of(drawn(SIZE), list(range(0, SIZE // 4 + 1, 64))), np.zeros(SIZE, np.uint8)
    assert reader.read(0, SIZE, Buffers([into.data]), known=5, version=5, exact=True) == SIZE
    assert not into.any()
    with pytest.raises(StaleRound, match="has moved to version 5; asked was for version 4"):
        reader.read(0, SIZE, Buffers([into.data]), known=None, version=4, exact=True)


@pytest.mark.parametrize("starts", [[0, SIZE // 4], list(range(0, SIZE // 4 + 1, 64))], ids=["one", "several"])
def test_both_threads_copy(starts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    both, seen, copy = threading.Barrier(2), set[int](), memory.copy

    def watched(source: np.ndarray, target: memoryview) -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait(DEADLINE_S)  # neither goes on before the other copies
        copy(source, target)

    monkeypatch.setattr(memory, "copy", watched)
    content, into = drawn(SIZE), np.zeros(SIZE, np.uint8)
    reader_of(content, starts).read(0, SIZE, Buffers([into.data]), known=None, version=5, exact=False)
    assert len(seen) == 2
    assert np.array_equal(into, content)


def test_a_copy_that_fails_in_either_thread_fails_for_the_caller() -> None:
    with pytest.raises(ValueError, match="not within"):
        memory.scatter(drawn(SIZE), Buffers([bytearray(SIZE - 1)]), 0)
    with pytest.raises(ValueError):  # NumPy's, of lengths that differ
        memory.gather(Buffers([drawn(SIZE).data]), np.zeros(SIZE - 1, np.uint8))
