"""Start children of this process through a fork server, each with the interface of `subprocess.Popen`.

This process waits for a child and ends it as any other. A child begins only once this process knows it: so a server
that dies is replaced and asked again, and nothing runs twice. One that does not answer in time is ended
(`ForkServerLost`).
"""

from __future__ import annotations

import array
import ctypes
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
LENGTH = struct.Struct("!I")
LENGTH_MAX = 16 << 20
IMPORT_S, FORK_S = 120.0, 10.0
"""Longest time for a server's answer, with modules to import and without; then it is ended."""
SERVERS_MAX = 3
"""How many servers are tried for one child, if each ends."""
POLL_S = 0.002
REAP_S = 1.0
EXIT_S = 1.0
"""How long a server that has closed its connection may take to end, so that its exit code is known."""
SERVER = "parashard.launch.fork_server"
ROOM_BYTES, ROOM_VARIABLE = 16384, "PARASHARD_ROOM"
"""Space for a child's command line, and for its environment, in the memory that /proc shows for the server's."""
SERVICES = (
    "parashard_coordinator.__main__",
    "parashard_server.__main__",
    "parashard_worker.__main__",
    # Modules that these, and libraries, would import lazily.
    "grpc._channel",
    "grpc._interceptor",
    "grpc._server",
    "parashard_server.state.kernels.fused:warm_up",
)
"""Modules that a server imports, and functions that it calls, for every run."""
OF_SCRIPTS = (
    "scipy",
    "scipy.stats",
    "pyarrow",
    "pandas",
    "sklearn",
    "torch",
    "torch._dynamo",
    "torchvision",
    "jax",
    "optax",
    "flax",
    "parashard.api.programs.coordinator",
    "parashard.api.trainer",
    "parashard.jax",
    "parashard.layers",
    "parashard.metrics",
    "parashard.torch",
)
"""Modules that it imports, too, if the script has imported them: large libraries, and our own. Keras is not among
them: it starts a thread."""
ARROW_ALLOCATOR = "JE_ARROW_MALLOC_CONF"
"""Stops PyArrow's allocator from starting a thread at import; pandas imports PyArrow, and scikit-learn pandas."""


class ForkServerLost(Exception):
    """One server did not answer, several ended, or a child is not this process's; the text is the reason."""


class Unsupported(ForkServerLost):
    """No server can fork for this process, and a later one could not either."""


class Request(NamedTuple):
    """One child to fork."""

    command: Sequence[str]  # `python -P -m MODULE ARGUMENTS` or `python SCRIPT ARGUMENTS`, as /proc shows it
    folder: str  # where it works; "": where the server does
    environ: Mapping[str, str]  # its whole environment
    preload: Mapping[str, str]
    """Modules to import once in the server, each with its file ("": any); "MODULE:FUNCTION" is called, too."""


class Fork:
    """A child; its methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is a child of this process that has not been waited for."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def poll(self) -> int | None:
        """Return its exit code, or the negative number of the signal that killed it; None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another part of the program has waited for it
                self._code = 1
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _discarded() -> BinaryIO:
    return Path(os.devnull).open("ab")


class Forks:
    """Starts children through a fork server, which it starts with the first child.

    The children inherit the lifeline's read end. The server's environment is this process's and `variables`, which
    libraries read at import. Its working directory is `folder`, the base of relative folders in PYTHONPATH ("", or one
    that is gone: this process's), and its errors go to the file that `open_log` returns.
    """

    def __init__(
        self,
        lifeline: int,
        variables: Mapping[str, str],
        folder: str = "",
        open_log: Callable[[], BinaryIO] = _discarded,
    ) -> None:
        self._lifeline = lifeline
        self._variables = variables
        self._folder = folder
        self._open_log = open_log
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._threaded: set[str] = set()
        self._imported: set[str] = set()  # by the present server
        self._patience_s = IMPORT_S
        self._begun: dict[int, Fork] = {}
        self._lock = threading.Lock()

    @property
    def server_pid(self) -> int:
        """The server's process id; 0: there is none now."""
        return 0 if self._server is None else self._server.pid

    def start(self, request: Request, log: int) -> Fork:
        """Fork a child whose output goes to the descriptor `log`."""
        # Raises OSError if the system has no room for one more process; ForkServerLost if no server could do it.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            raise Unsupported("this program ignores SIGCHLD, so that a fork server cannot wait for its children")
        with self._lock:
            lost, how = 0, ""
            while lost < SERVERS_MAX:
                if self._socket is None:
                    self._start_server()
                try:
                    found = self._answer(request, log)
                except TimeoutError:
                    self._end_server()
                    raise ForkServerLost(f"the fork server did not answer in {self._patience_s:.0f} s") from None
                except OSError:  # it has ended
                    how = self._end_server(EXIT_S)
                    lost += 1
                    continue
                except BaseException:  # such as Ctrl-C: the answer is outstanding
                    self._end_server()
                    raise
                if isinstance(found, Fork):
                    return found
                if "errno" in found:
                    raise OSError(int(found["errno"]), os.strerror(int(found["errno"])))
                self._end_server()
                if not found["threaded"]:
                    raise Unsupported("a fork server has threads that no import of ours began, as by a sitecustomize")
                self._threaded.add(str(found["threaded"]))  # the next one does not import it
        raise ForkServerLost(f"{SERVERS_MAX} fork servers ended, the last with {how}")

    def close(self) -> None:
        """End the server; its children go on."""
        with self._lock:
            self._end_server()

    def _answer(self, request: Request, log: int) -> Fork | dict[str, Any]:
        """Ask for a child, and let it begin; or return why there is none."""
        assert self._socket is not None
        preload = {name: file for name, file in request.preload.items() if name not in self._threaded}
        self._patience_s = FORK_S if preload.keys() <= self._imported else IMPORT_S
        self._socket.settimeout(self._patience_s)
        self._imported |= preload.keys()
        read, write = os.pipe()  # on which the child waits until it may begin
        try:
            with SUBREAPER:
                send_message(self._socket, request._replace(preload=preload)._asdict(), [log, read])
                found = read_message(self._socket, self._socket.recv(LENGTH.size, socket.MSG_WAITALL))
            if "pid" not in found:
                return found
            child = Fork(int(found["pid"]))
            if not child.is_own:  # a system without subreapers; it will not begin
                raise Unsupported("a fork server's children are not this process's")
            self._begun[child.pid] = child
            os.write(write, b"1")  # no SIGPIPE if it was killed: the read end is open here, too
            return child
        finally:
            os.close(read)
            os.close(write)

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", SERVER, str(theirs.fileno()), str(self._lifeline)]
        with theirs, self._open_log() as log:
            try:
                self._server = subprocess.Popen(
                    [*command, "-" * ROOM_BYTES],
                    cwd=self._folder if os.path.isdir(self._folder) else None,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=(theirs.fileno(), self._lifeline),
                    start_new_session=True,
                    env=self._environ(),
                )
            except BaseException:
                ours.close()
                raise
        self._socket, self._imported = ours, set()

    def _environ(self) -> dict[str, str]:
        own = os.environ.get(ARROW_ALLOCATOR)
        allocator = ",".join([*([own] if own else []), "background_thread:false"])
        return {**os.environ, **self._variables, ARROW_ALLOCATOR: allocator, ROOM_VARIABLE: "-" * ROOM_BYTES}

    def _end_server(self, grace_s: float = 0.0) -> str:
        """End the server, if there is one, by force after `grace_s`; return how it ended."""
        if self._server is None or self._socket is None:
            return ""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(grace_s)
        self._server.kill()
        code = self._server.wait()
        group, self._server, self._socket = self._server.pid, None, None
        self._wait_for_unknown(group)
        self._begun.clear()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _wait_for_unknown(self, group: int) -> None:
        """Wait for children of a server that was killed between its two forks: they never begin, and end."""
        until_s = time.monotonic() + REAP_S
        with suppress(ChildProcessError):  # there is none
            while time.monotonic() < until_s:
                ended = os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    time.sleep(POLL_S)
                elif ended.si_pid in self._begun:
                    self._begun[ended.si_pid].poll()
                else:
                    os.waitpid(ended.si_pid, 0)


def script_modules(imported: Mapping[str, object]) -> dict[str, str]:
    """Return the modules that a server imports for a script that has imported `imported`, each with its file."""
    return {name: getattr(imported[name], "__file__", None) or "" for name in OF_SCRIPTS if name in imported}


def read_request(connection: socket.socket) -> tuple[Request, int, int]:
    """Return the next request, the descriptor of its log, and the one to read before the child begins."""
    # Raises OSError at the end of the connection.
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 2)
    log, go = descriptors if len(descriptors) == 2 else (-1, -1)
    return Request(**read_message(connection, head)), log, go


def read_message(connection: socket.socket, head: bytes) -> dict[str, Any]:
    """Return the message after its length `head`; OSError at the connection's end, or if the message is too long."""
    if len(head) < LENGTH.size:
        raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    (length,) = LENGTH.unpack(head)
    if length > LENGTH_MAX:
        raise OSError(errno.EMSGSIZE, f"a message of {length:,} bytes, allowed are {LENGTH_MAX:,}")
    text = connection.recv(length, socket.MSG_WAITALL)
    if len(text) < length:
        raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    found: dict[str, Any] = json.loads(text)
    return found


def send_message(connection: socket.socket, content: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message; the descriptors travel with its length."""
    text = json.dumps(content).encode()
    if len(text) > LENGTH_MAX:
        raise ValueError(f"a message of {len(text):,} bytes, allowed are {LENGTH_MAX:,}")
    # Without SIGPIPE, however a script handles it. socket.send_fds ignores its flags.
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([LENGTH.pack(len(text))], ancillary, socket.MSG_NOSIGNAL)
    connection.sendall(text, socket.MSG_NOSIGNAL)


class Subreaper:
    """While any thread is in the block, orphans among this process's descendants become its children."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._before = ctypes.c_int()

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                libc = ctypes.CDLL(None, use_errno=True)
                libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(self._before))
                libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            self._within += 1

    def __exit__(self, *of: object) -> None:
        with self._lock:
            self._within -= 1
            if not self._within:
                ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, self._before.value)


SUBREAPER = Subreaper()
