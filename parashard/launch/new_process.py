"""What a forked process does to be like a fresh one: its environment, its threads, its words in /proc, its program.

Called by `parashard.launch.fork_server` in each child.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import os
import runpy
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import parashard
from parashard.launch.forks import Request
from parashard.process.compute_threads import limit_threads, threads_for

ARGUMENTS, ENVIRONMENT = 45, 47  # where each begins: fields of /proc/self/stat after the command's name


def become(request: Request, log: int) -> None:
    """Be the process that was asked for, to its end."""
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
    """Have /proc show these words for this process, as far as there is room.

    The room is that of the words which the server was started with. No variable may be in use there: a child has set
    all of them anew, which copies them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[first]), int(fields[first + 1])
    content = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))


def _seed() -> None:
    """Seed NumPy's generator anew; Python's own is, PyTorch's has a fixed seed, and JAX has none."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_threads(environ: Mapping[str, str]) -> None:
    """Have the libraries that were loaded with one thread use as many as they would have."""
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
        sys.modules.pop(f"{module}.__main__", None)  # it runs once more, under its other name
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    file = command[1]
    sys.argv = [*command[1:]]
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins)
    sys.modules["__main__"] = main
    parashard._started.note()
    script = importlib.import_module("parashard.api.script")
    script.SCRIPT.begin(script.given())  # from here on it tells why the script ends before its call
    exec(compile(Path(file).read_bytes(), file, "exec"), main.__dict__)  # as the interpreter does
