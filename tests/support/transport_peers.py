"""The other ends of all transports: the real services of a shard around a small fake plane.

Run as a program (KIND FOLDER) it is a peer that takes every request and answers none, to be killed.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parashard.protocol import rpc
from parashard.protocol.messages import PullRun, Push
from parashard.protocol.rpc import Server
from parashard.security.certs import issue, make_authority
from parashard.security.credentials import Credentials
from parashard.security.identity import PULL, PUSH, Identity, Role
from parashard.transports.base import Connect, ShardAddress
from parashard.transports.grpc import GrpcTransport
from parashard.transports.shared_weights import SharedWeights
from parashard.transports.shm import ShmTransport
from parashard.transports.tcp import TcpTransport
from parashard_server.push_memory import PushMemory, Slots
from parashard_server.serving.grpc_service import ShardService
from parashard_server.serving.listeners import LocalSocket
from parashard_server.serving.stream_server import StreamServer
from parashard_server.serving.stream_services import ShmService, TcpService
from support.fake_plane import TARGET, FakePlane

BUDGET_BYTES = 1 << 30


class Peer(Protocol):
    """One end of a transport: a plane, and where it is served."""

    plane: FakePlane
    where: ShardAddress
    address: str  # which errors name
    connect: Connect

    @staticmethod
    def connecting(folder: Path) -> Connect:
        """Return what makes transports to a peer that has this folder."""

    def stop(self) -> None: ...


class GrpcPeer:
    """A shard's gRPC server."""

    def __init__(self, offsets: Sequence[int], folder: Path, credentials: Credentials | None = None) -> None:
        self.connect = self.connecting(folder)
        self.plane = FakePlane(offsets)
        self._server = Server("127.0.0.1:0", credentials)
        unused: Any = None  # services of commands
        ShardService(self.plane, unused, unused, unused, PushMemory(BUDGET_BYTES)).add_to(self._server)  # type: ignore[arg-type]
        self._server.start()
        self.address = self._server.address
        self.where = ShardAddress(self.address, TARGET.incarnation)

    @staticmethod
    def connecting(folder: Path) -> Connect:
        return GrpcTransport

    def stop(self) -> None:
        self._server.stop(0.0)


class TcpPeer:
    """A shard's stream server on TCP."""

    def __init__(self, offsets: Sequence[int], folder: Path, credentials: Credentials | None = None) -> None:
        self.connect = self.connecting(folder)
        self.plane = FakePlane(offsets)
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        self.where = ShardAddress("unused:1", TARGET.incarnation, data_address=self.address)
        service = TcpService(self.plane, PushMemory(BUDGET_BYTES))
        self._server = StreamServer(
            listening,
            service.serve,
            connections_max=64,
            name="tcp-peer",
            tls=credentials.server_context if credentials else None,
            calls=(PUSH, PULL),
        )
        self._server.start()

    @staticmethod
    def connecting(folder: Path) -> Connect:
        return TcpTransport

    def stop(self) -> None:
        self._server.stop()


class GrpcTlsPeer(GrpcPeer):
    """The same inside TLS: both sides show certificates, and only a worker's may call."""

    def __init__(self, offsets: Sequence[int], folder: Path) -> None:
        super().__init__(offsets, folder, credentials_in(folder, Role.SHARD))

    @staticmethod
    def connecting(folder: Path) -> Connect:
        worker = credentials_in(folder, Role.WORKER)
        return partial(GrpcTransport, connect=partial(rpc.connect, credentials=worker))


class TcpTlsPeer(TcpPeer):
    """The same inside TLS."""

    def __init__(self, offsets: Sequence[int], folder: Path) -> None:
        super().__init__(offsets, folder, credentials_in(folder, Role.SHARD))

    @staticmethod
    def connecting(folder: Path) -> Connect:
        return partial(TcpTransport, tls=credentials_in(folder, Role.WORKER).client_context)


def credentials_in(folder: Path, role: Role) -> Credentials:
    """Return a role's credentials in a folder, which gets an authority and them unless they are there."""
    authority, mine = folder / "authority", folder / role
    if not authority.exists():
        make_authority(authority, valid_days=1)
    if not mine.exists():
        issue(authority, mine, [Identity(role, f"{role}-0")], valid_days=1)
    return Credentials(mine)


class ShmPeer:
    """A shard's stream server on a Unix socket, with shared memory."""

    def __init__(self, offsets: Sequence[int], folder: Path) -> None:
        self.connect = self.connecting(folder)
        self.plane = FakePlane(offsets, SharedWeights)
        self._socket = LocalSocket("r", 0, TARGET.incarnation, root=folder)
        self.address = self._socket.path
        self.where = ShardAddress("unused:1", TARGET.incarnation, local_path=self.address)
        weights = self.plane.memory
        assert isinstance(weights, SharedWeights)
        service = ShmService(self.plane, lambda: weights, Slots(PushMemory(BUDGET_BYTES)))
        self._server = StreamServer(self._socket.listening, service.serve, connections_max=64, name="shm-peer")
        self._server.start()

    @staticmethod
    def connecting(folder: Path) -> Connect:
        return ShmTransport

    def stop(self) -> None:
        self._socket.close()
        self._server.stop()


PEERS: dict[str, Any] = {  # class of Peer, from the offsets of its partitions and a folder
    "grpc": GrpcPeer,
    "grpc-tls": GrpcTlsPeer,
    "tcp": TcpPeer,
    "tcp-tls": TcpTlsPeer,
    "shm": ShmPeer,
}


def main() -> None:
    """Take requests, say so, and never answer."""
    peer = PEERS[sys.argv[1]]([0, 1024], Path(sys.argv[2]))
    peer.plane.memory.weights[:] = np.arange(1024)

    def hang(request: Push | PullRun) -> None:
        say("called")
        threading.Event().wait()

    peer.plane.before = hang
    say(json.dumps([peer.where.address, peer.where.data_address, peer.where.local_path]))
    threading.Event().wait()


def say(line: str) -> None:
    """Tell the process that has started this one."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
