"""Run the processes of a job on this machine, as children of this process; workers may be threads of it.

Starts, reaps and ends them; decides nothing (the coordinator does). A fork server starts them, except scripts
that run by `python -m` or with flags of Python. Each child inherits the read end of one pipe, its lifeline, whose only
writer is this process: when this process ends, even by SIGKILL, its children see end of file and end.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from parashard.errors import is_transient
from parashard.launch.forks import SERVICES, Fork, Forks, ForkServerLost, Request, Unsupported, script_modules
from parashard.launch.starting import END_GRACE_S, Ended, end_in_turn
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.resources import thread_variables
from parashard.process.run_files import LOGS, short_path
from parashard.process.shell import ExitCode
from parashard.process.threads import ThreadChild

LOG_TAIL_BYTES = 16384  # the longest error line of a process, and its output after it
WITHOUT_SERVER_S = 60.0
"""How long no fork server is used after one did not answer, or several ended."""
FORK_SERVER = "fork-server"
"""The name of its log, which is empty unless it fails."""

MODULES = {"coordinator": "parashard_coordinator", "shard": "parashard_server", "worker": "parashard_worker"}
"""Module of each role, for `python -m`."""
WORKER_ARGUMENTS = "PARASHARD_WORKER_ARGUMENTS"
"""The environment variable that makes a script a worker: a JSON list of the worker's arguments."""
WORKER_IS_SCRIPT = (
    "a worker is your script, run again: what may happen only once comes after `import parashard as ps`, under "
    "`if not ps.is_worker():`"
)
RETRIED = (ExitCode.FENCED, ExitCode.IO_ERROR, ExitCode.RETRY)
NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
INFO = " level=info "  # in each line that a service logs


Process = subprocess.Popen[bytes] | Fork
StartThread = Callable[[str, Sequence[str]], ThreadChild]
"""Starts the worker of a name and arguments in a thread of this process."""


class ScriptCommand(NamedTuple):
    """The command that runs a script again: its words, and the folder that it was started in."""

    words: tuple[str, ...]
    folder: str
    shown: str = "SCRIPT ARGS"
    """Script and arguments, for a person to start it elsewhere."""


class LocalCluster:
    """Children by name, such as "coordinator", "shard-0" or "worker-1": a `Starter`."""

    launcher_address = ""

    def __init__(self, run_dir: Path, *, forks: bool = True) -> None:
        """`forks`: start children through a fork server, which pays off for several processes."""
        self._logs = run_dir / LOGS
        self._logs.mkdir(parents=True, exist_ok=True)
        self._children: dict[str, Process | ThreadChild] = {}
        self._log_starts: dict[str, int] = {}  # offset in bytes at which the present process's log begins
        self._ended = 0
        self._asked_to_end: set[str] = set()
        self._not_started: list[Ended] = []
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._forks: Forks | None = None
        self._fork_from_s = 0.0 if forks else math.inf
        self.variables: Mapping[str, Mapping[str, str]] = {}
        """Additional environment variables, by module."""
        self.script: ScriptCommand | None = None
        """Run by workers in place of the module, with their arguments in the environment (`WORKER_ARGUMENTS`)."""
        self.start_thread: StartThread | None = None
        """Starts workers as threads of this process."""
        self.tell: Callable[[str], None] = lambda text: None
        """Called with a message for the user."""
        self._log_files = BestEffort("log files", self._told)

    @property
    def running(self) -> list[str]:
        """Names of the children that have not been reaped."""
        return list(self._children)

    def pid(self, name: str) -> int:
        """Return a child's process id."""
        return self._children[name].pid

    def log_path(self, name: str) -> Path:
        """Return the path of a child's log, to which all processes of that name append."""
        return self._logs / f"{name}.log"

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start `python -P -m module arguments` as a child with the lifeline, without a terminal or its signals."""
        # A child whose log cannot be opened is started without one. If the system has no room for one more process or
        # thread, the next `reap` returns the child as ended with IO_ERROR, and it is tried again. Likewise if the
        # script's folder is gone, but with CONFIGURATION unless the error may pass.
        assert name not in self._children, f"{name} runs already"
        try:
            if module == MODULES["worker"] and self.start_thread is not None:
                self._children[name] = self.start_thread(name, arguments)
            else:
                self._children[name] = self._spawn(name, module, arguments, {})
        except (OSError, RuntimeError) as error:
            code, why = ExitCode.IO_ERROR, why_failed(error) if isinstance(error, OSError) else str(error)
            if isinstance(error, OSError) and error.errno not in NO_ROOM:
                if self.script is None or error.filename != self.script.folder:
                    raise
                why = f"the folder that the script was started in, {error.filename}, cannot be entered: {why}"
                code = code if is_transient(error) else ExitCode.CONFIGURATION
            self._ended += 1
            self._not_started.append(Ended(name, code, f"it cannot be started: {why}", self._ended))

    def reap(self) -> list[Ended]:
        """Return the children that have ended since the last call."""
        ended, self._not_started = self._not_started, []
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[name]
                self._ended += 1
                if isinstance(child, ThreadChild) and child.is_left_over:
                    self.tell(f"warning: {name} is given up, and its thread ends when its model returns")
                ended.append(self._end_of(name, child, code))
        return ended

    def coming_ends(self) -> Mapping[str, float]:
        """Return nothing: this machine's end is the launcher's, too."""
        return {}

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to a child if it is running."""
        child = self._children.get(name)
        if child is not None:
            self._asked_to_end.add(name)
            child.terminate()

    def kill(self, name: str) -> None:
        """Send SIGKILL to a child if it is running."""
        child = self._children.get(name)
        if child is not None:
            child.kill()

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End every child: workers first, since they need the others to finish; SIGKILL after `grace_s`."""
        end_in_turn(self, grace_s)
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()  # returns: nothing survives SIGKILL
        self.reap()  # warns of threads that do
        if self._forks is not None:
            self._forks.close()
        for descriptor in (self._lifeline_read, self._lifeline_write):
            os.close(descriptor)

    def _spawn(self, name: str, module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Process:
        arguments = [*arguments, "--lifeline", str(self._lifeline_read)]
        # -P: a file of the working directory with the name of one of our packages does not shadow it.
        command, folder = [sys.executable, "-P", "-m", module, *arguments], ""
        is_script = module == MODULES["worker"] and self.script is not None
        if is_script and self.script is not None:
            command, folder = [*self.script.words], self.script.folder
            variables = {**variables, WORKER_ARGUMENTS: json.dumps(arguments)}
            os.stat(folder)  # raises if it is gone: a forked child would end with a traceback
        environ = {**os.environ, **self.variables.get(module, {}), **variables}
        _check_room()
        with self._opened_log(name) as log:
            self._log_starts[name] = log.tell()
            if time.monotonic() >= self._fork_from_s and (not is_script or _is_plain(command)):
                try:
                    preload = dict.fromkeys(SERVICES, "") if module in MODULES.values() else {}
                    preload |= script_modules(sys.modules) if is_script else {}
                    return self._server().start(Request(command, folder or _folder(), environ, preload), log.fileno())
                except ForkServerLost as error:
                    pause_s = math.inf if isinstance(error, Unsupported) else WITHOUT_SERVER_S
                    self._fork_from_s = time.monotonic() + pause_s
                    how_long = "" if math.isinf(pause_s) else f" for {pause_s:.0f} s"
                    log_is = (
                        "" if isinstance(error, Unsupported) else f" (log: {short_path(self.log_path(FORK_SERVER))})"
                    )
                    self.tell(f"warning: {error}{log_is}: processes are started anew{how_long}, which takes longer")
            return subprocess.Popen(
                command,
                cwd=folder or None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._lifeline_read,),
                start_new_session=True,
                env=environ,
            )

    def _server(self) -> Forks:
        """Return the fork server; its libraries have one thread each, and all modules' variables at their import."""
        if self._forks is None:
            read = {name: value for variables in self.variables.values() for name, value in variables.items()}
            self._forks = Forks(
                self._lifeline_read,
                {**read, **thread_variables(1, {}, override=True)},
                self.script.folder if self.script is not None else "",
                partial(self._opened_log, FORK_SERVER),
            )
        return self._forks

    def _opened_log(self, name: str) -> BinaryIO:
        try:
            log = self.log_path(name).open("ab")
        except OSError as error:
            self._log_files.failed(why_failed(error))
            return Path(os.devnull).open("ab")
        self._log_files.succeeded()
        return log

    def _told(self, text: str, over: bool) -> None:
        self.tell(text if over else f"warning: {text}")

    def _end_of(self, name: str, child: Process | ThreadChild, code: int) -> Ended:
        """Return a child's end and its reason; a script that ends before it is a worker is wrongly configured."""
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        asked = name in self._asked_to_end
        self._asked_to_end.discard(name)
        if isinstance(child, ThreadChild):
            return Ended(name, code, f"{child.said} ({how})" if child.said else how, self._ended)
        lines = last_output(self.log_path(name), self._log_starts[name])
        said = _last_words(lines, name) if code > 0 else ""
        reason = f"{said} ({how})" if said else how
        no_script = self.script is None or not name.startswith("worker") or _by_us(lines, name)
        if no_script or asked or code < 0 or code in RETRIED:
            return Ended(name, code, reason, self._ended)
        return Ended(name, ExitCode.CONFIGURATION, f"{reason}; {WORKER_IS_SCRIPT}", self._ended)


def _is_plain(command: Sequence[str]) -> bool:
    """Tell whether a command is `python SCRIPT.py ARGUMENTS`, by this Python and without its flags."""
    return command[0] == sys.executable and not command[1].startswith("-") and command[1].endswith(".py")


def _folder() -> str:
    """Return the working directory, or "" if it is gone."""
    with suppress(OSError):
        return os.getcwd()
    return ""


def _check_room() -> None:
    """Raise RuntimeError where no thread can be started: Popen would fail after a fork, and gRPC abort."""
    probe = threading.Thread(target=lambda: None)
    probe.start()
    probe.join()


def last_output(log: Path, start_bytes: int) -> list[str]:
    """Return the last lines of a process whose log begins at `start_bytes`."""
    try:
        with log.open("rb") as file:
            file.seek(max(start_bytes, log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _last_words(lines: list[str], name: str) -> str:
    """Return the last error output of a process, or ""."""
    marked = [line.partition(": ")[2] for line in lines if line.startswith(f"parashard {name}: ")]
    if marked:
        return marked[-1]
    words = [line for line in lines if line.strip() and INFO not in line]  # a log line is no reason
    return words[-1][:300] if words else ""


def _by_us(lines: list[str], name: str) -> bool:
    """Tell whether a process ended in our code, rather than in a script before its call."""
    return any(line.startswith(f"parashard {name}: ") or INFO in line for line in lines)
