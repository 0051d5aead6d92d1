"""Over gRPC a certificate that has expired calls nothing: not on an open connection, nor by a resumed session."""

from __future__ import annotations

import itertools
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from parashard.errors import NotAllowed, NotReady
from parashard.protocol import rpc
from parashard.protocol.rpc import our_errors
from parashard.security.credentials import LOOK_S, Credentials
from parashard.security.grpc_tls import CERTIFICATE_KEY, CHAIN_KEY, URI_KEY, check_caller
from parashard.security.identity import PUSH, Role
from support.certificates import Certificates
from support.http2_frames import (
    DATA,
    DEADLINE_S,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    begun,
    frame,
    received,
    request_headers,
)
from support.unary_handlers import raw_handlers

NOW = datetime.now(UTC)
KEY = ec.generate_private_key(ec.SECP256R1())
SERVED = b"parashard-was-here"


class Served:
    """A shard over gRPC, whose clock the test moves."""

    def __init__(self, certificates: Certificates) -> None:
        self.now = datetime.now(UTC)
        self.server = rpc.Server("127.0.0.1:0", certificates.of(Role.SHARD), now=lambda: self.now)
        handlers = raw_handlers("parashard.v1.ShardData", {"Push": lambda request, context: SERVED})
        self.server.grpc.add_generic_rpc_handlers((handlers,))
        self.server.start()

    def close(self) -> None:
        self.server.stop(0.0)


@pytest.fixture
def served(certificates: Certificates) -> Iterator[Served]:
    served = Served(certificates)
    yield served
    served.close()


def test_a_call_on_an_open_connection_waits_for_a_new_certificate(served, certificates, tmp_path):
    looked_s = itertools.count(0, LOOK_S)  # each look is due
    certificates.renew(tmp_path, [Role.WORKER])
    worker = Credentials(tmp_path, clock=lambda: next(looked_s))
    with closing(rpc.connect(served.server.address, worker)) as channel:
        push = channel.unary_unary(PUSH)
        served.now = worker.current().expires
        assert push(b"", timeout=DEADLINE_S) == SERVED
        served.now += timedelta(seconds=1)
        with pytest.raises(NotReady, match=r"the caller's certificate expired at .* UTC; renew it"), our_errors("it"):
            push(b"", timeout=DEADLINE_S)
        certificates.renew(tmp_path, [Role.WORKER], valid_days=2)
        assert push(b"", timeout=DEADLINE_S) == SERVED


def test_a_resumed_session_brings_an_expired_certificate_no_further(served, certificates):
    context = certificates.of(Role.WORKER).client_context()
    context.set_alpn_protocols(["h2"])
    host, _, port = served.server.address.rpartition(":")

    def push(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, bytes]:
        with (
            socket.create_connection((host, int(port)), DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname=host, session=session) as connection,
        ):
            begun(connection)
            connection.sendall(frame(HEADERS, END_HEADERS, 1, request_headers(PUSH, "https")))
            connection.sendall(frame(DATA, END_STREAM, 1, bytes(5)))
            # What HPACK does not compress; the code of a refusal is in the trailers.
            content = received(connection, SERVED if session is None else b"not-ready")
            return connection.session, bool(connection.session_reused), content

    session, _, answer = push(None)
    assert SERVED in answer
    assert session is not None
    assert session.has_ticket, "gRPC gives tickets: were it not so, there would be nothing to refuse"
    served.now += timedelta(days=2)
    _, resumed, answer = push(session)
    assert resumed
    assert (SERVED in answer, b"not-ready" in answer) == (False, True)


class TestPath:
    """The first of a path to expire ends it all."""

    def call(self, *chain: bytes) -> None:
        shown = {URI_KEY: [b"parashard://worker/w"], CERTIFICATE_KEY: chain[:1], CHAIN_KEY: [b"".join(chain[1:])]}
        check_caller(PUSH, SimpleNamespace(auth_context=lambda: shown), NOW)

    def test_a_right_one_is_served(self):
        self.call(signed("worker", "middle", 1), signed("middle", "top", 1))

    @pytest.mark.parametrize("days", [(-1, 1), (1, -1)])
    def test_an_end_in_the_past_is_refused(self, days):
        with pytest.raises(NotReady, match=f"expired at {NOW - timedelta(days=1):%Y-%m-%d}"):
            self.call(signed("worker", "middle", days[0]), signed("middle", "top", days[1]))

    def test_what_is_not_of_the_path_may_have_expired(self):
        middles = signed("middle", "top", -1), signed("middle", "other", 1), signed("else", "top", -1)
        self.call(signed("worker", "middle", 1), *middles, signed("top", "top", -1))

    def test_issuers_in_a_ring_come_to_an_end(self):
        self.call(signed("worker", "a", 1), signed("a", "b", 1), signed("b", "a", 1))

    def test_what_cannot_be_read_is_refused(self):
        with pytest.raises(NotAllowed, match="certificate cannot be read"):
            self.call(b"hello")


def signed(subject: str, issuer: str, days: int) -> bytes:
    """Return a certificate that ends in so many days."""
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
    builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(KEY.public_key())
    builder = builder.serial_number(1).not_valid_before(NOW - timedelta(days=9))
    return builder.not_valid_after(NOW + timedelta(days=days)).sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)
