"""Find the credentials of a process or a program, and check the host that it listens on."""

from __future__ import annotations

import os
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.process.addresses import WILDCARDS, is_loopback, names_host
from parashard.process.starts import TLS_VARIABLE, Start
from parashard.security.credentials import Credentials
from parashard.security.identity import Role


def tls_folder(given: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of credentials that a program names, else the environment's, else None."""
    found = os.environ.get(TLS_VARIABLE) if given is None else os.fspath(given)
    return Path(found) if found else None


def credentials_in(folder: Path | None) -> Credentials | None:
    """Return the credentials in a folder, None where there is no folder."""
    return None if folder is None else Credentials(folder)


def credentials_of(start: Start, role: Role) -> Credentials | None:
    """Return a service's credentials, which must have its role; None without `--tls-dir`."""
    credentials = credentials_in(start.tls_dir)
    if credentials is not None:
        credentials.require(role)
    check_host(start.host, start.insecure, credentials, advertise=start.advertise)
    return credentials


def check_host(
    host: str, insecure: bool, credentials: Credentials | None = None, *, advertise: str | None = None
) -> None:
    """Refuse to listen off loopback without authentication, or on all addresses without one to advertise."""
    if host in WILDCARDS and not (host and names_host(advertise)):
        raise ConfigurationError(
            f"host {host!r} is no address that others could connect to; name one of this machine's, or of a service "
            "give --advertise HOST, too: what others are told in its place"
        )
    if credentials is None and not insecure and not is_loopback(host):
        raise ConfigurationError(
            f"host {host!r} is off loopback, and there are no credentials; allowed: --tls-dir (tls_dir= of a script's "
            "strategy), or --insecure (cluster.insecure) on a network where everyone is trusted"
        )
