"""Listeners: the stream servers of a shard, on TCP and on a Unix socket with shared memory, and that socket's rights.

The job's `cluster.transport` decides which of them exist. The path of the Unix socket is
/dev/shm/parashard-UID/RUN_ID/shard-INDEX.INCARNATION.sock; this module creates and removes it and its folders (0700),
and sweeps the files of killed shards. Processes that can share memory, in containers too, also share /dev/shm, so the
path is visible exactly where shared memory can be used. Knows no message.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from parashard.errors import ConfigurationError, Unavailable
from parashard.job.schema import Job
from parashard.job.sections import received_bytes
from parashard.process.addresses import Port, address_family, join_address, listen
from parashard.process.logs import log
from parashard.security.credentials import Credentials
from parashard.security.identity import PULL, PUSH
from parashard.transports.base import allows
from parashard.transports.memory import Bytes
from parashard.transports.shared_weights import SharedWeights
from parashard.transports.socket_io import is_own_user
from parashard_server.push_memory import PushMemory, Slots
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.serving.stream_server import StreamServer
from parashard_server.serving.stream_services import ShmService, TcpService
from parashard_server.shard_host import ShardHost

CONNECTIONS_MAX = 1024  # of each server; a worker opens at most 8, and as a rule 2
BACKLOG = 1024  # beyond it the kernel delays a TCP connection by a second and more, and refuses a local one at once
ROOT = Path("/dev/shm")
PATH_BYTES_MAX = 107  # of a Unix socket's address, in Linux
ATTEMPTS_MAX = 10  # others that start or end at the same moment may sweep the folder


class Listeners:
    """The servers that the job's `cluster` configures; they listen at once, and serve after `start`.

    `address` is host:port of the TCP server, with credentials inside TLS and only for workers; `local_path` is the path
    of the Unix socket, for this user only; either is empty if there is none. Raises ConfigurationError if the job
    allows only shared memory, and there is none; Unavailable if the port cannot be listened on.
    """

    def __init__(
        self,
        plane: RequestHandler,
        shard_host: ShardHost,
        job: Job,
        memory: PushMemory,
        host: str,
        port: Port,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = self.local_path = ""
        self.slots = Slots(
            memory,
            left_bytes=received_bytes(plane.push_bytes_max),
            workers=job.cluster.workers,
            lock_pages=partial(_lock_pages, shard_host),
        )
        self._servers: list[StreamServer] = []
        self._local: LocalSocket | None = None
        transport = job.cluster.transport
        if allows(transport, "tcp"):
            listening = listen(port, partial(_listening, host))
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
        """Number of connections that were refused for lack of room or evicted."""
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


def _lock_pages(shard_host: ShardHost, slot: Bytes) -> None:
    shard_host.shard.storage.lock_pages(slot)


def _shared(shard_host: ShardHost) -> SharedWeights | None:
    memory = shard_host.shard.storage.memory
    return memory if isinstance(memory, SharedWeights) else None


def _listening(host: str, port: int) -> socket.socket:
    try:
        dual = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=address_family(host), backlog=BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        raise Unavailable(f"cannot listen on {join_address(host, port)}: {error}") from None


class LocalSocket:
    """A listening Unix socket with a name under `root`, in a folder for each run.

    `path` is for `ShardAddress.local_path`. `listening` accepts connections of this user and of root only; the caller
    closes it. Raises OSError if it cannot be made there, or the folder belongs to another user.
    """

    def __init__(self, run_id: str, shard: int, incarnation: int, *, root: Path = ROOT) -> None:
        self._home = root / f"parashard-{os.getuid()}"
        self._folder = self._home / run_id
        path = self._folder / f"shard-{shard}.{incarnation}.sock"
        if self._folder.parent != self._home or run_id in ("", ".", ".."):
            raise OSError(f"the run id {run_id!r} is not the name of a folder")
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            raise OSError(f"a socket's path has at most {PATH_BYTES_MAX} bytes: {path}")
        self.path = str(path)
        with contextlib.suppress(FileNotFoundError):  # another shard ends and removes it
            _make_folder(self._home)
            sweep(self._home)
        self.listening = self._listen(path)

    def close(self) -> None:
        """Remove the name, and the folders if they are empty now; connections stay."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        _remove_if_empty(self._folder)
        _remove_if_empty(self._home)

    def _listen(self, path: Path) -> socket.socket:
        """Return a socket that listens under its name."""
        # The name appears once the socket listens, so that no sweep mistakes it for a dead process's. A sweep may
        # remove the folder, or the socket under its first name; then all steps are repeated.
        for attempt in range(1, ATTEMPTS_MAX + 1):
            listening = _OwnUsersSocket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _make_folder(self._home)
                _make_folder(self._folder)
                first_name = path.with_suffix(".new")
                first_name.unlink(missing_ok=True)
                listening.bind(str(first_name))
                os.chmod(first_name, 0o600)
                listening.listen(BACKLOG)
                os.rename(first_name, path)
                return listening
            except BaseException as error:
                listening.close()
                if attempt == ATTEMPTS_MAX or not isinstance(error, FileNotFoundError):
                    raise
        raise AssertionError("the last attempt returns or raises")


class _OwnUsersSocket(socket.socket):
    """A Unix socket that closes connections of other users, whom its folder should have stopped already."""

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            connection, address = super().accept()
            if is_own_user(connection):
                return connection, address
            connection.close()
            log.warning("foreign-user-refused")


def local_socket(run_id: str, shard: int, incarnation: int, *, root: Path = ROOT) -> LocalSocket | None:
    """Return a LocalSocket, or None if it cannot be made; the log has the reason."""
    try:
        return LocalSocket(run_id, shard, incarnation, root=root)
    except OSError as error:
        log.warning("no-local-socket", error=str(error))
        return None


def sweep(home: Path) -> None:
    """Remove the sockets under a user's folder that no process listens to, of any run, and empty folders."""
    for folder in _entries(home):
        for path in _entries(folder):
            if _is_stale(path):
                with contextlib.suppress(OSError):
                    path.unlink()
                    log.info("stale-socket-removed", path=str(path))
        _remove_if_empty(folder)


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return  # gone meanwhile, or never there


def _is_stale(path: Path) -> bool:
    """Return whether a socket's process is gone: only a refused connection proves that."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _make_folder(folder: Path) -> None:
    """Make a folder for this user only, or check that it is so: any user can create any name in /dev/shm."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only user {os.getuid()} may use")


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
