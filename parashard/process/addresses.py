"""Hosts, ports and addresses as text: HOST:PORT, addresses to listen on, ranges of ports, this machine's interfaces.

The kernel lists the interfaces' addresses over netlink (rtnetlink(7)). An IPv6 address is in brackets before a port, as
in [::1]:7000, and without them alone. Errors are `ConfigurationError`.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from parashard.errors import ConfigurationError, Unavailable, shortened

ANSWER_S = 2.0
ANSWER_BYTES = 1 << 16

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_DONE, _ERROR, _NEW_ADDRESS, _GET_ADDRESS = 3, 2, 20, 22
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UNUSABLE = 0x40 | 0x08  # an IPv6 address that is being checked for a duplicate, or has one


class Interface(NamedTuple):
    """One address of an interface."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return this machine's addresses with their interfaces, in the kernel's order; after an error, those so far."""
    found: list[Interface] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(ANSWER_S)
            body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            kernel.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESS, _REQUEST_DUMP, 1, 0) + body)
            more = True
            while more:
                listed, more = listed_in(kernel.recv(ANSWER_BYTES))
                found += [Interface(socket.if_indextoname(index), address) for index, address in listed]
    except OSError:  # a sandbox without netlink, or an interface that went meanwhile
        return found
    return found


def listed_in(answer: bytes) -> tuple[list[tuple[int, str]], bool]:
    """Return the interfaces' numbers and addresses in one piece of the kernel's answer, and whether more comes."""
    found: list[tuple[int, str]] = []
    at = 0
    while at + _HEADER.size <= len(answer):
        length, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind in (_DONE, _ERROR) or length < _HEADER.size:
            return found, False
        if kind == _NEW_ADDRESS:
            found += _address_in(answer[at + _HEADER.size : at + length])
        at += -(-length // 4) * 4
    return found, True


def _address_in(body: bytes) -> Iterator[tuple[int, str]]:
    family, _, flags, _, index = _ADDRESS.unpack_from(body)
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & _UNUSABLE:
        return
    by_kind: dict[int, bytes] = {}
    at = _ADDRESS.size
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        by_kind[kind] = body[at + _ATTRIBUTE.size : at + length]
        at += max(4, -(-length // 4) * 4)
    own = by_kind.get(_IFA_LOCAL, by_kind.get(_IFA_ADDRESS))  # on a point-to-point link the other is the peer's
    if own is not None:
        yield index, str(ipaddress.ip_address(own))


PORT_MAX = 65535
AUTO = "auto"
OF_INTERFACE = "interface:"
WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that stand for all addresses of this machine, and that nobody can connect to."""

_Listening = TypeVar("_Listening")


@dataclass(frozen=True)
class PortRange:
    """A range of ports to take a free one from; written as 7000-7099."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


Port = int | PortRange
"""A port, 0 for any that is free, or a range."""


def port_of(text: str) -> Port:
    """Read 7000, 0 or 7000-7099."""
    first, dash, last = text.partition("-")
    if not dash or not first:
        return _number(text, 0)
    found = PortRange(_number(first, 1), _number(last, 1))
    if found.first > found.last:
        raise ConfigurationError(f"{text} is no range of ports: the first comes first, as in 7000-7099")
    return found


def listen(port: Port, on: Callable[[int], _Listening]) -> _Listening:
    """Listen on a port, or on the first free one of a range, by a call of `on`, and return its result."""
    # Raises Unavailable if no port is free; `on` raises it for a port that is taken.
    if isinstance(port, int):
        return on(port)
    for number in range(port.first, port.last):
        try:
            return on(number)
        except Unavailable:  # another process has it
            continue
    try:
        return on(port.last)
    except Unavailable as error:
        raise Unavailable(f"no port of {port} is free; of the last: {error.message}") from None


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str, least_port: int = 1) -> tuple[str, int]:
    """Return the host, without brackets, and the port of host:port."""
    host, _, number = text.rpartition(":")
    if not host or not (number.isascii() and number.isdecimal()) or not least_port <= int(number) <= PORT_MAX:
        raise ConfigurationError(f"{text!r} is not HOST:PORT with a port of {least_port} to {PORT_MAX}")
    return _bare(host, text), int(number)


def is_ray_address(text: str) -> bool:
    """Tell whether `ray.init` takes an address; of Ray's client (ray://) it does, too."""
    with suppress(ConfigurationError):
        return text in ("auto", "local") or text.startswith("ray://") or bool(split_address(text))
    return False


def _bare(host: str, text: str) -> str:
    bare = host[1:-1] if host[0] == "[" and host[-1] == "]" else host
    if any(mark in bare for mark in "[]") or (":" in host and bare == host):
        raise ConfigurationError(f"{text!r} is not HOST:PORT: an IPv6 address is in brackets, as in [::1]:7000")
    return bare


def advertised(text: str) -> str:
    """Check HOST:PORT, or HOST alone, an IPv6 address in brackets; its port is then the one that we listen on."""
    host = _host_alone(text)
    host = split_address(text)[0] if host is None else host
    if host in (*WILDCARDS, AUTO) or "%" in host:
        raise ConfigurationError(f"found {text!r}; allowed: a HOST or HOST:PORT at which others reach this process")
    checked_host(host)
    return text


def advertised_for(advertise: str | None, listening: str) -> str:
    """Return the address to advertise for a listening one, from a user's `advertise`."""
    if advertise is None or not listening:
        return listening
    host = _host_alone(advertise)
    return advertise if host is None else join_address(host, split_address(listening)[1])


def advertised_beside(advertise: str | None, listening: str) -> str:
    """Return the address to advertise for a second port: an advertised HOST applies to it, a HOST:PORT does not."""
    return advertised_for(advertise, listening) if names_host(advertise) else listening


def _host_alone(text: str) -> str | None:
    """Return a host that is written without a port, or None if it has one."""
    if text[:1] == "[" and text[-1:] == "]":
        return text[1:-1]
    return None if ":" in text else text or None


def names_host(advertise: str | None) -> bool:
    """Tell whether an advertised address is a HOST, which applies to all ports of a process."""
    return advertise is not None and _host_alone(advertise) is not None


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of a socket that listens on a host: IPv6 for an IPv6 address, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Tell whether a host is a loopback address or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_address(text: str) -> str:
    """Return the IP address that another machine reports as its own; ConfigurationError if it is none."""
    try:
        found = ipaddress.ip_address(text)
        return str(getattr(found, "ipv4_mapped", None) or found)
    except ValueError:
        raise ConfigurationError(f"its address is said to be {shortened(text)!r}; allowed: an IP address") from None


def same_address(one: str, other: str) -> bool:
    """Tell whether two hosts are the same address, in any notation; zones are ignored, being local to a machine."""
    return _plain(one) == _plain(other)


def _plain(host: str) -> str:
    with suppress(ConfigurationError):
        host = checked_address(host)
    return host.partition("%")[0]


def boot_id() -> str:
    """Return the random id of this boot, which other machines do not know; "" if the kernel has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def own_host(text: str) -> str:
    """Return the host to listen on for a user's host: itself, or for `auto` and `interface:` an address found here."""
    # `auto` is the address of this machine's own name: a container's address is unknown when its command line is
    # written, and engines put its name into its /etc/hosts. `interface:eth1` is the address of a network interface, and
    # `interface:10.1.0.0/16` the one in a network, whatever its interface is called.
    if text == AUTO:
        return _of_own_name()
    if text.startswith(OF_INTERFACE):
        return address_on(text.removeprefix(OF_INTERFACE), interfaces())
    return checked_host(text)


def checked_host(text: str) -> str:
    """Return a host; ConfigurationError if it has a port, or brackets around an IPv6 address."""
    plain = not any(mark in "[]/" or mark.isspace() for mark in text)
    if ":" in text or set(text) <= set("0123456789."):  # not 127.1, which gRPC does not take
        with suppress(ValueError):
            ipaddress.ip_address(text)
            return text
        plain = False
    if not plain:
        allowed = "an address or a name without a port, an IPv6 address without brackets, as ::1"
        raise ConfigurationError(f"{shortened(text)!r} is no host; allowed: {allowed}")
    return text


def _of_own_name() -> str:
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)  # IPv4 first: every machine of a mixed network has it
    except OSError as error:
        failure = error
    try:
        for *_, address in socket.getaddrinfo(name, None, socket.AF_INET6, socket.SOCK_STREAM):
            if not ipaddress.ip_address(str(address[0])).is_link_local:
                return str(address[0])
    except (OSError, ValueError):
        pass
    raise ConfigurationError(
        f"auto: this machine's own name {name!r} stands for no address ({failure}); name an address instead"
    )


def address_on(wanted: str, found: list[Interface]) -> str:
    """Return the address of the interface with this name, or in this network; IPv4 before IPv6."""
    usable = [one for one in found if not ipaddress.ip_address(one.address).is_link_local]
    if "/" in wanted:
        try:
            network = ipaddress.ip_network(wanted, strict=False)
        except ValueError as error:
            raise ConfigurationError(f"interface {wanted!r} is no network: {error}") from None
        fitting = [one.address for one in usable if ipaddress.ip_address(one.address) in network]
    else:
        fitting = [one.address for one in usable if one.name == wanted]
    if not fitting:
        there = ", ".join(f"{one.name} ({one.address})" for one in usable) or "none"
        raise ConfigurationError(f"this machine has no address on the interface {wanted!r}; there are: {there}")
    return sorted(fitting, key=lambda address: ":" in address)[0]


def _number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= PORT_MAX):
        raise ConfigurationError(f"{text} is not a port: allowed are {least} to {PORT_MAX}, or a range as 7000-7099")
    return int(text)
