"""The shell around a service process: arguments that all share, signals, the lifeline, logging, exit codes.

Each service's `__main__` builds its objects and hands a function to `run_service`; nothing else reads the environment,
installs signal handlers or configures logging.
"""

from __future__ import annotations

import argparse
import ctypes
import enum
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import structlog

from parashard import failpoints
from parashard.errors import ConfigurationError, Fenced, ParashardError, RetryLater
from parashard.security.credentials import Credentials
from parashard.security.identity import Role

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TLS_VARIABLE = "PARASHARD_TLS_DIR"


class ExitCode(enum.IntEnum):
    """What a process's exit tells the one who started it."""

    DONE = 0
    FAILED = 1
    CONFIGURATION = 2  # do not start it again: the same thing would happen
    FENCED = 3  # another has its place, or it belongs to another run; to start it again helps once that has changed
    RETRY = 75  # start it again later (sysexits.h: temporary failure)


def exit_code_of(error: ParashardError) -> ExitCode:
    """Return the exit code that an error ends a process with."""
    if isinstance(error, ConfigurationError):
        return ExitCode.CONFIGURATION
    if isinstance(error, Fenced):
        return ExitCode.FENCED
    if isinstance(error, RetryLater):
        return ExitCode.RETRY
    return ExitCode.FAILED


class Stop:
    """Says that the process should end, and why. Set by a signal, awaited by the service.

    Parameters
    ----------
    exit_code : int
        What a process ends with that did as it was asked.
    """

    def __init__(self, exit_code: int = ExitCode.DONE) -> None:
        self.event = threading.Event()
        self.reason = ""
        self.exit_code = exit_code

    def ask(self, reason: str) -> None:
        """Ask the process to end; the first reason stays."""
        if not self.event.is_set():
            self.reason = reason
            self.event.set()

    @property
    def asked(self) -> bool:
        """The process should end."""
        return self.event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the request, at most `timeout_s`; return whether it came."""
        return self.event.wait(timeout_s)


def service_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every service takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--host",
        type=own_host,
        default="127.0.0.1",
        help="address to listen on; auto: what this machine's own name stands for (default: %(default)s)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="allow a --host off loopback without --tls-dir: open to everybody"
    )
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(TLS_VARIABLE) or None,  # of which argparse makes a Path, too
        help=f"folder with ca.pem, cert.pem, key.pem: talk inside mutual TLS (default: {TLS_VARIABLE})",
    )
    parser.add_argument("--port", type=port, default=0, help="gRPC port; 0 picks a free one")
    parser.add_argument(
        "--http-port", type=port, default=0, help="port of /metrics, /livez, /readyz; 0 picks a free one"
    )
    parser.add_argument(
        "--advertise",
        type=address,
        metavar="HOST:PORT",
        help="address to tell others, where it is not the one we listen on",
    )
    parser.add_argument("--address-file", type=Path, help="file to write the address we listen on into, as JSON")
    parser.add_argument(
        "--stopped-exit-code",
        type=exit_code,
        default=int(ExitCode.DONE),
        metavar="CODE",
        help="exit code after SIGTERM or SIGINT, where 0 would say that nobody need take its place (default: 0)",
    )
    parser.add_argument("--lifeline", type=int, help="end when this inherited pipe closes: its writer is our parent")
    return parser


def port(text: str) -> int:
    """Read a port from the command line; gRPC would take 70000 for 4464."""
    number = int(text)
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"{number} is not a port: allowed are 0 to 65535")
    return number


def own_host(text: str) -> str:
    """Read a host from the command line; `auto` is the IPv4 address that this machine's own name stands for.

    A container cannot know its address when its command line is written; engines put its name into its /etc/hosts.
    """
    if text != "auto":
        return text
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"auto: this machine's own name {name!r} stands for no IPv4 address ({error}); name an address instead"
        ) from None


def exit_code(text: str) -> int:
    """Read an exit code from the command line; the system would take 256 for 0."""
    number = int(text)
    if not 0 <= number < 256:
        raise argparse.ArgumentTypeError(f"{number} is not an exit code: allowed are 0 to 255")
    return number


def address(text: str) -> str:
    """Read host:port from the command line."""
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal() or not port(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 1 to 65535")
    return text


def told_address(arguments: argparse.Namespace, listening: str, data_listening: str = "") -> str:
    """Write where a service listens into its address file, if it has one; return the address that it tells others.

    Parameters
    ----------
    arguments : Namespace
        With `advertise` and `address_file`, as `service_arguments` reads them.
    listening : str
        host:port, once the service listens there.
    data_listening : str
        The same of its stream server; empty: it has none.

    Raises
    ------
    ConfigurationError
        If the file cannot be written.
    """
    if arguments.address_file is not None:
        write_address(arguments.address_file, {"address": listening, "data_address": data_listening})
    return arguments.advertise or listening


def write_address(path: Path, content: dict[str, str | int]) -> None:
    """Write an address file whole: whoever reads it finds the old content or the new.

    Raises
    ------
    ConfigurationError
        If it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(content))
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def credentials_in(folder: Path | None) -> Credentials | None:
    """Return the credentials in a folder, None where there is no folder."""
    return None if folder is None else Credentials(folder)


def credentials_of(arguments: argparse.Namespace, role: Role) -> Credentials | None:
    """Return the credentials that a service was given, None without `--tls-dir`; they must have the service's role.

    Raises
    ------
    ConfigurationError
        If the folder or the role in it is not right, or there is none and the service would listen off loopback.
    """
    credentials = credentials_in(arguments.tls_dir)
    if credentials is not None:
        credentials.require(role)
    check_host(arguments.host, arguments.insecure, credentials)
    return credentials


def check_host(host: str, insecure: bool, credentials: Credentials | None = None) -> None:
    """Refuse to listen where strangers could reach us, or on an address that cannot be told to others.

    Raises
    ------
    ConfigurationError
        If the host is off loopback without credentials or `insecure`, or stands for every address of the machine.
    """
    if host in ("0.0.0.0", "::", ""):
        raise ConfigurationError(
            f"host {host!r} is no address that others could connect to; name one of this machine's"
        )
    if credentials is None and not insecure and not _is_loopback(host):
        raise ConfigurationError(
            f"host {host!r} is off loopback, and there are no credentials; allowed: --tls-dir, or --insecure on a "
            "network where everyone is trusted"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_service(
    role: str, lifeline: int | None, serve: Callable[[Stop], ExitCode], stopped_exit_code: int = ExitCode.DONE
) -> int:
    """Run a service until it ends, and return its exit code: `stopped_exit_code` where it ended well, as it was asked.

    SIGTERM and SIGINT ask it to stop; so does nothing else, except that a closed lifeline ends the process at once. An
    error of ours is told in one line on standard error.
    """
    configure_logging(role)
    threading.excepthook = _end_with_thread
    stop = Stop(stopped_exit_code)
    for number in (signal.SIGTERM, signal.SIGINT):
        # On a thread of its own: the handler may interrupt the main thread inside the very lock that `ask` takes.
        signal.signal(
            number, lambda received, _: threading.Thread(target=stop.ask, args=(_signal_name(received),)).start()
        )
    if lifeline is not None:
        _die_with_parent()
        threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    log = structlog.get_logger(role)
    try:
        failpoints.arm(os.environ)
        code = serve(stop)
    except ParashardError as error:
        if stop.asked and isinstance(error, RetryLater):
            return stop.exit_code  # it was waiting for somebody when it was asked to end
        code = exit_code_of(error)
        log.error("ended", exit_code=int(code), error=str(error))
        print(f"parashard {role}: {error}", file=sys.stderr, flush=True)  # noqa: T201  # the launcher shows the last line
    return stop.exit_code if stop.asked and code is ExitCode.DONE else int(code)


def configure_logging(role: str) -> None:
    """Write structured lines to standard error: time, level, event, then key=value."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=f"{role} %(levelname)s %(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def end_process(code: int) -> NoReturn:
    """End with this exit code at once, past the interpreter's own slow farewell, in which a signal would still kill."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _end_with_thread(died: threading.ExceptHookArgs) -> None:
    """End the process when one of its threads dies: half a process would look alive and do nothing."""
    structlog.get_logger("process").critical("thread-died", thread=str(died.thread), exc_info=died.exc_value)
    os._exit(ExitCode.FAILED)


def _die_with_parent() -> None:
    """Have the kernel kill this process with its parent: the lifeline's thread cannot run in one that is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(ExitCode.RETRY)
