"""Stop a service once this machine no longer has the address that it listens on.

DHCP, a VPN or a move to another network takes an address away. A socket that listens on it stays open, and nothing
reaches it any more; but the service's own calls go on, so that the coordinator hears from a shard that nobody can push
to. So a service whose address is gone ends, and is started again where it can be reached.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from collections.abc import Callable

from parashard.process.shell import ExitCode, Stop

LOOK_S = 1.0
GONE_S = 5.0  # an interface that goes down and comes up again has its address within a moment


def watch_address(host: str, stop: Stop) -> None:
    """Start a thread that stops this process, for a restart, once this machine lacks the address of a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = str(socket.getaddrinfo(host, None, family)[0][4][0])
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        watch = threading.Thread(target=stop_without_address, args=(address, stop), name="own-address", daemon=True)
        watch.start()


def stop_without_address(
    address: str, stop: Stop, *, has: Callable[[str], bool] | None = None, look_s: float = LOOK_S
) -> None:
    """Request a stop with `ExitCode.RETRY` once the address has been gone for `GONE_S` of looks."""
    gone_s, has = 0.0, has or has_address
    while not stop.wait(look_s):
        gone_s = 0.0 if has(address) else gone_s + LOOK_S
        if gone_s >= GONE_S:
            stop.ask(f"this machine does not have the address {address} any more", ExitCode.RETRY)


def has_address(address: str) -> bool:
    """Return whether this machine has an IPv4 or IPv6 address, in numeric form."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:  # no free descriptor, for example, proves nothing
        return error.errno != errno.EADDRNOTAVAIL
    return True
