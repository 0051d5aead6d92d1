"""The fork server: one process of a run that has imported what its children need, and forks them on request.

`python -P -m parashard.launch.fork_server SOCKET LIFELINE ROOM`, started by `parashard.launch.forks`. It has one thread
whenever it forks, computes nothing and holds no state: after its death a new one goes on. A child is forked twice, so
that it becomes the launcher's, which is the subreaper meanwhile: whatever becomes of the server, the child lives, and
the launcher waits for it.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from parashard.launch.forks import Request, read_request, send_message
from parashard.launch.new_process import become, show
from parashard.process.shell import ExitCode, die_with_parent, end_process

NUMBER = struct.Struct("i")  # a process id, or the negative number of an error


class _Threaded(Exception):
    """A module began a thread when it was imported, so that this process may not fork any more."""


class ForkServer:
    """Forks what it is asked to."""

    def __init__(self, requests: socket.socket, lifeline: int) -> None:
        self._requests = requests
        self._lifeline = lifeline
        self._prepared: set[str] = set()

    def serve(self) -> Callable[[], None] | None:
        """Answer requests until the launcher ends (None), or return in a new child what it is to do."""
        while True:
            ready, _, _ = select.select([self._requests.fileno(), self._lifeline], [], [])
            if self._lifeline in ready:
                return None
            try:
                request, log, go = read_request(self._requests)
                self._prepare(request)
            except _Threaded as error:
                send_message(self._requests, {"threaded": str(error)})
                return None
            except OSError:
                return None
            assert threads() == 1, "only the thread that forks would go on in a child"
            if self._fork():
                self._requests.close()
                return partial(self._begin, request, log, go)
            os.close(log)
            os.close(go)

    def _prepare(self, request: Request) -> None:
        """Import what a child needs; what cannot be imported here fails there, where its log is."""
        due = [name for name in request.preload if name not in self._prepared]
        for name in due:
            self._prepared.add(name)
            with suppress(Exception):  # whatever a library raises
                module, _, function = name.partition(":")
                imported = importlib.import_module(module)
                if function:
                    getattr(imported, function)()
            if threads() > 1:
                raise _Threaded(name)
        if due:
            gc.collect()
            gc.freeze()  # so that children share the memory of these objects

    def _fork(self) -> bool:
        """Fork a child that becomes the launcher's, and tell its process id; return whether this is the child."""
        read, write = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            send_message(self._requests, {"errno": error.errno})
            between = -1
        if between == 0:
            number = _forked()
            if number == 0:
                os.close(read)
                os.close(write)
                return True
            os.write(write, NUMBER.pack(number))
            end_process(ExitCode.DONE)
        os.close(write)
        if between > 0:
            told = os.read(read, NUMBER.size)
            os.waitpid(between, 0)  # then the child is the launcher's
            (number,) = NUMBER.unpack(told)
            send_message(self._requests, {"pid": number} if number > 0 else {"errno": -number})
        os.close(read)
        return False

    def _begin(self, request: Request, log: int, go: int) -> None:
        """Run the requested program once the launcher knows this process."""
        if not os.read(go, 1):  # it has ended, or asked another server
            end_process(ExitCode.RETRY)
        os.close(go)
        become(request, log)


def _forked() -> int:
    """Fork; return the child's process id, 0 in the child, or the negative number of an error."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)


def threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def main() -> Callable[[], None] | None:
    """Serve, and return what a new child is to do; None: the launcher has ended."""
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    show(sys.orig_argv[:-1])
    die_with_parent()
    with socket.socket(fileno=descriptor) as requests:
        return ForkServer(requests, lifeline).serve()


if __name__ == "__main__":
    child = main()
    if child is not None:
        child()
