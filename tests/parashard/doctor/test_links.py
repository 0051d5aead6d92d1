"""Links that are measured by plain sockets: only with the token, each failure as its own kind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from parashard.doctor.links import CONNECTIONS_MAX, Listener, measure
from parashard.errors import Unavailable
from parashard.process.addresses import PortRange, split_address
from support.ipv6 import needs_ipv6

TOKEN = b"t" * 32


@pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=needs_ipv6), pytest.param("::", marks=needs_ipv6)])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """Return a listener on loopback."""
    listener = Listener(request.param, 0, TOKEN)
    yield listener
    listener.close()


def test_a_link_has_a_round_trip_and_a_speed(listener):
    host, port = split_address(listener.address)
    found = measure(f"localhost:{port}" if host == "::" else listener.address, TOKEN)
    assert found.kind == "open"
    assert found.connect_s > 0
    assert 0 < found.round_trip_s < 1
    assert found.bytes_per_s > 1e6


def test_who_does_not_know_the_token_is_not_answered(listener):
    assert measure(listener.address.replace("[::]", "[::1]"), b"x" * 32).kind == "foreign"


def test_without_a_token_it_is_only_connected_to(listener):
    found = measure(listener.address.replace("[::]", "[::1]"), None)
    assert (found.kind, found.bytes_per_s) == ("open", 0)


def test_a_port_that_nobody_listens_on_is_refused():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert measure(f"127.0.0.1:{bound.getsockname()[1]}", TOKEN).kind == "refused"


def test_a_name_that_is_none_is_unknown():
    assert measure("no-such-host.invalid:7000", TOKEN).kind == "unknown-name"


def test_a_server_that_answers_and_takes_no_more_passes_small_messages_only(monkeypatch):
    monkeypatch.setattr("parashard.doctor.links.CALL_S", 0.3)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(len(TOKEN))
                connection.sendall(b"y")
                while connection.recv(1) == b"p":
                    connection.sendall(b"y")
                done.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        found = measure(f"127.0.0.1:{listening.getsockname()[1]}", TOKEN)
        done.set()
        thread.join()
    assert found.kind == "small-only"
    assert found.round_trip_s > 0


def test_of_a_range_the_next_free_port_is_listened_on(listener):
    host, port = split_address(listener.address)
    if port > 65000:
        pytest.skip("the range would end")
    other = Listener(host, PortRange(port, port + 20), TOKEN)
    other.close()
    assert port < split_address(other.address)[1] <= port + 20
    with pytest.raises(Unavailable, match="Address already in use"):
        Listener(host, port, TOKEN)


def test_a_stranger_that_sends_a_byte_now_and_then_keeps_no_place(monkeypatch):
    monkeypatch.setattr("parashard.doctor.links.CALL_S", 0.5)
    listener = Listener("127.0.0.1", 0, b"t" * 4096)
    with socket.create_connection(split_address(listener.address), timeout=0.1) as stranger:

        def is_closed() -> bool:
            try:
                stranger.sendall(b"t")
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        assert any(is_closed() for _ in range(30)), "all of the token has one deadline"
    listener.close()


def test_one_connection_too_many_is_closed():
    listener = Listener("127.0.0.1", 0, TOKEN)
    kept = [socket.create_connection(split_address(listener.address), timeout=10) for _ in range(CONNECTIONS_MAX)]
    with socket.create_connection(split_address(listener.address), timeout=10) as one_more:
        assert one_more.recv(1) == b""
    for connection in kept:
        connection.close()
    listener.close()
