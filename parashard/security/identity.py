"""Who a certificate says that its holder is: URIs `parashard://ROLE/NAME` among its alternative names.

Owns the form of these URIs. Does not know how a certificate is checked, nor what a role may do: that is TLS's and
`parashard.security.roles`'. Called by both, and by what issues certificates.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

SCHEME = "parashard"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_URI = re.compile(rf"{SCHEME}://([a-z]+)/({NAME.pattern})")


class Role(enum.StrEnum):
    """What a process is in a job."""

    SHARD = "shard"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    OPERATOR = "operator"  # a person's command line, and the launcher


SERVING = frozenset({Role.SHARD, Role.COORDINATOR})
"""Roles whose processes are connected to; no other role's certificate is issued for a server."""


@dataclass(frozen=True, order=True)
class Identity:
    """One role, and whose: the name tells people and logs who it is, and decides nothing."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @property
    def uri(self) -> str:
        """The URI that stands in a certificate."""
        return f"{SCHEME}://{self.role}/{self.name}"


def identities_in(uris: Iterable[str]) -> tuple[Identity, ...]:
    """Return the identities among the URIs of a certificate, in order; what is none of ours gives no right.

    >>> [str(identity) for identity in identities_in(["parashard://worker/worker-0", "spiffe://else/where"])]
    ['worker/worker-0']
    """
    known = {str(role) for role in Role}
    matches = [match for uri in uris if (match := _URI.fullmatch(uri)) and match[1] in known]
    return tuple(Identity(Role(match[1]), match[2]) for match in matches)


def in_words(identities: Iterable[Identity]) -> str:
    """Return identities for an error's message."""
    return ", ".join(map(str, identities)) or "none"
