"""Names of peers: the identity in a certificate, without TLS the host of the connection.

They select the share that something counts in (`parashard.security.shares`) and nothing else: what a
peer may do is decided by `parashard.security.roles`. Called by `parashard.security.grpc_admission` and
`parashard_server.serving.stream_server`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import unquote

from parashard.security.identity import identities_in

IPV6_PREFIX = 64  # one subscriber's network, all of whose addresses it can use


def peer_of_certificate(uris: Sequence[str]) -> str:
    """Return the peer that a verified certificate names: its first identity; "" if it has none.

    >>> peer_of_certificate(["spiffe://else/where", "parashard://worker/worker-0", "parashard://operator/me"])
    'worker/worker-0'
    """
    return next((str(identity) for identity in identities_in(uris)), "")


def peer_of_host(host: str) -> str:
    """Return the peer that a host's address stands for; for IPv6 its network.

    >>> peer_of_host("192.0.2.1"), peer_of_host("2001:db8::1:2"), peer_of_host("::ffff:192.0.2.1")
    ('192.0.2.1', '2001:db8::/64', '192.0.2.1')
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


def host_in_grpc(name: str) -> str:
    """Return the host in what gRPC calls the other end of a connection; "" on a Unix socket.

    >>> host_in_grpc("ipv4:192.0.2.1:5000"), host_in_grpc("ipv6:%5B2001:db8::1%5D:5000"), host_in_grpc("unix:")
    ('192.0.2.1', '2001:db8::1', '')
    """
    kind, _, address = unquote(name).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
