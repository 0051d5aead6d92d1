"""Streams inside TLS: as without, and nobody is served who does not show a certificate."""

import datetime
import ipaddress
import ssl
import time
from pathlib import Path

import numpy as np
import pytest
from fake_plane import TARGET, FakePlane
from stream_cases import DEADLINE_S, HELLO, echo, serving, soon

from parashard.buffers import Buffers
from parashard.errors import MalformedFrame, Unreachable
from parashard.messages import PullRun, Push, Slice
from parashard.partition import Partition
from parashard.transports.base import Greeting, ShardAddress
from parashard.transports.stream import Kind, Stream, answer, greet
from parashard.transports.tcp import TcpTransport
from ps_server.rooms import Rooms
from ps_server.tcp_service import TcpService

GREETING = Greeting(TARGET, "worker-0")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1 that is its own authority."""
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed: TLS IS NOT TESTED")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "shard")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "shard.pem"
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + certificate.public_bytes(encoding))
    return path


@pytest.fixture
def contexts(certificate) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the server's context and the client's; each asks the other for the certificate."""
    served, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    served.verify_mode = ssl.CERT_REQUIRED
    for context in (served, client):
        context.load_cert_chain(certificate)
        context.load_verify_locations(certificate)
    return served, client


def wrapped(stream: Stream, context: ssl.SSLContext) -> Stream:
    connection = stream._connection
    return Stream(
        context.wrap_socket(connection, server_hostname="127.0.0.1", do_handshake_on_connect=False), "shard:1"
    )


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
        assert answer(stream, Kind.WELCOME, deadline_s=soon())
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
        assert answer(stream, Kind.WELCOME, deadline_s=soon())
        stream.close()


def test_a_client_without_a_certificate_is_turned_away(contexts, certificate):
    stranger = ssl.create_default_context(cafile=str(certificate))
    with serving(lambda stream: pytest.fail("it was served"), tls=contexts[0]) as (_, connect):
        stream = wrapped(connect(), stranger)
        with pytest.raises(Unreachable):
            greet(stream, GREETING, deadline_s=soon())
        stream.close()


def test_a_client_that_does_not_know_the_server_goes_away(contexts):
    with serving(lambda stream: pytest.fail("it was served"), tls=contexts[0]) as (_, connect):
        stream = wrapped(connect(), ssl.create_default_context())
        with pytest.raises(Unreachable, match="certificate verify failed"):
            stream.handshake(deadline_s=soon())
        stream.close()


def test_a_client_that_says_nothing_is_dropped(contexts, monkeypatch):
    monkeypatch.setattr("ps_server.stream_server.HELLO_DEADLINE_S", 0.01)
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
    plane, pulled = FakePlane(3 << 18), np.full(3 << 18, -1, "<f4")
    gradient = np.arange(plane.weights.size, dtype="<f4")
    slices = (Slice(Partition("w", 0, gradient.size), 1),)
    with serving(TcpService(plane, Rooms(1 << 20)).serve, tls=contexts[0]) as (server, _):
        transport = TcpTransport(ShardAddress("", 7, data_address=server.address), GREETING, tls=contexts[1])
        push = Push(TARGET, "worker-0", 0, slices, False, None, Buffers([gradient]))
        assert transport.push(push, DEADLINE_S).result().version == 1
        pull = PullRun(TARGET, None, 0, 0, pulled.nbytes)
        assert transport.pull(pull, Buffers([pulled]), DEADLINE_S).result() == 1
        assert server.connections == 1
        transport.close()
    assert np.array_equal(pulled, gradient)
