"""Assemblies: a push of several chunks becomes whole or nothing, within a memory budget (P4)."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import MalformedFrame, QueueFull, UnknownAttempt
from parashard.protocol.messages import PushChunk, Target
from parashard_server.core.assembly import IDLE_ASSEMBLY_S, SUPERSEDED_S, Assemblies, Assembly
from parashard_server.serving.push_memory import PushMemory

TARGET = Target("run", "digest", 1, 0, 1)


def chunk(step: int, begin: int, payload: bytes, total: int, *, attempt: int = 1) -> PushChunk:
    return PushChunk(TARGET, "worker-0", step, attempt, begin, total, (), False, 7, payload)


def in_pieces(step: int, content: bytes, *cuts: int, attempt: int = 1) -> list[PushChunk]:
    bounds = [0, *cuts, len(content)]
    return [
        chunk(step, bounds[i], content[bounds[i] : bounds[i + 1]], len(content), attempt=attempt)
        for i in range(len(bounds) - 1)
    ]


def add_all(assemblies: Assemblies, chunks: list[PushChunk], now_s: float = 0.0) -> Assembly | None:
    whole = None
    for piece in chunks:
        whole = assemblies.add(piece, now_s)
    return whole


def test_one_chunk_is_whole_at_once() -> None:
    values = np.array([1.0, -2.0], "<f4")
    whole = Assemblies(PushMemory(100)).add(chunk(4, 0, values.tobytes(), 8), 0.0)
    assert whole is not None
    assert np.frombuffer(whole.content, "<f4").tolist() == [1.0, -2.0]
    assert (whole.step, whole.pulled_version, whole.skipped) == (4, 7, False)


def test_an_empty_push_is_whole_at_once() -> None:
    whole = Assemblies(PushMemory(1)).add(chunk(4, 0, b"", 0), 0.0)
    assert whole is not None
    assert whole.content == b""


def test_later_chunks_may_come_in_any_order_and_twice() -> None:
    first, second, third, fourth = in_pieces(0, bytes(range(40)), 8, 17, 32)
    assemblies = Assemblies(PushMemory(100))
    for piece in (first, fourth, second, fourth, first, second):
        assert assemblies.add(piece, 0.0) is None
    whole = assemblies.add(third, 0.0)
    assert whole is not None
    assert bytes(whole.content) == bytes(range(40))


def test_the_first_chunk_reserves_the_whole_push() -> None:  # P4
    assemblies = Assemblies(PushMemory(100))
    assemblies.add(chunk(0, 0, b"abcd", 60), 0.0)
    assert assemblies.held_bytes == 60


def test_over_the_budget_nothing_is_reserved() -> None:  # P4
    assemblies = Assemblies(PushMemory(100))
    assemblies.add(chunk(0, 0, b"abcd", 60), 0.0)
    with pytest.raises(QueueFull, match="pushes on their way hold 60 bytes; another 41 would pass 100"):
        assemblies.add(chunk(1, 0, b"abcd", 41), 0.0)
    assert (len(assemblies), assemblies.held_bytes, assemblies.memory.held_bytes_max) == (1, 60, 60)
    assemblies.add(chunk(2, 0, b"abcd", 40), 0.0)  # what fits is still admitted
    assert (len(assemblies), assemblies.held_bytes) == (2, 100)


def test_a_full_budget_does_not_stop_what_is_in_progress() -> None:
    first, second = in_pieces(0, bytes(100), 50)
    assemblies = Assemblies(PushMemory(100))
    assemblies.add(first, 0.0)
    with pytest.raises(QueueFull):
        assemblies.add(chunk(1, 0, b"abcd", 4), 0.0)
    assert assemblies.add(second, 0.0) is not None


def test_a_push_alone_is_admitted_however_large() -> None:
    assemblies = Assemblies(PushMemory(10))
    assert assemblies.add(chunk(0, 0, b"abcd", 5000), 0.0) is None
    assert assemblies.held_bytes == 5000


def test_a_push_that_the_machine_has_no_memory_for_takes_nothing_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # P14
    def refuse(size_bytes: int) -> bytearray:
        raise MemoryError

    assemblies = Assemblies(PushMemory(100))
    first, second = (dataclasses.replace(piece, peer="worker/a") for piece in in_pieces(0, bytes(100), 50))
    with monkeypatch.context() as machine:
        machine.setattr("parashard_server.core.assembly.bytearray", refuse, raising=False)
        with pytest.raises(QueueFull, match="no memory for a push of 100 bytes now"):
            assemblies.add(first, 0.0)
    assert (len(assemblies), assemblies.held_bytes, assemblies.memory.shares.of("worker/a")) == (0, 0, 0)
    assert add_all(assemblies, [first, second]) is not None, "later it has"


def test_dropping_a_step_frees_all_its_attempts() -> None:  # P4
    assemblies = Assemblies(PushMemory(100))
    for attempt in (1, 2):
        assemblies.add(chunk(0, 0, b"abcd", 20, attempt=attempt), 0.0)
    assemblies.add(chunk(1, 0, b"abcd", 30), 0.0)
    assemblies.drop_step(0)
    assert (len(assemblies), assemblies.held_bytes, assemblies.memory.held_bytes_max) == (1, 30, 70)
    with pytest.raises(UnknownAttempt, match="step 0: attempt 0x2 is not in progress"):
        assemblies.add(chunk(0, 4, b"efgh", 20, attempt=2), 0.0)


def test_an_assembly_expires_when_no_chunk_touches_it() -> None:  # P4
    first, second, third = in_pieces(0, bytes(12), 4, 8)
    assemblies = Assemblies(PushMemory(100))
    assemblies.add(first, 0.0)
    assemblies.add(second, IDLE_ASSEMBLY_S)
    assemblies.expire(2 * IDLE_ASSEMBLY_S)
    assert len(assemblies) == 1  # touched just in time
    assemblies.expire(2 * IDLE_ASSEMBLY_S + 0.1)
    assert (len(assemblies), assemblies.held_bytes) == (0, 0)
    with pytest.raises(UnknownAttempt):
        assemblies.add(third, 2 * IDLE_ASSEMBLY_S + 0.1)


def test_expired_memory_goes_to_the_next_push() -> None:
    assemblies = Assemblies(PushMemory(100))
    assemblies.add(chunk(0, 0, b"abcd", 100), 0.0)
    with pytest.raises(QueueFull):
        assemblies.add(chunk(1, 0, b"abcd", 100), IDLE_ASSEMBLY_S)
    assemblies.add(chunk(1, 0, b"abcd", 100), IDLE_ASSEMBLY_S + 0.1)
    assert (len(assemblies), assemblies.held_bytes) == (1, 100)


def test_a_later_chunk_of_an_unknown_attempt_opens_nothing() -> None:  # P4
    assemblies = Assemblies(PushMemory(100))
    with pytest.raises(UnknownAttempt):
        assemblies.add(chunk(0, 4, b"abcd", 8), 0.0)
    assert (len(assemblies), assemblies.held_bytes) == (0, 0)


@pytest.mark.parametrize(
    "misfit",
    [
        chunk(0, 8, bytes(5), 12),  # runs over the end
        chunk(0, 16, b"", 12),  # begins after the end
        chunk(0, 4, bytes(4), 16),  # declares another length
    ],
)
def test_a_chunk_that_does_not_fit_changes_nothing(misfit: PushChunk) -> None:
    first, second, third = in_pieces(0, bytes(range(12)), 4, 8)
    assemblies = Assemblies(PushMemory(100))
    assemblies.add(first, 0.0)
    with pytest.raises(MalformedFrame, match="do not fit into a push of 12 bytes"):
        assemblies.add(misfit, 0.0)
    whole = add_all(assemblies, [second, third])
    assert whole is not None
    assert bytes(whole.content) == bytes(range(12))


def test_a_first_chunk_that_does_not_fit_reserves_nothing() -> None:  # P4, P14
    assemblies = Assemblies(PushMemory(100))
    with pytest.raises(MalformedFrame):
        assemblies.add(chunk(0, 0, bytes(12), 8), 0.0)
    assert (len(assemblies), assemblies.held_bytes) == (0, 0)


@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 24), min_size=1, max_size=4),
)
def test_attempts_never_mix_however_their_chunks_interleave(data: st.DataObject, sizes: list[int]) -> None:  # P4
    assemblies, arriving = Assemblies(PushMemory(1 << 20)), []
    for attempt, size in enumerate(sizes, start=1):  # each attempt at the one step has bytes of its own
        cuts = data.draw(st.lists(st.integers(0, size), max_size=4).map(sorted))
        pieces = in_pieces(0, bytes([attempt]) * size, *cuts, attempt=attempt)
        arriving.append([pieces[0], *data.draw(st.permutations(pieces[1:] + pieces[1:]))])
    done = set()
    while any(arriving):
        turn = data.draw(st.sampled_from([i for i, pieces in enumerate(arriving) if pieces]))
        piece = arriving[turn].pop(0)
        whole = assemblies.add(piece, 0.0)
        assert assemblies.held_bytes == sum(sizes[a.attempt - 1] for a in assemblies._open.values())
        if whole is not None:
            assert set(whole.content) <= {piece.attempt}
            done.add(piece.attempt)
    assert done == set(range(1, len(sizes) + 1))
    assemblies.drop_step(0)
    assert (len(assemblies), assemblies.held_bytes) == (0, 0)


def test_two_steps_with_the_same_attempt_id_are_two_pushes() -> None:
    assemblies = Assemblies(PushMemory(100))
    first = in_pieces(0, bytes(8), 4)
    twin = [dataclasses.replace(piece, step=1, payload=b"\x01" * 4) for piece in first]
    add_all(assemblies, [first[0], twin[0]])
    for pieces, content in ((first, bytes(8)), (twin, b"\x01" * 8)):
        whole = assemblies.add(pieces[1], 0.0)
        assert whole is not None
        assert bytes(whole.content) == content


def test_an_attempt_that_was_given_up_makes_room_for_the_next_attempt_at_its_step_only() -> None:  # P4
    assemblies, other = Assemblies(PushMemory(10)), in_pieces(1, bytes(8), 4)[0]
    assemblies.add(in_pieces(0, bytes(8), 4)[0], 0.0)
    with pytest.raises(QueueFull):
        assemblies.add(in_pieces(0, bytes(8), 4, attempt=2)[0], SUPERSEDED_S)  # its chunks may still be under way
    with pytest.raises(QueueFull):
        assemblies.add(dataclasses.replace(other, step=1), SUPERSEDED_S + 0.1)
    assemblies.add(in_pieces(0, bytes(8), 4, attempt=2)[0], SUPERSEDED_S + 0.1)
    assert (len(assemblies), assemblies.held_bytes) == (1, 8)


def test_a_peer_that_begins_pushes_and_does_not_end_them_leaves_room_to_others() -> None:
    assemblies = Assemblies(PushMemory(160))
    assemblies.add(dataclasses.replace(chunk(0, 0, b"abcd", 10), peer="worker/other"), 0.0)
    for step in range(1, 12):
        assemblies.add(dataclasses.replace(chunk(step, 0, b"abcd", 10), peer="worker/hog"), 0.0)
    with pytest.raises(QueueFull, match="another 10 would pass the share of one peer in 160"):
        assemblies.add(dataclasses.replace(chunk(12, 0, b"abcd", 10), peer="worker/hog"), 0.0)
    assemblies.add(dataclasses.replace(chunk(13, 0, b"abcd", 10), peer="worker/other"), 0.0)
    assert (assemblies.memory.shares.of("worker/hog"), assemblies.memory.shares.of("worker/other")) == (110, 20)
    assemblies.drop_step(1)
    assert assemblies.memory.shares.of("worker/hog") == 100
