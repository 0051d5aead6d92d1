"""Arguments that all services share: where to listen, the advertised address, credentials.

Nothing else reads the environment, except `parashard.process.shell`, which arms failpoints,
`parashard.launch.run_folders`, for the folder of runs, `parashard.api.jobs`, for what a script leaves open,
`parashard.telemetry.exporters`, for OpenTelemetry's variables, and the callers of `parashard.process.compute_threads`,
for numbers of threads. Called by each service's `__main__`, and by commands that connect.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
import socket
import threading
from numbers import Real
from pathlib import Path
from typing import Any

from parashard.errors import ConfigurationError, StoreFailed
from parashard.process.best_effort import why_failed
from parashard.process.durable import replace_durably
from parashard.process.full_disk import disk_failed, retry_while_disk_fails
from parashard.process.shell import ExitCode, LogFormat
from parashard.security.credentials import Credentials
from parashard.security.identity import Role

TLS_VARIABLE = "PARASHARD_TLS_DIR"
TRACE_VARIABLE = "PARASHARD_TRACE"
TIMEOUT_S_MAX = 1e9
"""Of one wait; the system's waits take little more."""


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
        "--insecure", action="store_true", help="allow a --host off loopback without --tls-dir: open to any client"
    )
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(TLS_VARIABLE) or None,  # argparse converts a default, too
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
        help="exit code after SIGTERM or SIGINT, where 0 would mean that no restart is needed (default: 0)",
    )
    parser.add_argument(
        "--trace",
        action="store_const",
        const="1",
        default=os.environ.get(TRACE_VARIABLE, ""),  # as it is: `parashard.telemetry.tracing` checks it
        help=f"send spans of every step by OpenTelemetry (default: {TRACE_VARIABLE}); docs/tracing.md",
    )
    parser.add_argument(
        "--log-format",
        type=LogFormat,
        choices=list(LogFormat),
        default=LogFormat.LOGFMT,
        help="how events are written to standard error: text, logfmt or json (default: %(default)s)",
    )
    parser.add_argument("--lifeline", type=int, help="end when this inherited pipe closes: its writer is our parent")
    return parser


def port(text: str) -> int:
    """Read a port from the command line; gRPC would take 70000 for 4464."""
    number = int(text)
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"{number} is not a port: allowed are 0 to 65535")
    return number


def seconds(text: str) -> float:
    """Read a time from the command line."""
    found = float(text)
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: allowed are 0 and more")
    return found


def checked_timeout_s(timeout_s: Any) -> float:
    """Return a number of seconds to wait for; one below 0 is as good as 0.

    Raises
    ------
    ConfigurationError
        If it is none.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not timeout_s <= TIMEOUT_S_MAX:
        raise ConfigurationError(
            f"timeout_s must be a number of seconds of at most {TIMEOUT_S_MAX:g}, found {timeout_s!r}"
        )
    return float(timeout_s)


def finite(value: float | None) -> float | None:
    """Return the number of a command's option; NaN passes the bounds of every option, and is refused here."""
    if value is not None and not math.isfinite(value):
        raise ConfigurationError(f"an option is {value}; allowed are finite numbers")
    return value


def own_host(text: str) -> str:
    """Read a host from the command line; `auto` is the IPv4 address of this machine's own name.

    A container's address is unknown when its command line is written; engines put its name into its /etc/hosts.
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
    """Read host:port from the command line; an IPv6 address is in brackets, as in [::1]:7000."""
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal() or not port(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port of 1 to 65535")
    if ":" in host.removeprefix("[").removesuffix("]") and not (host[0] == "[" and host[-1] == "]"):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT: an IPv6 address is in brackets, as in [::1]:7000")
    return text


def advertised_address(
    arguments: argparse.Namespace, listening: str, data_listening: str = "", stopping: threading.Event | None = None
) -> str:
    """Write a service's address file, if it has one; return the address that it advertises.

    Parameters
    ----------
    arguments : Namespace
        With `advertise` and `address_file`, as `service_arguments` reads them.
    listening : str
        host:port that the service listens at.
    data_listening : str
        The same of its stream server; empty: it has none.
    stopping : Event, optional
        As of `write_address`.

    Raises
    ------
    ConfigurationError, NotReady
        As `write_address`.
    """
    if arguments.address_file is not None:
        write_address(arguments.address_file, {"address": listening, "data_address": data_listening}, stopping)
    return arguments.advertise or listening


def write_address(path: Path, content: dict[str, str | int], stopping: threading.Event | None = None) -> None:
    """Replace an address file atomically; retry while the disk fails, because the process is unreachable without it.

    Raises
    ------
    ConfigurationError
        If it cannot be written there at all.
    NotReady
        If `stopping` was set meanwhile.
    """
    text = json.dumps(content).encode()

    def write() -> None:
        replace_durably(path, lambda temporary: temporary.write_bytes(text))

    try:
        retry_while_disk_fails(write, "address files", stopping or threading.Event())
    except OSError as error:
        if disk_failed(error):
            raise StoreFailed(f"{path} cannot be written: {why_failed(error)}") from error
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def tls_folder(given: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of credentials that a program names, else the environment's; None: there is none."""
    found = os.environ.get(TLS_VARIABLE) if given is None else os.fspath(given)
    return Path(found) if found else None


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
    """Refuse to listen off loopback without authentication, or on a wildcard address.

    Raises
    ------
    ConfigurationError
        If the host is off loopback without credentials or `insecure`, or stands for every address of the machine.
    """
    if host in ("0.0.0.0", "::", ""):
        raise ConfigurationError(
            f"host {host!r} is no address that others could connect to; name one of this machine's"
        )
    if credentials is None and not insecure and not is_loopback(host):
        raise ConfigurationError(
            f"host {host!r} is off loopback, and there are no credentials; allowed: --tls-dir (tls_dir= of a script's "
            "strategy), or --insecure (cluster.insecure) on a network where everyone is trusted"
        )


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine to itself, and nothing to others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
