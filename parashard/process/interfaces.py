"""The addresses of this machine's network interfaces, as the kernel lists them over netlink (rtnetlink(7))."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

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
    """Return every address of this machine with its interface, in the kernel's order; none where it does not say."""
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
    own = by_kind.get(_IFA_LOCAL, by_kind.get(_IFA_ADDRESS))  # of a point-to-point link the other is the peer's
    if own is not None:
        yield index, str(ipaddress.ip_address(own))
