"""TcpService: what a shard answers over TCP to clients that keep to the protocol."""

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from parashard._proto import tensor_pb2
from parashard.errors import (
    MalformedFrame,
    NonFiniteGradient,
    NotReady,
    PeerFailed,
    QueueFull,
    ShapeMismatch,
    StaleIncarnation,
    StaleRound,
    Unreachable,
)
from parashard.plan.partition import Partition
from parashard.protocol import wire
from parashard.protocol.messages import Ack, Push, PushResult, Slice, Target
from parashard.transports.base import Greeting
from parashard.transports.stream import Kind, greet
from parashard_server.serving import stream_services
from support.fake_plane import GREETING, TARGET, refusing
from support.stream_cases import DEADLINE_S, soon
from support.tcp_cases import ELEMENTS, Served, pull_of, push_of, ramp, shard


@pytest.fixture
def served() -> Iterator[Served]:
    with shard() as served:
        yield served


class TestPushAndPull:
    """A gradient there, weights back."""

    def test_what_was_pushed_is_pulled(self, served):
        assert served.push(push_of(ramp())) == Ack(PushResult.APPLIED, 1, None)
        version, values = served.pull(pull_of())
        assert (version, values.tolist()) == (1, ramp().tolist())

    def test_an_empty_push_and_an_empty_pull(self, served):
        assert served.push(push_of(ramp(0))).version == 1
        assert served.pull(pull_of(0))[0] == 1

    def test_a_shard_without_elements(self):
        with shard(0) as served:
            assert served.push(push_of(ramp(0))).version == 1
            assert served.pull(pull_of(0))[0] == 1

    def test_the_shard_sees_the_whole_push_where_it_was_received(self, served):  # P4
        served.push(push_of(ramp()))
        [push] = served.plane.pushes
        assert (push.step, push.payload.nbytes) == (3, 4 * ELEMENTS)
        assert push.slices == (Slice(Partition("w", 0, ELEMENTS), 1),)
        assert served.memory.held_bytes == 0

    def test_a_part_of_the_weights(self, served):
        served.push(push_of(ramp()))
        assert served.pull(pull_of(40, offset_bytes=400))[1].tolist() == list(range(100, 110))

    def test_a_long_pull_is_read_in_several_turns_of_the_owner(self, served, monkeypatch):
        monkeypatch.setattr(stream_services, "PIECE_BYTES", 1024)
        served.push(push_of(ramp()))
        _, values = served.pull(pull_of())
        assert values.tolist() == ramp().tolist()
        assert [(run.offset_bytes, run.length_bytes) for run in served.plane.pulls] == [
            (0, 1024),
            (1024, 1024),
            (2048, 1024),
            (3072, 928),
        ]

    def test_a_pull_of_what_has_moved(self, monkeypatch):
        monkeypatch.setattr(stream_services, "PIECE_BYTES", 1024)
        with shard(2, 4, 6, 255, 257, 999, ELEMENTS) as served:
            served.push(push_of(ramp()))
            served.plane.move(ramp(), 0, 2, 4, 6)
            _, values = served.pull(pull_of(known_version=1))
        came = {0, 1, 4, 5, 255, 256, 999}
        assert values.tolist() == [i if i in came else -1 for i in range(ELEMENTS)]
        assert {run.known_version for run in served.plane.pulls} == {1}

    def test_the_version_of_a_pull_is_the_lowest_of_its_pieces(self, served, monkeypatch):
        monkeypatch.setattr(stream_services, "PIECE_BYTES", 1024)

        def move(request: object) -> None:
            served.plane.version += 1

        served.plane.before = move
        assert served.pull(pull_of())[0] == 1
        assert served.pull(pull_of(known_version=4))[0] == 5  # nothing moved, and nothing came

    def test_several_clients_at_once(self, served):
        with ThreadPoolExecutor(4) as pool:
            versions = [r.version for r in pool.map(lambda _: served.push(push_of(ramp())), range(40))]
        assert len(versions) == 40
        assert served.memory.held_bytes == 0


ERRORS = [StaleRound("round 3 is over"), NonFiniteGradient("step 3"), QueueFull("busy"), NotReady("stopping")]


class TestErrorsOfTheShard:
    """Come back as themselves, and the connection goes on."""

    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
    def test_of_a_push(self, served, error):
        served.transport.greet(DEADLINE_S)
        served.plane.before = refusing(error)
        with pytest.raises(type(error), match=error.message):
            served.push(push_of(ramp()))
        self.goes_on(served)

    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
    def test_of_a_pull(self, served, error):
        served.transport.greet(DEADLINE_S)
        served.plane.before = refusing(error)
        with pytest.raises(type(error), match=error.message):
            served.pull(pull_of())
        self.goes_on(served)

    def test_in_the_middle_of_a_pull(self, served, monkeypatch):
        served.transport.greet(DEADLINE_S)
        monkeypatch.setattr(stream_services, "PIECE_BYTES", 1024)
        with pytest.raises(ShapeMismatch, match=r"bytes \[3072, 4096\) are not within 4000"):
            served.pull(pull_of(8000))
        self.goes_on(served)

    def test_of_a_slice_that_cannot_be(self, served):
        served.transport.greet(DEADLINE_S)
        push = push_of(ramp())
        with pytest.raises(MalformedFrame, match=r"has the rows \[4, 4\)"):
            served.push(Push(TARGET, "w", 3, (Slice(Partition("w", 4, 4), 1),), False, None, push.payload))
        self.goes_on(served)

    def test_a_push_that_finds_no_room_is_skipped(self):  # P19
        with shard(budget_bytes=1) as served, served.memory.buffer(1):
            with pytest.raises(QueueFull, match="another 65536 would pass 1"):
                served.push(push_of(ramp()))
            assert served.plane.pushes == []
            assert served.pull(pull_of())[0] == 0

    def test_a_push_whose_bytes_do_not_come_gives_its_memory_back(self, served, monkeypatch):  # P19
        monkeypatch.setattr(stream_services, "PAYLOAD_DEADLINE_S", 0.01)
        stream = served.greeted()
        header = tensor_pb2.PushHeader(target=wire.target_message(TARGET), worker="w", total_bytes=4 * ELEMENTS)
        content = header.SerializeToString()
        stream._connection.sendall(
            struct.pack("<4sB3sIQ", b"PSS1", Kind.PUSH, b"", len(content), 4 * ELEMENTS) + content
        )
        with pytest.raises(Unreachable, match="closed"):
            stream.receive(deadline_s=soon())
        assert (served.plane.pushes, served.memory.held_bytes) == ([], 0)

    def test_a_bug_is_reported_and_ends_the_connection(self, served):
        served.plane.before = lambda request: 1 // 0
        with pytest.raises(PeerFailed, match="ZeroDivisionError"):
            served.push(push_of(ramp()))
        served.plane.before = lambda request: None
        assert served.memory.held_bytes == 0

    @staticmethod
    def goes_on(served: Served) -> None:
        """Push and pull on the connection that there is: no other can be made."""
        assert served.memory.held_bytes == 0
        served.transport._connections._limit = 1
        (connection,) = served.transport._connections._free
        served.push(push_of(ramp()))
        assert served.pull(pull_of())[1].tolist() == ramp().tolist()
        assert served.transport._connections._free == [connection]


class TestHello:
    """Nothing is said before it, and it names the incarnation that is meant."""

    def test_to_another_incarnation_is_refused(self, served):  # P3
        stream = served.connect()
        with pytest.raises(StaleIncarnation, match="names incarnation 8; this is 7"):
            greet(stream, Greeting(Target("run", "digest", 1, 0, 8), "w"), deadline_s=soon())

    def test_says_how_long_a_push_may_be(self, served):
        stream = served.connect()
        welcome, _ = greet(stream, GREETING, deadline_s=soon())
        assert welcome.push_bytes_max == 4 * ELEMENTS

    def test_does_not_speak_for_the_requests_after_it(self, served):  # P3
        other = Target("run", "digest", 1, 0, 8)
        with pytest.raises(StaleIncarnation):
            served.push(push_of(ramp(), other))
        with pytest.raises(StaleIncarnation):
            served.pull(pull_of(target=other))

    def test_that_does_not_come_ends_the_connection(self, served, monkeypatch):
        monkeypatch.setattr(stream_services, "HELLO_DEADLINE_S", 0.01)
        with pytest.raises(Unreachable, match="closed"):
            served.connect().receive(deadline_s=soon())
