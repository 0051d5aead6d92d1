"""Many unauthenticated peers: they lock no worker out, are closed after a deadline, and cost little memory."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from parashard.errors import QueueFull, Unreachable
from parashard.protocol import rpc
from parashard.protocol.rpc import our_errors
from parashard.security.identity import PULL, PUSH, Role
from parashard.transports.base import ShardAddress
from parashard.transports.stream import Stream, greet
from parashard.transports.tcp import TcpTransport
from parashard_server.push_memory import PushMemory
from parashard_server.serving.stream_server import StreamServer
from parashard_server.serving.stream_services import TcpService
from support.certificates import Certificates
from support.fake_plane import GREETING, TARGET, FakePlane
from support.stream_cases import DEADLINE_S, echo, serving, soon
from support.tcp_cases import push_of
from support.unary_handlers import raw_handlers
from support.waiting import eventually

IDLE = 1000
IDLE_BYTES_MAX = 96 << 20
"""What 1,000 silent connections may cost, as SECURITY.md says. Seen: 17 to 21 MiB over gRPC, 45 to 60 over streams."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def silent_connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Connect and say nothing."""
    host, _, port = address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(count)]
    try:
        yield silent
    finally:
        for connection in silent:
            connection.close()


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """Allow this process both ends of a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * IDLE:
        pytest.skip(f"this process may have only {hard} files: HOSTILE PEERS ARE NOT TESTED")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * IDLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def worker_at(address: str, certificates: Certificates) -> TcpTransport:
    where = ShardAddress("", 7, data_address=address)
    return TcpTransport(where, GREETING, tls=certificates.of(Role.WORKER).client_context)


class TestStreams:
    """Of the port for tensors."""

    def test_a_thousand_silent_connections_cost_a_known_memory_and_pushes_go_on(self, monkeypatch, certificates):
        monkeypatch.setattr(
            "parashard_server.serving.stream_server.HELLO_DEADLINE_S", DEADLINE_S
        )  # all are there at once
        plane, tls = FakePlane([0, 1000]), certificates.of(Role.SHARD).server_context
        service = TcpService(plane, PushMemory(1 << 20))
        with serving(service.serve, connections_max=IDLE, tls=tls, calls=(PUSH, PULL)) as (server, _):
            early, late = worker_at(server.address, certificates), worker_at(server.address, certificates)
            push = push_of(np.ones(1000, np.float32), TARGET)
            assert early.push(push, DEADLINE_S).result().version == 1
            before = resident_bytes()
            with silent_connections(server.address, IDLE):
                assert early.push(push, DEADLINE_S).result().version == 2
                assert late.push(push, DEADLINE_S).result().version == 3, "there was no room, and it was let in"
                assert server.connections >= IDLE // 2
                assert resident_bytes() - before < IDLE_BYTES_MAX
            early.close()
            late.close()

    def test_the_oldest_unauthenticated_connection_is_evicted_and_authenticated_ones_stay(self, certificates):
        tls, context = certificates.of(Role.SHARD).server_context, certificates.of(Role.WORKER).client_context()

        def worker(connect: Callable[[], Stream]) -> Stream:
            stream = Stream(connect()._connection, "shard:1", tls=context, server_name="127.0.0.1")
            greet(stream, GREETING, deadline_s=soon())
            return stream

        with serving(echo, connections_max=2, tls=tls, calls=(PUSH, PULL)) as (server, connect):
            first = worker(connect)
            with silent_connections(server.address, 1) as (oldest,):
                second = worker(connect)
                assert oldest.recv(1) == b""
            all_but(server, 2)
            with pytest.raises(QueueFull, match="2 connections are open here; at most 2 may be"):
                worker(connect)
            all_but(server, 2)
            assert server.turned_away == 2
            first.close()
            second.close()


def all_but(server: StreamServer, connections: int) -> None:
    """Wait until so many are left."""
    eventually(lambda: server.connections == connections, f"{connections} are left", told=lambda: server.connections)


class TestWithoutTls:
    """A peer is silent until it has sent a valid HELLO."""

    def test_a_silent_connection_is_evicted_for_the_next_and_greeted_ones_stay(self):
        service = TcpService(FakePlane([0, 10]), PushMemory(1 << 20))
        with serving(service.serve, connections_max=3) as (server, connect):
            early = connect()
            greet(early, GREETING, deadline_s=soon())
            silent = [connect() for _ in range(2)]
            late = connect()
            greet(late, GREETING, deadline_s=soon())
            with pytest.raises(Unreachable):
                silent[0].receive(deadline_s=soon())
            all_but(server, 3)
            assert server.turned_away == 1


class TestGrpc:
    """Of the port for everything else."""

    @pytest.fixture
    def address(self, certificates) -> Iterator[str]:
        server = rpc.Server("127.0.0.1:0", certificates.of(Role.SHARD))
        handlers = raw_handlers("parashard.v1.ShardData", {"Push": lambda frame, context: frame})
        server.grpc.add_generic_rpc_handlers((handlers,))
        server.start()
        yield server.address
        server.stop(0.0)

    def pushed(self, address: str, certificates: Certificates) -> bytes:
        channel = rpc.connect(address, certificates.of(Role.WORKER))
        try:
            with our_errors(address):
                frame: bytes = channel.unary_unary(PUSH)(b"gradient", timeout=DEADLINE_S)
                return frame
        finally:
            channel.close()

    def test_a_thousand_silent_connections_cost_a_known_memory_and_pushes_go_on(self, certificates, address):
        assert self.pushed(address, certificates) == b"gradient"
        before = resident_bytes()
        with silent_connections(address, IDLE):
            assert self.pushed(address, certificates) == b"gradient"
            assert resident_bytes() - before < IDLE_BYTES_MAX

    @pytest.mark.parametrize("first_bytes", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
    def test_a_handshake_that_does_not_end_is_ended(self, monkeypatch, certificates, first_bytes):
        options = [(k, 50 if k == "grpc.server_handshake_timeout_ms" else v) for k, v in rpc._SERVER_OPTIONS]
        assert options != rpc._SERVER_OPTIONS
        monkeypatch.setattr(rpc, "_SERVER_OPTIONS", options)
        server = rpc.Server("127.0.0.1:0", certificates.of(Role.SHARD))
        server.start()
        with silent_connections(server.address, 1) as (silent,):
            silent.sendall(first_bytes)
            began_s = time.monotonic()
            while silent.recv(4096):  # what the server says first, an alert perhaps, and then the end
                pass
            assert time.monotonic() - began_s < DEADLINE_S / 2
        server.stop(0.0)

    def test_connections_beyond_the_limit_are_closed_and_open_ones_go_on(self, monkeypatch, certificates):
        monkeypatch.setattr(rpc, "CONNECTIONS_MAX", 8)
        server = rpc.Server("127.0.0.1:0", certificates.of(Role.SHARD))
        server.start()
        channel = rpc.connect(server.address, certificates.of(Role.WORKER))
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        check(b"", timeout=DEADLINE_S)
        with silent_connections(server.address, 16) as silent:
            assert silent[-1].recv(1) == b""
            assert check(b"", timeout=DEADLINE_S)
        channel.close()
        server.stop(0.0)
