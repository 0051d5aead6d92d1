"""Conformance: what every transport must do. A new one joins `transport_peers.PEERS` and passes, or is none.

Here: what is sent arrives. `test_conformance_failures` has the rest.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from parashard.client.shard_client import ShardClient
from parashard.plan.partition import Partition, Plan
from parashard.plan.variables import Variable
from parashard.protocol.messages import Ack, Buffers, DType, Fetched, PushResult, Slice
from parashard.transports.base import Transport, View
from support.conformance_cases import DEADLINE_S, ELEMENTS, METHODS, OFFSETS, pull_of, push_of
from support.fake_plane import GREETING, TARGET
from support.tiers import by_tier

MIB = 1 << 20


def in_pieces(array: np.ndarray, *cuts: int) -> list[np.ndarray]:
    return np.split(array.reshape(-1).view(np.uint8), cuts)


# --- what is sent arrives ---


@pytest.mark.parametrize("size", [0, 4, 4 * MIB - 4, 4 * MIB, 4 * MIB + 4, by_tier(quick=16, full=64) * MIB])
def test_any_size_arrives_as_it_was(start, size):
    talk = start([0, size // 8, max(1, size // 4)])
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    ack = talk.transport.push(push_of(*in_pieces(content, size // 3)), DEADLINE_S).result()
    assert ack == Ack(PushResult.APPLIED, 1, 5)
    [taken] = talk.plane.pushes
    assert np.array_equal(np.frombuffer(taken.payload.whole(), np.uint8), content)
    talk.plane.memory.weights.view(np.uint8)[:size] = content
    into = np.empty(size, np.uint8)
    assert talk.transport.pull(pull_of(0, size), Buffers(in_pieces(into, size // 2)), DEADLINE_S).result().version == 0
    assert np.array_equal(into, content)


@pytest.mark.full("a gigabyte of memory; test_any_size_arrives_as_it_was goes up to 16 MiB")
@pytest.mark.parametrize("kind", ["grpc", "tcp", "shm"], indirect=True)
def test_256_mib_arrive_as_they_were(start):
    size = 256 * MIB
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 7 * size:
        pytest.skip("this machine has too little memory now")
    talk = start([0, size // 4])
    content = np.arange(size // 4, dtype=np.uint32)
    talk.transport.push(push_of(content), DEADLINE_S).result()
    talk.plane.memory.weights.view(np.uint32)[:] = content
    into = np.empty_like(content)
    talk.transport.pull(pull_of(0, size), Buffers([into.data]), DEADLINE_S).result()
    [taken] = talk.plane.pushes
    assert np.array_equal(np.frombuffer(taken.payload.whole(), np.uint32), content)
    assert np.array_equal(into, content)


@pytest.mark.parametrize("size", [1, 5, 4097])
def test_a_push_need_not_be_a_number_of_floats(talk, size):
    content = np.arange(size, dtype=np.uint8)
    talk.transport.push(push_of(content), DEADLINE_S).result()
    [taken] = talk.plane.pushes
    assert taken.payload.whole() == content.tobytes()


@pytest.mark.parametrize("dtype", DType)
def test_every_encoding_is_reported_with_its_slices(talk, dtype):
    kept = 7 if dtype is DType.TOPK else 0
    slices = (Slice(Partition("a", 2, 9), 30, dtype, kept), Slice(Partition("b", 0, 1), 1))
    content = np.arange(sum(piece.size_bytes for piece in slices), dtype=np.uint8)
    talk.transport.push(push_of(content, slices=slices)._replace(skipped=True), DEADLINE_S).result()
    [taken] = talk.plane.pushes
    assert taken.payload.whole() == content.tobytes()
    assert (taken.slices, taken.target, taken.worker, taken.step) == (slices, TARGET, "worker-0", 1)
    assert (taken.skipped, taken.pulled_version) == (True, 5)


def test_pieces_may_lie_anywhere_and_have_any_length(talk):
    content = np.random.default_rng(1).integers(0, 256, 4 * ELEMENTS, np.uint8)
    cuts = sorted(np.random.default_rng(2).integers(0, content.size, 40))
    pieces = [piece.copy() for piece in np.split(content, [0, *cuts, cuts[-1]])]  # some of them are empty
    talk.transport.push(push_of(*pieces), DEADLINE_S).result()
    assert talk.plane.pushes[0].payload.whole() == content.tobytes()
    talk.plane.memory.weights.view(np.uint8)[:] = content
    begin, end = 4 * 7, 4 * (ELEMENTS - 5)
    into = [np.zeros_like(piece) for piece in np.split(content[begin:end], cuts[:-5])]
    talk.transport.pull(pull_of(begin, end), Buffers([piece.data for piece in into]), DEADLINE_S).result()
    assert np.array_equal(np.concatenate(into), content[begin:end])


def test_a_gradient_is_only_read(talk):
    content = np.arange(16, dtype=np.float32)
    content.flags.writeable = False
    talk.transport.push(push_of(content), DEADLINE_S).result()
    assert talk.plane.pushes[0].payload.whole() == content.tobytes()


SQUARE = np.arange(24).reshape(4, 6)
GRADIENTS = {
    "float64": SQUARE / 7,
    "float16": (SQUARE / 8).astype(np.float16),
    "int64": SQUARE - 12,
    "uint8": SQUARE.astype(np.uint8),
    "bool": SQUARE % 3 == 0,
    "big-endian": SQUARE.astype(">f4"),
    "negative strides": SQUARE.astype(np.float32)[::-1, ::-1],
    "every other": np.arange(96, dtype=np.float32).reshape(8, 12)[::2, ::2],
    "fortran": np.asfortranarray(SQUARE, np.float32),
    "transposed": SQUARE.astype(np.float32).reshape(6, 4).T,
    "broadcast scalar": np.broadcast_to(np.float32(2.5), (4, 6)),
    "broadcast row": np.broadcast_to(np.arange(6, dtype=np.float32), (4, 6)),
    "read-only": np.frombuffer(SQUARE.astype(np.float32).tobytes(), np.float32).reshape(4, 6),
    "unaligned": np.frombuffer(b"." + SQUARE.astype(np.float32).tobytes(), np.float32, offset=1).reshape(4, 6),
}


@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_any_type_and_strides_arrive_as_float32_by_row(start, gradient):
    talk = start([0, 12, 24])
    plan = Plan(1, {"w": Variable("w", (4, 6))}, ((Partition("w", 0, 2), Partition("w", 2, 4)),))
    client = ShardClient("run", "digest", plan, "worker-0", connect=talk.peer.connect)
    client.use(View(1, (talk.peer.where,)))
    try:
        client.push(3, {"w": gradient}, None)
        talk.plane.memory.weights[:] = gradient.reshape(-1)
        pulled = client.pull().variables["w"]
    finally:
        client.close()
    expected = np.array(gradient, np.float32, order="C")
    [taken] = talk.plane.pushes
    assert taken.payload.whole() == expected.tobytes()
    assert [piece.partition for piece in taken.slices] == list(plan.shards[0])
    assert pulled.tobytes() == expected.tobytes()


def test_a_pull_says_which_version_it_needs_and_its_answer_how_long_that_took(talk):
    talk.plane.answered = lambda weights: weights._replace(waited_s=0.25)
    into = np.empty(ELEMENTS, np.float32)
    assert talk.begin("pull", into, least_version=7).result() == Fetched(0, 0.25)
    assert {run.least_version for run in talk.plane.pulls} == {7}


# --- what has not moved ---


def test_bytes_that_have_not_moved_are_left_as_they_are(talk):
    talk.plane.move(-1.0, 1)
    talk.plane.move(-2.0, 2)
    into = np.full(ELEMENTS, 9.0, np.float32)
    assert talk.begin("pull", into, known_version=2).result().version == 2
    assert (into == 9.0).all()
    assert talk.begin("pull", into, known_version=1).result().version == 2
    assert [into[begin] for begin in OFFSETS[:-1]] == [9.0, 9.0, -2.0]
    assert talk.begin("pull", into, known_version=0).result().version == 2
    assert [into[begin] for begin in OFFSETS[:-1]] == [9.0, -1.0, -2.0]
    assert (into[1001:] == -2.0).all()
    talk.begin("pull", into).result()
    assert np.array_equal(into, talk.plane.memory.weights)


def test_what_moves_while_it_is_pulled_is_no_older_than_the_version_that_is_told(start):
    parts, length = 8, 50_000
    talk = start(list(range(0, (parts + 1) * length, length)))
    over = threading.Event()

    def move() -> None:
        while not over.is_set():
            talk.plane.move(talk.plane.version + 1, talk.plane.version % parts)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        into, known = np.zeros((parts, length), np.float32), None
        for _ in range(20):
            version = talk.begin("pull", into.reshape(-1), known_version=known).result().version
            assert into.min(axis=1).min() > version - parts  # of the last `parts` moves one is each partition's
            known = version
    finally:
        over.set()
        mover.join(DEADLINE_S)
    talk.begin("pull", into.reshape(-1), known_version=known).result()
    assert np.array_equal(into.reshape(-1), talk.plane.memory.weights)  # and nothing that moved was missed


# --- many at once ---


def exchanged(transport: Transport, number: int) -> bool:
    """Push and pull values that no other exchange uses; return whether the answers belong to them."""
    ack = transport.push(push_of(np.full(1000, number, np.int32), step=number), DEADLINE_S).result()
    begin = 4 * (number % ELEMENTS)
    into = np.empty(4 * ELEMENTS - begin, np.uint8)
    transport.pull(pull_of(begin, 4 * ELEMENTS), Buffers([into]), DEADLINE_S).result()
    return ack.version == number and np.array_equal(into.view(np.float32), np.arange(begin // 4, ELEMENTS))


@pytest.mark.parametrize("shares_a_transport", [True, False])
def test_many_threads_and_many_workers_get_their_own_answers(talk, shares_a_transport):
    def work(worker: int) -> bool:
        transport = talk.transport if shares_a_transport else talk.peer.connect(talk.peer.where, GREETING)
        try:
            return all(exchanged(transport, 10 * worker + i) for i in range(10))
        finally:
            if not shares_a_transport:
                transport.close()

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(work, range(12)))
    taken = {push.step: push.payload.whole() for push in talk.plane.pushes}
    assert taken == {step: np.full(1000, step, np.int32).tobytes() for step in range(120)}


def test_requests_of_one_thread_may_overlap_and_end_in_any_order(talk):
    into = [np.empty(100 + i, np.float32) for i in range(4)]
    pulls = [talk.begin("pull", array) for array in into]
    pushes = [talk.begin("push", step=step) for step in range(4)]
    assert [pending.result().version for pending in reversed(pushes)] == [3, 2, 1, 0]
    assert [pending.result().version for pending in reversed(pulls)] == [0] * 4
    assert all(np.array_equal(array, np.arange(array.size)) for array in into)


@pytest.mark.parametrize("method", METHODS)
def test_a_request_under_way_does_not_hold_up_others(talk, method):
    talk.hold_up(step=7)
    slow = talk.begin(method, step=7)
    assert talk.held.wait(DEADLINE_S)
    for other in METHODS:
        talk.begin(other, step=8).result()
    talk.hold.set()
    slow.result()
