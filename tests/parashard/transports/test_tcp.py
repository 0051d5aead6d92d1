"""TcpTransport: what it says, and that it believes nothing a shard says before checking it."""

import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest

from parashard._proto import tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame, NotReady, StaleRound, Unreachable
from parashard.plan.partition import Partition
from parashard.protocol.messages import Ack, Buffers, PullRun, Push, PushResult, Slice
from parashard.transports import tcp
from parashard.transports.base import ShardAddress
from parashard.transports.stream import Kind, Stream, refusal
from parashard.transports.tcp import TcpTransport, dial
from support.fake_plane import GREETING, TARGET
from support.stream_peer import DEADLINE_S, deadlines_passed, peer, raw, soon

ACK = tensor_pb2.PushReply(result=tensor_pb2.PUSH_RESULT_APPLIED, version=3)
SLICES = (Slice(Partition("w", 0, 4), 1),)


def push_of(*pieces: bytes) -> Push:
    return Push(TARGET, "worker-0", 5, SLICES, False, 2, Buffers(pieces))


def pull_of(length_bytes: int, offset_bytes: int = 0, known_version: int | None = None) -> PullRun:
    return PullRun(TARGET, None, 5, offset_bytes, length_bytes, known_version)


def transport_to(address: str) -> TcpTransport:
    return TcpTransport(ShardAddress("grpc:1", 7, data_address=address), GREETING)


def weights(version: int, *runs: tuple[int, int]) -> tensor_pb2.PullReply:
    return tensor_pb2.PullReply(version=version, run_offsets=[r[0] for r in runs], run_lengths=[r[1] for r in runs])


def answering(*answers: tuple[tensor_pb2.PullReply, bytes]) -> Callable[[Stream], None]:
    """Return a script that answers one pull."""

    def script(stream: Stream) -> None:
        assert stream.receive(deadline_s=soon()).kind is Kind.PULL
        for number, (header, payload) in enumerate(answers, 1):
            header.last = number == len(answers)
            stream.send(Kind.WEIGHTS, header, [memoryview(payload)], deadline_s=soon())
        leaves(stream)

    return script


def leaves(stream: Stream) -> None:
    """Wait until the client has closed: the script says no more."""
    with pytest.raises(Unreachable):
        stream.receive(deadline_s=soon())


def pulled(run: PullRun, *answers: tuple[tensor_pb2.PullReply, bytes]) -> tuple[int, bytes]:
    """Return the version and the bytes that a pull ends with, where there were dots before."""
    first, second = bytearray(b"." * (run.length_bytes // 2)), bytearray(b"." * -(-run.length_bytes // 2))
    with peer(answering(*answers)) as address:
        transport = transport_to(address)
        try:
            version = transport.pull(run, Buffers([first, second]), DEADLINE_S).result().version
        finally:
            transport.close()
    return version, bytes(first + second)


class TestPush:
    """The gradient's pieces, end to end, and an ack."""

    def test_is_one_message(self):
        heard = {}

        def script(stream: Stream) -> None:
            head = stream.receive(deadline_s=soon())
            content = bytearray(head.payload_bytes)
            stream.receive_into([memoryview(content)], deadline_s=soon())
            heard.update(kind=head.kind, header=head.header, content=bytes(content))
            stream.send(Kind.ACK, ACK, deadline_s=soon())
            leaves(stream)

        with peer(script) as address:
            transport = transport_to(address)
            ack = transport.push(push_of(b"abcdefgh", b"ijklmnop"), DEADLINE_S).result()
            transport.close()
        assert ack == Ack(PushResult.APPLIED, 3, None)
        assert (heard["kind"], heard["content"]) == (Kind.PUSH, b"abcdefghijklmnop")
        header = heard["header"]
        assert (header.step, header.total_bytes, header.pulled_version, len(header.slices)) == (5, 16, 2, 1)

    def test_longer_than_the_shard_takes_is_not_sent(self):
        with peer(leaves, push_bytes_max=15) as address:
            transport = transport_to(address)
            with pytest.raises(LimitExceeded, match="a push of 16 bytes; the shard takes 15"):
                transport.push(push_of(b"abcdefghijklmnop"), DEADLINE_S).result()
            transport.close()

    def test_begins_before_it_is_waited_for(self):
        def script(stream: Stream) -> None:
            stream.skip(stream.receive(deadline_s=soon()).payload_bytes, deadline_s=soon())
            stream.send(Kind.ACK, ACK, deadline_s=soon())
            leaves(stream)

        with peer(script) as first, peer(script) as second:
            transports = [transport_to(first), transport_to(second)]
            pending = [transport.push(push_of(b"abcd"), DEADLINE_S) for transport in transports]
            assert [p.result().version for p in reversed(pending)] == [3, 3]
            for transport in transports:
                transport.close()


class TestPull:
    """Weights land in their places; the version is the lowest that was said."""

    def test_of_several_runs_and_messages(self):
        answers = [(weights(9, (100, 3), (104, 2)), b"abcfg"), (weights(7, (106, 4)), b"hijk"), (weights(8), b"")]
        assert pulled(pull_of(10, 100, known_version=4), *answers) == (7, b"abc.fghijk")

    def test_of_what_has_not_moved(self):
        assert pulled(pull_of(10, known_version=4), (weights(4), b"")) == (4, b"..........")

    def test_of_nothing(self):
        assert pulled(pull_of(0), (weights(4), b"")) == (4, b"")

    @pytest.mark.parametrize(
        ("answers", "text"),
        [
            ([(weights(1, (4, 7)), b"abcdefg")], r"asked for bytes \[0, 10\), answered with \[4, 11\)"),
            ([(weights(1, (2**64 - 1, 1)), b"a")], "answered with"),
            ([(weights(1, (0, 4), (3, 1)), b"abcde")], "answered with"),
            ([(weights(1, (0, 4)), b"abcd"), (weights(1, (3, 1)), b"e")], "answered with"),
            ([(weights(1, (0, 4)), b"abcde")], "runs of 4 bytes in a payload of 5"),
            ([(weights(1, (0, 4)), b"abc")], "runs of 4 bytes in a payload of 3"),
            ([(weights(1), b"abc")], "runs of 0 bytes in a payload of 3"),
            ([(tensor_pb2.PullReply(run_offsets=[0]), b"")], "1 runs begin and 0 have a length"),
            ([(weights(1, (0, 4)), b"abcd"), (weights(1), b"")], "asked for 10 bytes, answered with 4"),
        ],
    )
    def test_lies_are_found_before_a_byte_is_written_where_it_does_not_belong(self, answers, text):
        with pytest.raises(MalformedFrame, match=text):
            pulled(pull_of(10), *answers)

    def test_an_answer_of_100_gib_takes_no_memory(self):
        def script(stream: Stream) -> None:
            stream.receive(deadline_s=soon())
            stream._connection.sendall(raw(Kind.WEIGHTS, weights(1, (0, 100 << 30)).SerializeToString(), 100 << 30))
            leaves(stream)

        with peer(script) as address:
            transport = transport_to(address)
            with pytest.raises(MalformedFrame, match="answered with"):
                transport.pull(pull_of(10), Buffers([bytearray(10)]), DEADLINE_S).result()
            transport.close()

    def test_that_is_refused_in_the_middle_leaves_the_connection_usable(self):
        def script(stream: Stream) -> None:
            stream.receive(deadline_s=soon())
            stream.send(Kind.WEIGHTS, weights(1, (0, 4)), [memoryview(b"abcd")], deadline_s=soon())
            stream.send(Kind.REFUSAL, refusal(StaleRound("round 3 is over")), deadline_s=soon())
            answering((weights(2, (0, 10)), b"klmnopqrst"), (weights(2), b""))(stream)

        with peer(script) as address:  # which takes one connection only
            transport = transport_to(address)
            with pytest.raises(StaleRound, match="round 3 is over") as caught:
                transport.pull(pull_of(10), Buffers([bytearray(10)]), DEADLINE_S).result()
            assert caught.value.peer == address
            into = bytearray(10)
            assert transport.pull(pull_of(10), Buffers([into]), DEADLINE_S).result().version == 2
            assert into == b"klmnopqrst"
            transport.close()


class TestFailures:
    """Whatever fails is said by `result`, within the deadline; what comes next gets a fresh connection."""

    def test_without_a_listener(self):
        with peer() as address:
            pass
        transport = transport_to(address)
        with pytest.raises(Unreachable, match="no answer") as caught:
            transport.push(push_of(b"abcd"), DEADLINE_S).result()
        assert caught.value.peer == address

    def test_a_peer_that_disconnects_before_its_answer_is_unreachable(self, monkeypatch):  # as where a link is cut
        def dialled(host: str, port: int, deadline_s: float) -> socket.socket:
            connection = dial(host, port, deadline_s)
            accepted, _ = listening.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()  # with a reset
            waiting = select.poll()
            waiting.register(connection, 0)
            assert waiting.poll(DEADLINE_S * 1000)
            return connection

        monkeypatch.setattr(tcp, "dial", dialled)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            transport = transport_to(f"127.0.0.1:{listening.getsockname()[1]}")
            with pytest.raises(Unreachable, match="the peer disconnected"):
                transport.push(push_of(b"abcd"), DEADLINE_S).result()

    def test_greeting_opens_a_connection_once(self):
        with peer(leaves) as address:
            transport = transport_to(address)
            transport.greet(DEADLINE_S)
            transport.greet(DEADLINE_S)  # needs no second connection
            transport.close()
        with pytest.raises(Unreachable):
            transport.greet(DEADLINE_S)

    @pytest.mark.parametrize("silent", [True, False])
    def test_a_shard_that_does_not_answer_or_dies_is_left_for_a_new_connection(self, silent):
        asked, given_up = threading.Event(), threading.Event()

        def script(stream: Stream) -> None:
            stream.receive(deadline_s=soon())
            asked.set()
            if silent:
                assert given_up.wait(DEADLINE_S)

        with peer(script, answering((weights(2, (0, 4)), b"abcd"), (weights(2), b""))) as address:
            transport = transport_to(address)
            transport.greet(DEADLINE_S)
            pending = transport.pull(pull_of(4), Buffers([bytearray(4)]), DEADLINE_S)
            assert asked.wait(DEADLINE_S)
            with deadlines_passed() if silent else nullcontext(), pytest.raises(Unreachable):
                pending.result()
            given_up.set()
            assert transport.pull(pull_of(4), Buffers([bytearray(4)]), DEADLINE_S).result().version == 2
            transport.close()

    def test_a_shard_that_never_reads(self):
        given_up = threading.Event()

        def script(stream: Stream) -> None:
            with suppress(Unreachable):  # the time may be over before a byte has left
                stream.receive(deadline_s=soon())
            assert given_up.wait(DEADLINE_S)

        with peer(script) as address:
            transport = transport_to(address)
            transport.greet(DEADLINE_S)
            with pytest.raises(Unreachable, match="send before the deadline"):
                transport.push(push_of(bytes(16 << 20)), 0.02).result()
            given_up.set()
            transport.close()

    def test_cancelling_and_closing_end_requests_under_way(self):
        def script(stream: Stream) -> None:
            stream.receive(deadline_s=soon())
            leaves(stream)

        with peer(script, script) as address:
            transport = transport_to(address)
            cancelled = transport.pull(pull_of(4), Buffers([bytearray(4)]), DEADLINE_S)
            closed = transport.pull(pull_of(4), Buffers([bytearray(4)]), DEADLINE_S)
            cancelled.cancel()
            transport.close()
            for pending in (cancelled, closed):
                with pytest.raises(Unreachable):
                    pending.result()

    def test_a_shard_that_is_starting_says_so(self):
        def script(stream: Stream) -> None:
            stream.receive(deadline_s=soon())
            stream.send(Kind.REFUSAL, refusal(NotReady("shard 0 is stopping")), deadline_s=soon())
            leaves(stream)

        with peer(script) as address:
            transport = transport_to(address)
            with pytest.raises(NotReady, match="shard 0 is stopping"):
                transport.pull(pull_of(4), Buffers([bytearray(4)]), DEADLINE_S).result()
            transport.close()
