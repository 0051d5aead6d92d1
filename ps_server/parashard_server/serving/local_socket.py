"""LocalSocket: the Unix socket of a shard for the processes of its own host, and its access rights.

Owns the path /dev/shm/parashard-UID/RUN_ID/shard-INDEX.INCARNATION.sock: its folders (0700), its making, its end, and
the sweeping of what killed shards have left. A host shares /dev/shm as it shares memory, containers that share one
included, so the path is there exactly where shared memory may be of use. Knows no message. Called by
`parashard_server.serving.listeners`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parashard.process.logs import log
from parashard.transports.socket_io import is_own_user

ROOT = Path("/dev/shm")
PATH_BYTES_MAX = 107  # of a Unix socket's address, in Linux
BACKLOG = 1024  # a full queue refuses at once, and a refused worker takes a slower way to this incarnation
ATTEMPTS_MAX = 10  # as many as a start loses its folder to the sweeps of others that start or end at the same moment


class LocalSocket:
    """A listening Unix socket with a name under `root`, in a folder for each run; `path` is for
    `ShardAddress.local_path`. `listening` accepts connections of this user and of root only; the caller closes it.
    Raises OSError if it cannot be made there, or the folder belongs to another user.
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
        """Take the name away, and the folders if they are empty now; connections stay."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        _remove_if_empty(self._folder)
        _remove_if_empty(self._home)

    def _listen(self, path: Path) -> socket.socket:
        """Return a socket that listens under its name.

        The name appears once the socket listens, so that no sweep takes it for one that a dead process has left. A
        sweep may take the folder, or the socket under its first name; then all is done again.
        """
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
    """A Unix socket that closes what another user has connected; its folder should have stopped that one already."""

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            connection, address = super().accept()
            if is_own_user(connection):
                return connection, address
            connection.close()
            log.warning("foreign-user-refused")


def local_socket(run_id: str, shard: int, incarnation: int, *, root: Path = ROOT) -> LocalSocket | None:
    """Return a LocalSocket, or None where there can be none; the log says why."""
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
    """Return whether a socket's process is gone: nothing but a refused connection says so."""
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
    """Make a folder for this user alone, or find it so; /dev/shm is open to all, and so is every name in it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only user {os.getuid()} may use")


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
