"""Streams inside TLS: as without, and a peer without a certificate is not served."""

import ssl
import time
from collections.abc import Callable

import numpy as np
import pytest

from parashard.errors import MalformedFrame, NotAllowed, Unreachable
from parashard.plan.partition import Partition
from parashard.protocol.messages import Buffers, PullRun, Push, Slice
from parashard.security.identity import PULL, PUSH, Role
from parashard.transports.base import ShardAddress
from parashard.transports.stream import Kind, Stream, greet, receive_answer
from parashard.transports.tcp import TcpTransport
from parashard_server.push_memory import PushMemory
from parashard_server.serving.stream_services import TcpService
from support.certificates import BAD, NONE, RIGHT, Certificates
from support.fake_plane import GREETING, TARGET, FakePlane
from support.stream_cases import DEADLINE_S, HELLO, echo, serving, soon

Contexts = tuple[Callable[[], ssl.SSLContext], ssl.SSLContext]


@pytest.fixture
def contexts(certificates: Certificates) -> Contexts:
    """Return a shard's contexts, and a worker's."""
    return certificates.of(Role.SHARD).server_context, certificates.of(Role.WORKER).client_context()


def wrapped(stream: Stream, context: ssl.SSLContext) -> Stream:
    return Stream(stream._connection, "shard:1", tls=context, server_name="127.0.0.1")


def test_messages_arrive_and_so_do_large_ones(contexts):
    content = bytes(range(256)) * 4096

    def serve(stream: Stream) -> None:
        received = bytearray(stream.receive(deadline_s=soon()).payload_bytes)
        stream.receive_into([memoryview(received)], deadline_s=soon())
        stream.send(Kind.WEIGHTS, HELLO, [memoryview(received)], deadline_s=soon())
        echo(stream)

    with serving(serve, tls=contexts[0]) as (_, connect):
        stream = wrapped(connect(), contexts[1])
        stream.handshake(deadline_s=soon())
        stream.send(Kind.PUSH, HELLO, [memoryview(content[:7]), memoryview(content[7:])], deadline_s=soon())
        returned = bytearray(stream.receive(deadline_s=soon()).payload_bytes)
        stream.receive_into([memoryview(returned)], deadline_s=soon())
        assert returned == content
        stream.send(Kind.HELLO, HELLO, deadline_s=soon())
        assert receive_answer(stream, Kind.WELCOME, deadline_s=soon())
        with pytest.raises(Unreachable, match="before the deadline"):
            stream.receive(deadline_s=time.monotonic() + 0.01)
        stream.close()


def test_what_is_read_ahead_is_not_waited_for(contexts):
    def serve(stream: Stream) -> None:
        stream.receive(deadline_s=soon())
        echo(stream)

    with serving(serve, tls=contexts[0]) as (_, connect):
        stream = wrapped(connect(), contexts[1])
        stream.handshake(deadline_s=soon())
        # Two messages in one record: with the first, the second leaves the socket, where a poll no longer sees it.
        stream._io.send([memoryview((b"PSS1\1" + bytes(15)) * 2)], soon(), ())
        assert receive_answer(stream, Kind.WELCOME, deadline_s=soon())
        stream.close()


def client_context(certificates: Certificates, role: Role, kind: str) -> ssl.SSLContext:
    """Return the context of a client whose certificate is of a kind; it trusts the server."""
    context = ssl.create_default_context(cafile=str(certificates.authority / "ca.pem"))
    if kind != NONE:
        folder = certificates.folder(role, kind)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


class TestWhoIsServed:
    """The same table as over gRPC: only a worker pushes and pulls."""

    @pytest.mark.parametrize("kind", BAD)
    @pytest.mark.parametrize("role", Role)
    def test_a_peer_with_any_other_certificate_is_not(self, certificates, contexts, role, kind):
        with serving(lambda stream: pytest.fail("served"), tls=contexts[0], calls=(PUSH, PULL)) as (_, connect):
            stream = wrapped(connect(), client_context(certificates, role, kind))
            with pytest.raises(Unreachable):
                greet(stream, GREETING, deadline_s=soon())
            stream.close()

    @pytest.mark.parametrize("role", [role for role in Role if role is not Role.WORKER])
    def test_a_peer_of_another_role_is_not_and_learns_why(self, certificates, contexts, role):
        with serving(lambda stream: pytest.fail("served"), tls=contexts[0], calls=(PUSH, PULL)) as (_, connect):
            stream = wrapped(connect(), client_context(certificates, role, RIGHT))
            with pytest.raises(NotAllowed, match=f"Push: the certificate's roles are {role}/{role}-0; allowed: worker"):
                greet(stream, GREETING, deadline_s=soon())
            stream.close()

    def test_a_worker_is(self, certificates, contexts):
        with serving(echo, tls=contexts[0], calls=(PUSH, PULL)) as (_, connect):
            stream = wrapped(connect(), client_context(certificates, Role.WORKER, RIGHT))
            assert greet(stream, GREETING, deadline_s=soon())
            stream.close()


def test_a_shard_that_shows_a_workers_certificate_is_left(certificates, contexts):
    as_server = certificates.of(Role.WORKER).server_context
    with serving(lambda stream: pytest.fail("served"), tls=as_server) as (_, connect):
        stream = wrapped(connect(), contexts[1])
        with pytest.raises(Unreachable, match="unsuitable certificate purpose"):
            stream.handshake(deadline_s=soon())
        stream.close()


@pytest.mark.parametrize("role", [Role.COORDINATOR, Role.SHARD])
def test_a_worker_rejects_a_server_with_the_name_and_without_the_role_of_a_shard(certificates, contexts, role):
    plane = FakePlane([0, 5])
    with serving(TcpService(plane, PushMemory(1 << 20)).serve, tls=certificates.of(role).server_context) as (
        server,
        _,
    ):
        transport = TcpTransport(ShardAddress("", 7, data_address=server.address), GREETING, tls=lambda: contexts[1])
        slices = (Slice(Partition("w", 0, 5), 1),)
        push = Push(TARGET, "worker-0", 0, slices, False, None, Buffers([plane.memory.weights]))
        if role is Role.SHARD:
            assert transport.push(push, DEADLINE_S).result().version == 1
        else:
            with pytest.raises(Unreachable, match=r"no shard: its certificate's roles are coordinator/coordinator-0"):
                transport.push(push, DEADLINE_S).result()
            assert plane.version == 0
        transport.close()


def test_a_client_that_does_not_know_the_server_goes_away(contexts):
    with serving(lambda stream: pytest.fail("it was served"), tls=contexts[0]) as (_, connect):
        stream = wrapped(connect(), ssl.create_default_context())
        with pytest.raises(Unreachable, match="certificate verify failed"):
            stream.handshake(deadline_s=soon())
        stream.close()


def test_no_session_can_be_resumed_so_that_an_expired_certificate_is_seen(contexts):
    def exchanged(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
        plain = connect()._connection
        with contexts[1].wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection:
            connection.sendall(b"PSS1\1" + bytes(15))
            assert connection.recv(4) == b"PSS1"  # a ticket would come with the answer
            return connection.session, bool(connection.session_reused)

    with serving(echo, tls=contexts[0]) as (_, connect):
        session, _ = exchanged(None)
        assert session is None or not session.has_ticket
        assert exchanged(session)[1] is False


def test_a_client_of_tls_1_2_is_refused_whatever_its_certificate(certificates, contexts):
    older = client_context(certificates, Role.WORKER, RIGHT)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(lambda stream: pytest.fail("it was served"), tls=contexts[0]) as (_, connect):
        stream = wrapped(connect(), older)
        with pytest.raises(Unreachable, match=r"(?i)protocol[ _]version"):
            stream.handshake(deadline_s=soon())
        stream.close()


def test_a_client_takes_no_server_of_tls_1_2(contexts):
    older = contexts[0]()
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(lambda stream: pytest.fail("it was served"), tls=lambda: older) as (_, connect):
        stream = wrapped(connect(), contexts[1])
        with pytest.raises(Unreachable, match=r"(?i)protocol[ _]version"):
            stream.handshake(deadline_s=soon())
        stream.close()


def test_a_client_that_says_nothing_is_dropped(contexts, monkeypatch):
    monkeypatch.setattr("parashard_server.serving.stream_server.HELLO_DEADLINE_S", 0.01)
    with (
        serving(lambda stream: pytest.fail("it was served"), tls=contexts[0]) as (_, connect),
        pytest.raises(Unreachable, match="closed"),
    ):
        connect().receive(deadline_s=soon())


def test_a_client_without_tls_is_turned_away(contexts):
    with serving(lambda stream: pytest.fail("it was served"), tls=contexts[0]) as (_, connect):
        stream = connect()
        stream.send(Kind.HELLO, HELLO, deadline_s=soon())
        with pytest.raises((Unreachable, MalformedFrame)):  # a TLS alert, or the end
            stream.receive(deadline_s=soon())


def test_pushes_and_pulls_of_any_size_travel_inside_tls(contexts):
    plane, pulled = FakePlane([0, 3 << 18]), np.full(3 << 18, -1, "<f4")
    gradient = np.arange(plane.memory.weights.size, dtype="<f4")
    slices = (Slice(Partition("w", 0, gradient.size), 1),)
    with serving(TcpService(plane, PushMemory(1 << 20)).serve, tls=contexts[0]) as (server, _):
        transport = TcpTransport(ShardAddress("", 7, data_address=server.address), GREETING, tls=lambda: contexts[1])
        push = Push(TARGET, "worker-0", 0, slices, False, None, Buffers([gradient]))
        assert transport.push(push, DEADLINE_S).result().version == 1
        pull = PullRun(TARGET, None, 0, 0, pulled.nbytes)
        assert transport.pull(pull, Buffers([pulled]), DEADLINE_S).result().version == 1
        assert server.connections == 1
        transport.close()
    assert np.array_equal(pulled, gradient)
