"""Listeners: the stream servers of a shard, on TCP and on a Unix socket with shared memory.

Decides which there are, by the job's `cluster.transport`. Knows no message. Called by `parashard_server.__main__`.
"""

from __future__ import annotations

import socket

from parashard.errors import ConfigurationError, Unavailable
from parashard.job.schema import Job
from parashard.job.sections import received_bytes
from parashard.protocol.rpc import address_family, join_address
from parashard.security.credentials import Credentials
from parashard.security.identity import PULL, PUSH
from parashard.transports.base import allows
from parashard.transports.shared_weights import SharedWeights
from parashard_server.serving.local_socket import LocalSocket, local_socket
from parashard_server.serving.push_memory import PushMemory
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.serving.shard_host import ShardHost
from parashard_server.serving.shm_service import ShmService, Slots
from parashard_server.serving.stream_server import StreamServer
from parashard_server.serving.tcp_service import TcpService

CONNECTIONS_MAX = 1024  # of each server; a worker opens at most 8, and as a rule 2
BACKLOG = 1024  # beyond it the kernel delays new connections by a second and more


class Listeners:
    """The servers that the job's `cluster` asks for; they listen from the start, and serve once started.

    `address` is host:port of the TCP server, inside TLS and only for workers where there are credentials; `local_path`
    that of the Unix socket, which is this user's alone; either is empty where there is none. Raises ConfigurationError
    if the job allows shared memory alone, and there is none; Unavailable if the port cannot be listened on.
    """

    def __init__(
        self,
        plane: RequestHandler,
        shard_host: ShardHost,
        job: Job,
        memory: PushMemory,
        host: str,
        port: int,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = self.local_path = ""
        self.slots = Slots(memory, left_bytes=received_bytes(plane.push_bytes_max), workers=job.cluster.workers)
        self._servers: list[StreamServer] = []
        self._local: LocalSocket | None = None
        transport = job.cluster.transport
        if allows(transport, "tcp"):
            listening = _listening(host, port)
            self.address = join_address(host, listening.getsockname()[1])
            service = TcpService(plane, memory)
            self._servers.append(
                StreamServer(
                    listening,
                    service.serve,
                    connections_max=CONNECTIONS_MAX,
                    name="data",
                    tls=credentials.server_context if credentials else None,
                    calls=(PUSH, PULL),
                )
            )
        if allows(transport, "shm") and _shared(shard_host) is not None:
            mine = shard_host.shard.identity
            self._local = local_socket(mine.run_id, mine.shard, mine.incarnation)
        if transport == "shm" and self._local is None:
            raise ConfigurationError(
                'cluster.transport = "shm", and this shard can share no memory with workers: it takes Linux on x86-64 '
                "and a folder under /dev/shm for this user alone; the log says what is missing"
            )
        if self._local is not None:
            self.local_path = self._local.path
            local = ShmService(plane, lambda: _shared(shard_host), self.slots)
            self._servers.append(
                StreamServer(self._local.listening, local.serve, connections_max=CONNECTIONS_MAX, name="local")
            )

    @property
    def turned_away(self) -> int:
        """Connections that were refused for want of room, and those that were evicted."""
        return sum(server.turned_away for server in self._servers)

    def start(self) -> None:
        """Begin to serve."""
        for server in self._servers:
            server.start()

    def stop(self) -> None:
        """Stop serving."""
        if self._local is not None:
            self._local.close()
        for server in self._servers:
            server.stop()


def _shared(shard_host: ShardHost) -> SharedWeights | None:
    memory = shard_host.shard.storage.memory
    return memory if isinstance(memory, SharedWeights) else None


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=address_family(host), backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {join_address(host, port)}: {error}") from None
