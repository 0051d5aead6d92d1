"""The fork server: a process of a run that has imported its children's modules, and forks children on request.

`python -P -m parashard.launch.fork_server SOCKET LIFELINE ROOM`, started by `parashard.launch.forks`. It has one thread
whenever it forks, computes nothing and holds no state: if it dies, a new one takes over. It forks twice, so that a
child becomes the launcher's, which is the subreaper meanwhile: the child outlives the server, and the launcher waits
for it.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import select
import socket
import struct
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import parashard
from parashard.launch.forks import Request, read_request, send_message
from parashard.process.resources import limit_threads, threads_for
from parashard.process.shell import ExitCode, die_with_parent, end_process

NUMBER = struct.Struct("i")  # a process id, or the negative number of an error
GPU_FILES = "/dev/nvidia"


class _Threaded(Exception):
    """This process may not fork any more: an import began a thread or opened a GPU; "": it had threads."""


class ForkServer:
    """Forks a child for each request."""

    def __init__(self, requests: socket.socket, lifeline: int) -> None:
        self._requests = requests
        self._lifeline = lifeline
        self._prepared: set[str] = set()

    def serve(self) -> Callable[[], None] | None:
        """Answer requests until the launcher ends, then return None; in a new child, return the function to run."""
        either = select.poll()  # select() has no descriptors from 1024 on
        for descriptor in (self._requests.fileno(), self._lifeline):
            either.register(descriptor, select.POLLIN)
        while True:
            if self._lifeline in dict(either.poll()):
                return None
            try:
                request, log, go = read_request(self._requests)
            except ConnectionResetError:  # the launcher has ended, or given this server up
                return None
            try:
                self._prepare(request)
            except _Threaded as error:
                if str(error):
                    told = f"{error} began a thread or opened a GPU: children import it themselves"
                    print(told, file=sys.stderr, flush=True)  # noqa: T201  # which is the server's log
                send_message(self._requests, {"threaded": str(error)})
                return None
            if self._fork():
                self._requests.close()
                return partial(self._begin, request, log, go)
            os.close(log)
            os.close(go)

    def _prepare(self, request: Request) -> None:
        """Import a child's modules; an import that fails here fails again in the child, which has the log."""
        if threads() > 1:  # only the forking thread would exist in a child
            raise _Threaded
        due = {name: file for name, file in request.preload.items() if name not in self._prepared}
        had_gpu = opens_gpu()  # such as by a library that the user preloads into each process: no import here
        for name, file in due.items():
            self._prepared.add(name)
            with suppress(Exception):  # whatever a library raises
                module, _, function = name.partition(":")
                if file and not _is_found_in(file, module):
                    continue  # the script imported it from a folder that this process does not search
                imported = importlib.import_module(module)
                if function:
                    getattr(imported, function)()
            if threads() > 1 or (opens_gpu() and not had_gpu):
                raise _Threaded(name)
        if due:
            gc.collect()
            gc.freeze()  # so that children share the memory of these objects

    def _fork(self) -> bool:
        """Fork a child that becomes the launcher's, and send its process id; return whether this is the child."""
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
        if not os.read(go, 1):  # the launcher has ended, or asked another server
            end_process(ExitCode.RETRY)
        os.close(go)
        become(request, log)


def _is_found_in(file: str, module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin == file


def _forked() -> int:
    """Fork; return the child's process id, 0 in the child, or the negative number of an error."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)


def threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def opens_gpu(process: int | str = "self") -> bool:
    """Tell whether a process has opened a GPU, as CUDA does at its first call: forked children could not use it."""
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # it is closed by now
            if os.readlink(descriptor).startswith(GPU_FILES):
                return True
    return False


def main() -> Callable[[], None] | None:
    """Serve; in a new child return the function to run, or None once the launcher has ended."""
    descriptor, lifeline = int(sys.argv[1]), int(sys.argv[2])
    show(sys.orig_argv[:-1])
    die_with_parent()
    with socket.socket(fileno=descriptor) as requests:
        requests.setblocking(True)  # it is not if the script has called socket.setdefaulttimeout
        return ForkServer(requests, lifeline).serve()


ARGUMENTS, ENVIRONMENT = 45, 47  # where each begins: fields of /proc/self/stat after the command's name


def become(request: Request, log: int) -> None:
    """Turn this child into the requested process, and run that to its end."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if request.folder:
        os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    show(request.command)
    show([f"{name}={value}" for name, value in request.environ.items()], ENVIRONMENT)
    _seed()
    _set_threads(request.environ)
    _run(request.command)


def show(words: Sequence[str], first: int = ARGUMENTS) -> None:
    """Make /proc show these words for this process, as far as they fit."""
    # They overwrite the words that the server was started with. No variable may be in use there: a child has set all
    # of them anew, which copies them.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[first]), int(fields[first + 1])
    if end <= start:  # a system that does not say
        return
    content = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))


def _seed() -> None:
    """Reseed NumPy's generator; Python reseeds its own, PyTorch's has a fixed seed, and JAX has none."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_threads(environ: Mapping[str, str]) -> None:
    """Give the libraries that were loaded with one thread their usual number of threads."""
    threads = threads_for(0, 1, reproducible=False, environ=environ)
    if threads == 1:
        return
    limit_threads(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _run(command: Sequence[str]) -> None:
    """Run `python -P -m MODULE ARGUMENTS` or `python SCRIPT ARGUMENTS` in this process."""
    sys.orig_argv = list(command)
    importlib.invalidate_caches()
    if "-m" in command[:3]:
        module, *arguments = command[command.index("-m") + 1 :]
        sys.argv = [module, *arguments]
        parashard._started.note()
        sys.modules.pop(f"{module}.__main__", None)  # it runs again as __main__
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    file = os.path.join(os.getcwd(), command[1])  # as the interpreter does
    sys.argv = [*command[1:]]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main.__dict__.update(__file__=file, __cached__=None, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = main
    parashard._started.note()
    from parashard.api.script import SCRIPT, worker_start

    SCRIPT.begin(worker_start())  # from here on it reports why the script ends before its call
    # As the interpreter does: without the __future__ imports of this module.
    exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    child = main()
    if child is not None:
        child()
