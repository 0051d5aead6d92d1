"""Identities in certificates: URIs `parashard://ROLE/NAME` among the subject alternative names.

Owns the form of these URIs. Does not verify certificates (TLS does) nor decide what a role may do
(`parashard.security.roles`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

SCHEME = "parashard"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_URI = re.compile(rf"{SCHEME}://([a-z]+)/({NAME.pattern})")


class Role(enum.StrEnum):
    """What a process is in a job."""

    SHARD = "shard"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    OPERATOR = "operator"  # a person's command line, and the launcher
    SERVER = "server"  # `parashard serve`
    READER = "reader"  # who looks rows up in it, or subscribes


OF_A_JOB = (Role.SHARD, Role.WORKER, Role.COORDINATOR, Role.OPERATOR)
"""Roles of the processes that train, and of the people who watch them."""
SERVING = frozenset({Role.SHARD, Role.COORDINATOR, Role.SERVER})
"""Roles of servers; no other role gets a server certificate."""


class Identity(NamedTuple):
    """A role and a name; the name is for logs only."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @property
    def uri(self) -> str:
        """The URI in a certificate."""
        return f"{SCHEME}://{self.role}/{self.name}"


def identities_in(uris: Iterable[str]) -> tuple[Identity, ...]:
    """Return the identities among the URIs of a certificate, in order; other URIs are ignored.

    >>> [str(identity) for identity in identities_in(["parashard://worker/worker-0", "spiffe://else/where"])]
    ['worker/worker-0']
    """
    known = {str(role) for role in Role}
    matches = [match for uri in uris if (match := _URI.fullmatch(uri)) and match[1] in known]
    return tuple(Identity(Role(match[1]), match[2]) for match in matches)


def in_words(identities: Iterable[Identity]) -> str:
    """Return identities for an error's message."""
    return ", ".join(map(str, identities)) or "none"
