"""The shell around a service process: signals, the lifeline, logging, exit codes, a clock for its waits.

Each service's `__main__` builds its objects and hands a function to `run_service`; nothing else installs handlers of
signals or configures logging.
"""

from __future__ import annotations

import ctypes
import enum
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from parashard.errors import ConfigurationError, Fenced, JobFailed, ParashardError, RetryLater, shortened
from parashard.process import failpoints
from parashard.process.best_effort import lossy
from parashard.process.durable import disk_failed
from parashard.process.logs import as_json, as_logfmt, as_text, configure_logging, log

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ERROR_CHARACTERS_MAX = 2000  # of the line with the reason for a process's end
FILES_WANTED = 4096  # 1,024 connections at each of a shard's three ports, 64 at the HTTP port, and files


class ExitCode(enum.IntEnum):
    """Exit codes of a process, by their meaning to its launcher."""

    DONE = 0
    FAILED = 1
    CONFIGURATION = 2  # do not restart: it would fail again
    FENCED = 3  # superseded by a newer incarnation, or of another run: a restarted service claims a new incarnation
    JOB_FAILED = 4  # of a worker: the job has failed; do not restart
    IO_ERROR = 74  # restart later, without a bound: its disk failed (sysexits.h: input/output error)
    RETRY = 75  # restart later (sysexits.h: temporary failure)


def exit_code_of(error: ParashardError) -> ExitCode:
    """Return the exit code for an error."""
    if isinstance(error, ConfigurationError):
        return ExitCode.CONFIGURATION
    if isinstance(error, Fenced):
        return ExitCode.FENCED
    if isinstance(error, RetryLater):
        return ExitCode.RETRY
    if disk_failed(error):
        return ExitCode.IO_ERROR
    return ExitCode.FAILED


def ended_by(error: ParashardError, stop: Stop) -> int:
    """Return the exit code of a service that an error has ended."""
    if stop.asked and isinstance(error, RetryLater):
        return stop.exit_code  # it was waiting for another process when the stop was requested
    return ExitCode.JOB_FAILED if isinstance(error, JobFailed) else exit_code_of(error)


class LogFormat(enum.StrEnum):
    """Format of a process's log."""

    TEXT = "text"
    LOGFMT = "logfmt"
    JSON = "json"


class Stop:
    """A request to end the process, and its reason. Set by a signal, awaited by the service."""

    def __init__(self, exit_code: int = ExitCode.DONE) -> None:
        self.event = threading.Event()
        self.reason = ""
        self.exit_code = exit_code

    def ask(self, reason: str, exit_code: int | None = None) -> None:
        """Request the process to end, with another exit code if one is given; the first request is kept."""
        if not self.event.is_set():
            self.reason = reason
            self.exit_code = self.exit_code if exit_code is None else exit_code
            self.event.set()

    @property
    def asked(self) -> bool:
        """Whether the process should end."""
        return self.event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the request, at most `timeout_s`; return whether it came."""
        return self.event.wait(timeout_s)


class AwakeClock:
    """Monotonic seconds without this process's pauses, as by SIGSTOP or a suspended machine.

    A gap of more than `stall_s` between two readings counts as a pause. The process received no message then, so its
    peers were not silent.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._lock = threading.Lock()
        self._read_s = clock()
        self._stood_still_s = 0.0

    def now_s(self) -> float:
        """Return the time now."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._read_s > self._stall_s:
                self._stood_still_s += now_s - self._read_s
            self._read_s = now_s
            return now_s - self._stood_still_s


def run_service(
    role: str,
    lifeline: int | None,
    serve: Callable[[Stop], ExitCode],
    stopped_exit_code: int = ExitCode.DONE,
    log_format: LogFormat = LogFormat.LOGFMT,
) -> int:
    """Run a service until it ends, and return its exit code: `stopped_exit_code` if it stopped on request."""
    # SIGTERM and SIGINT request a stop; a closed lifeline ends the process at once. A `ParashardError` is printed in
    # one line on standard error.
    sys.stdout, sys.stderr = (
        lossy(sys.stdout, "output lines"),
        lossy(sys.stderr, "log lines"),
    )  # never raise now
    log_to_standard_error(log_format)
    _raise_files_limit()
    threading.excepthook = _end_with_thread
    stop = Stop(stopped_exit_code)
    for number in (signal.SIGTERM, signal.SIGINT):
        # On its own thread: the handler may interrupt the main thread while it holds the lock that `ask` takes.
        signal.signal(
            number,
            lambda received, _: threading.Thread(target=stop.ask, args=(signal.Signals(received).name,)).start(),
        )
    if lifeline is not None:
        die_with_parent()
        threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    try:
        failpoints.arm(os.environ)
        code: int = serve(stop)
    except ParashardError as error:
        code = ended_by(error, stop)
        if stop.asked and isinstance(error, RetryLater):
            return code
        if log_format is not LogFormat.TEXT:  # else the line below has the reason
            log.error("ended", exit_code=int(code), error=str(error))
        says = shortened(str(error), ERROR_CHARACTERS_MAX)
        print(f"parashard {role}: {says}", file=sys.stderr, flush=True)  # noqa: T201  # the launcher shows the last line
    except Exception:  # noqa: BLE001  # a bug; the interpreter's own exit would wait for threads that nothing ends
        traceback.print_exc()
        code = ExitCode.FAILED
    return stop.exit_code if stop.asked and code == ExitCode.DONE else int(code)


def _raise_files_limit() -> None:
    """Raise the limit of open files to cover all connections; unauthenticated peers could use up the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_RENDERERS = {LogFormat.TEXT: as_text, LogFormat.LOGFMT: as_logfmt, LogFormat.JSON: as_json}


def log_to_standard_error(log_format: LogFormat) -> None:
    """Write this process's log to standard error; writes to it never raise."""
    configure_logging(lossy(sys.stderr, "log lines"), _RENDERERS[log_format])


def end_process(code: int) -> NoReturn:
    """End with this exit code at once, without the interpreter's slow shutdown, during which a signal would kill."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # even if the flush fails


def _end_with_thread(died: threading.ExceptHookArgs) -> None:
    """End the process when one of its threads dies: it would look alive and do nothing."""
    try:
        log.critical("thread-died", thread=str(died.thread), exc_info=died.exc_value)
    finally:
        os._exit(ExitCode.FAILED)  # even if the log cannot be written


def die_with_parent() -> None:
    """Let the kernel kill this process with its parent: in a stopped process the lifeline's thread cannot run."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    finally:
        os._exit(ExitCode.RETRY)
