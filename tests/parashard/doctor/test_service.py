"""A running service seen from outside: by each of its ports, with and without TLS, and what is no service of ours."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from parashard import __version__
from parashard.doctor.findings import in_order, of_service
from parashard.doctor.service import look_at_service, of_http, speaks_tls
from parashard.protocol.rpc import Server
from parashard.security.credentials import Credentials
from parashard.security.identity import Role
from parashard.telemetry.http import HttpPort, Metrics
from support.certificates import WRONG_CA


@pytest.fixture
def http_port() -> Iterator[HttpPort]:
    """Return the HTTP port of a shard."""
    port = HttpPort("127.0.0.1", 0, Metrics("shard"), lambda: "")
    port.start()
    yield port
    port.stop()


@pytest.fixture
def tls_server(certificates) -> Iterator[Server]:
    """Return a gRPC server of a shard inside mutual TLS, without a service."""
    server = Server("localhost:0", certificates.of(Role.SHARD))
    server.start()
    yield server
    server.stop(0.0)


def test_an_http_port_tells_role_version_and_clock(http_port):
    found = look_at_service(http_port.address)
    assert (found.role, found.version, found.tls) == ("shard", __version__, False)
    assert found.clock is not None
    assert abs(found.clock.ahead_s) <= found.clock.sure_s + 0.5
    assert in_order(of_service(found)) == []


def test_tls_without_credentials_asks_for_them(tls_server):
    found = look_at_service(tls_server.address)
    assert found.tls
    assert [one.text for one in in_order(of_service(found))] == [
        "it speaks TLS only; give the folder of your certificate by --tls-dir"
    ]


def test_tls_with_credentials_shows_how_long_the_certificate_is_valid(tls_server, certificates):
    found = look_at_service(tls_server.address, certificates.of(Role.OPERATOR))
    assert found.certificate is not None
    assert (found.certificate.problem, 0 < found.certificate.days_left <= 1) == ("", True)
    assert "does not answer as parashard" in in_order(of_service(found))[0].text, "it has no service of ours"


def test_a_certificate_of_another_authority_is_told(certificates):
    server = Server("localhost:0", Credentials(certificates.folder(Role.SHARD, WRONG_CA)))
    server.start()
    try:
        found = look_at_service(server.address, certificates.of(Role.OPERATOR))
    finally:
        server.stop(0.0)
    (one,) = in_order(of_service(found))
    assert "its certificate is not trusted here" in one.text


def test_credentials_where_there_is_no_tls_are_told(http_port, certificates):
    found = look_at_service(http_port.address, certificates.of(Role.OPERATOR))
    assert any("it speaks without TLS" in one.text for one in in_order(of_service(found)))


def test_a_foreign_server_is_none_of_ours():
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        found = look_at_service(f"127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
    assert found.role == ""
    assert "does not answer as parashard" in in_order(of_service(found))[0].text


def test_a_server_that_sends_a_byte_now_and_then_keeps_nobody(monkeypatch):
    monkeypatch.setattr("parashard.doctor.service.CALL_S", 0.3)
    over = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            while not over.wait(0.02):
                self.wfile.write(b"x")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        assert of_http(f"127.0.0.1:{server.server_address[1]}") is None
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def test_a_name_that_is_none_and_a_port_that_nobody_has():
    assert look_at_service("no-such-host.invalid:7000").lookup_problem
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = look_at_service(f"127.0.0.1:{bound.getsockname()[1]}")
    assert [link.kind for link in found.links] == ["refused"]


def test_a_server_that_says_nothing_is_not_known_to_speak_tls(monkeypatch):
    monkeypatch.setattr("parashard.doctor.service.CALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert speaks_tls(*silent.getsockname()) is None
