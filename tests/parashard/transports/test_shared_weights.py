"""Weights that one process moves while others read them: every partition is read whole, whatever the writer does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import MalformedFrame, StaleRound
from parashard.protocol.messages import Buffers
from parashard.transports import memory, shared_weights
from parashard.transports.shared_weights import (
    PrivateWeights,
    SharedWeights,
    WeightsReader,
    can_share,
    memory_bytes,
    weight_memory,
)

needs_sharing = pytest.mark.skipif(not can_share(), reason="this machine cannot share weights")

OFFSETS = (0, 3, 3, 8, 20)


def reader_of(shared: SharedWeights) -> WeightsReader:
    """Map as another process would."""
    return WeightsReader.mapped(shared.read_descriptor, shared.weights.size, shared.done.size)


def read(
    reader: WeightsReader, into: np.ndarray, *, known: int | None = None, version: int = 99, exact: bool = False
) -> int:
    """Read all the weights; return up to which element."""
    return reader.read(0, into.nbytes, Buffers([into]), known=known, version=version, exact=exact) // 4


@pytest.fixture
def shared() -> SharedWeights:
    """Return memory in which weight i is i and partition p was moved to version p."""
    shared = SharedWeights(OFFSETS)
    shared.weights[:] = np.arange(20)
    shared.begun[:] = shared.done[:] = range(4)
    return shared


# --- a writer that rests ---


@needs_sharing
class TestReading:
    """What lies in the memory arrives, and nothing else."""

    @given(st.integers(0, 80), st.integers(0, 80), st.lists(st.integers(0, 80), max_size=4))
    def test_any_run_is_read_into_any_pieces(self, begin: int, end: int, cuts: list[int]) -> None:
        shared = SharedWeights(OFFSETS)
        shared.weights[:] = np.arange(20)
        begin, end = min(begin, end), max(begin, end)
        into = bytearray(end - begin)
        bounds = [0, *sorted(min(cut, end - begin) for cut in cuts), end - begin]
        pieces = [memoryview(into)[a:b] for a, b in pairwise(bounds)]
        assert reader_of(shared).read(begin, end, Buffers(pieces), known=None, version=0, exact=False) == end
        assert into == shared.weights.tobytes()[begin:end]

    def test_what_has_not_moved_since_a_version_is_left_as_it_is(self, shared: SharedWeights) -> None:
        into = np.full(20, -1, np.float32)
        assert read(reader_of(shared), into, known=2) == 20
        assert into[:8].tolist() == [-1] * 8, "partitions of versions 0 to 2"
        assert into[8:].tolist() == list(range(8, 20))

    def test_an_update_is_visible_through_existing_mappings(self, shared: SharedWeights) -> None:
        reader, into = reader_of(shared), np.empty(20, np.float32)
        shared.weights += 1
        assert read(reader, into) == 20
        assert into.tolist() == list(range(1, 21))

    @pytest.mark.parametrize("offsets", [(0,), (0, 0), (0, 0, 7)])
    def test_shards_with_little_or_nothing_share_it_too(self, offsets: Sequence[int]) -> None:
        shared = SharedWeights(offsets)
        assert read(reader_of(shared), np.empty(offsets[-1], np.float32)) == offsets[-1]

    def test_the_memory_lives_as_long_as_its_last_reference(self, shared: SharedWeights) -> None:
        reader, weights, into = reader_of(shared), shared.weights, np.empty(20, np.float32)
        del shared
        weights[:] = 7
        assert read(reader, into) == 20
        assert into.tolist() == [7] * 20

    def test_the_descriptor_is_closed_with_the_object(self) -> None:
        shared = SharedWeights(OFFSETS)
        descriptor = shared.read_descriptor
        del shared
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


# --- a writer that moves ---


class Watched:
    """Versions that run a callback before each read."""

    def __init__(self, versions: np.ndarray, before: Callable[[], None]) -> None:
        self._versions = versions
        self._before = before

    def __getitem__(self, index: int) -> int:
        self._before()
        return int(self._versions[index])


class Writer:
    """Moves one partition of two elements to versions 1, 2, 3 ..., one step at a time; both elements are the version.

    Every step is one store, as the seqlock orders them; a new move begins with the step after the last of the one
    before.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(2, np.float32)
        self.begun = np.zeros(1, np.uint64)
        self.done = np.zeros(1, np.uint64)
        self.steps = 0

    def step(self) -> None:
        version, place = self.steps // 4 + 1, self.steps % 4
        match place:
            case 0:
                self.begun[0] = version
            case 1 | 2:
                self.weights[place - 1] = version
            case 3:
                self.done[0] = version
        self.steps += 1

    def reader(self, before: Callable[[], None]) -> WeightsReader:
        content = self.weights.view(np.uint8)
        begun: Any = Watched(self.begun, before)
        done: Any = Watched(self.done, before)
        return WeightsReader(content, begun, done, [0, 2])


class TestReadersAndTheWriter:
    """The writer takes steps between any two looks of a reader, and between the copies of two elements."""

    @given(st.lists(st.integers(0, 9), min_size=15, max_size=15), st.booleans())
    def test_no_interleaving_shows_a_torn_partition(self, steps: list[int], exact: bool) -> None:
        writer, turns = Writer(), iter(steps)

        def writer_moves() -> None:
            for _ in range(next(turns)):
                writer.step()

        def copy_after_moves(source: np.ndarray, target: memoryview) -> None:
            writer_moves()
            np.copyto(np.frombuffer(target, np.uint8), source)

        into, version_then = np.full(2, -1, np.float32), writer.steps // 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "copy", copy_after_moves)
            reader = writer.reader(writer_moves)
            pieces = Buffers([into[:1], into[1:]])
            try:
                end = reader.read(0, 8, pieces, known=None, version=version_then, exact=exact)
            except StaleRound:
                assert exact
                assert writer.done[0] > version_then
                return
        if end == 8:
            assert into[0] == into[1]
            if exact:  # P11
                assert into[0] == version_then
        else:
            assert end == 0, "nothing was read, as the reader says"

    def test_a_move_during_the_copy_is_noticed_and_the_copy_done_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        writer, copies = Writer(), []

        def copy_with_a_move_after_the_first(source: np.ndarray, target: memoryview) -> None:
            np.copyto(np.frombuffer(target, np.uint8), source)
            copies.append(np.frombuffer(source, np.float32).tolist())
            while len(copies) == 1 and writer.done[0] == 0:
                writer.step()

        monkeypatch.setattr(memory, "copy", copy_with_a_move_after_the_first)
        into = np.empty(2, np.float32)
        assert read(writer.reader(lambda: None), into) == 2
        assert copies == [[0, 0], [1, 1]]
        assert into.tolist() == [1, 1]

    def test_a_partition_that_is_being_moved_is_not_waited_for(self) -> None:
        writer, looks = Writer(), []
        writer.step()
        writer.step()
        assert read(writer.reader(lambda: looks.append(None)), np.empty(2, np.float32)) == 0
        assert len(looks) == 2, "one look at each number"

    def test_a_partition_that_moves_during_every_copy_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        writer, copies = Writer(), []

        def copy_with_a_move(source: np.ndarray, target: memoryview) -> None:
            copies.append(None)
            for _ in range(4):
                writer.step()

        monkeypatch.setattr(memory, "copy", copy_with_a_move)
        assert read(writer.reader(lambda: None), np.empty(2, np.float32)) == 0
        assert len(copies) == shared_weights.ATTEMPTS_MAX

    @needs_sharing
    def test_partitions_before_a_contended_one_are_read(self, shared: SharedWeights) -> None:
        shared.begun[2] = 4
        into = np.full(20, -1, np.float32)
        assert read(reader_of(shared), into) == 3
        assert into.tolist() == [0, 1, 2, *[-1] * 17]

    def test_a_move_later_than_the_known_version_is_no_hindrance(self) -> None:
        writer = Writer()
        writer.step()  # begins version 1
        into = np.full(2, -1, np.float32)
        assert read(writer.reader(lambda: None), into, known=0, version=0) == 2
        assert into.tolist() == [-1, -1], "the caller has version 0, which was asked for"

    @needs_sharing
    def test_a_round_is_read_exactly_or_not_at_all(self, shared: SharedWeights) -> None:  # P11
        into = np.empty(20, np.float32)
        assert read(reader_of(shared), into, version=3, exact=True) == 20
        with pytest.raises(StaleRound, match="partition 3 has moved to version 3; asked was for version 2"):
            read(reader_of(shared), into, version=2, exact=True)

    @needs_sharing
    def test_threads_that_read_what_a_thread_moves_see_whole_partitions(self) -> None:
        offsets, versions = (0, 30_000, 90_000), 200
        shared = SharedWeights(offsets)

        def move() -> None:
            for version in range(1, versions + 1):
                for index, run in enumerate((slice(0, 30_000), slice(30_000, 90_000))):
                    shared.begun[index] = version
                    np.copyto(shared.weights[run], np.float32(version))
                    shared.done[index] = version

        reader, into, whole = reader_of(shared), np.empty(90_000, np.float32), 0
        writer = threading.Thread(target=move)
        writer.start()
        while True:
            over = not writer.is_alive()
            end = read(reader, into)
            for start, stop in pairwise(offsets):
                if stop <= end:
                    whole += 1
                    assert into[start:stop].min() == into[start:stop].max()
            if over:
                break
        assert end == 90_000, "the writer rests"
        assert set(into.tolist()) == {versions}
        assert whole >= 2


# --- what another process sends ---


@needs_sharing
class TestForeignMemory:
    """A reader takes nothing for granted: a wrong size would end its process, a wrong offset read elsewhere."""

    def sent(self, content: bytes, *, seal: bool = True) -> int:
        descriptor = memory.create("test", len(content))
        os.pwrite(descriptor, content, 0)
        if seal:
            memory.seal(descriptor, writable=True)
        return descriptor

    def content(self, shared: SharedWeights) -> bytearray:
        return bytearray(os.pread(shared.read_descriptor, memory_bytes(20, 4), 0))

    def test_what_a_shard_sends_is_taken(self, shared: SharedWeights) -> None:
        descriptor = self.sent(bytes(self.content(shared)))
        WeightsReader.mapped(descriptor, 20, 4)
        os.close(descriptor)

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            (lambda content: content[:-4], "expected 4176 bytes of memory, found 4172"),
            (lambda content: content + bytes(4), "expected 4176 bytes of memory, found 4180"),
            (lambda content: b"PSW2" + content[4:], "begin with .* found .*PSW2"),
            (lambda content: content[:8] + b"\x15" + content[9:], "found .* 21, 4"),
            (lambda content: content[:16] + b"\x05" + content[17:], "found .* 20, 5"),
            (lambda content: content[:88] + b"\x01" + content[89:], "ascend from 0 to 20"),
            (lambda content: content[:104] + b"\x09" + content[105:], "ascend from 0 to 20"),
            (lambda content: content[:120] + b"\x13" + content[121:], "ascend from 0 to 20"),
        ],
        ids=["short", "long", "magic", "elements", "partitions", "first-offset", "descending", "last-offset"],
    )
    def test_anything_else_is_refused(
        self, shared: SharedWeights, change: Callable[[bytearray], bytes], found: str
    ) -> None:
        descriptor = self.sent(bytes(change(self.content(shared))))
        with pytest.raises(MalformedFrame, match=found):
            WeightsReader.mapped(descriptor, 20, 4)
        os.close(descriptor)

    def test_memory_that_could_be_cut_short_is_refused(self, shared: SharedWeights) -> None:
        descriptor = self.sent(bytes(self.content(shared)), seal=False)
        with pytest.raises(MalformedFrame, match="a shard's weights: its length is not sealed"):
            WeightsReader.mapped(descriptor, 20, 4)
        os.close(descriptor)

    def test_a_reader_cannot_write(self, shared: SharedWeights) -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(shared.read_descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            memory.mapped(shared.read_descriptor, writable=True)
        again = os.open(f"/proc/self/fd/{shared.read_descriptor}", os.O_RDWR)  # the same user may open it so
        with pytest.raises(PermissionError):  # and the seal stands against that
            memory.mapped(again, writable=True)
        os.close(again)


# --- where it cannot be ---


@pytest.mark.parametrize(
    "machine", ["aarch64", "riscv64", ""], ids=["weaker-order", "weaker-order-too", "unknown-machine"]
)
def test_machines_that_reorder_stores_share_nothing(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(shared_weights.platform, "machine", lambda: machine)
    assert not can_share()
    assert isinstance(weight_memory(OFFSETS, shared=True), PrivateWeights)


def test_without_memfd_weights_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert not can_share()
    assert isinstance(weight_memory(OFFSETS, shared=True), PrivateWeights)


@needs_sharing
def test_where_the_system_refuses_weights_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert isinstance(weight_memory(OFFSETS, shared=True), PrivateWeights)


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=needs_sharing)])
def test_both_kinds_of_memory_have_the_same_arrays(shared: bool) -> None:
    memory = weight_memory(OFFSETS, shared=shared)
    assert isinstance(memory, SharedWeights if shared else PrivateWeights)
    assert (memory.weights.dtype, memory.weights.tolist()) == (np.float32, [0.0] * 20)
    for versions in (memory.begun, memory.done):
        assert (versions.dtype, versions.tolist()) == (np.uint64, [0] * 4)
