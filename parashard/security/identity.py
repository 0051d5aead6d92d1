"""Identities in certificates, as URIs `parashard://ROLE/NAME` among alternative names, and what each role may call.

Owns the form of these URIs and the table of calls; a method that is not in it is always refused.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from parashard.errors import NotAllowed

SCHEME = "parashard"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_URI = re.compile(rf"{SCHEME}://([a-z]+)/({NAME.pattern})")


class Role(enum.StrEnum):
    """The role of a process or a person."""

    SHARD = "shard"
    WORKER = "worker"
    COORDINATOR = "coordinator"
    OPERATOR = "operator"  # a person's command line, and the launcher
    SERVER = "server"  # `parashard serve`
    READER = "reader"  # looks up rows in it, or subscribes


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


PUSH = "/parashard.v1.ShardData/Push"
PULL = "/parashard.v1.ShardData/Pull"
SUBSCRIBE = "/parashard.v1.Serving/Subscribe"

_COORDINATOR = "/parashard.v1.Coordinator"
_SHARD = "/parashard.v1.Shard"
_SERVING = "/parashard.v1.Serving"
_HEALTH = "/grpc.health.v1.Health"

ALLOWED: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        f"{_COORDINATOR}/GetJob": frozenset({Role.SHARD, Role.WORKER, Role.OPERATOR, Role.SERVER}),
        f"{_COORDINATOR}/RegisterShard": frozenset({Role.SHARD}),
        f"{_COORDINATOR}/RegisterWorker": frozenset({Role.WORKER}),
        f"{_COORDINATOR}/GetView": frozenset({Role.WORKER, Role.SERVER}),
        f"{_COORDINATOR}/Lease": frozenset({Role.WORKER}),
        f"{_COORDINATOR}/GetStatus": frozenset({Role.OPERATOR}),
        f"{_COORDINATOR}/Scale": frozenset({Role.OPERATOR}),
        f"{_COORDINATOR}/Supervise": frozenset({Role.OPERATOR}),
        f"{_COORDINATOR}/CreateCheckpoint": frozenset({Role.OPERATOR}),
        f"{_COORDINATOR}/Follow": frozenset({Role.OPERATOR}),
        f"{_SHARD}/Inspect": frozenset({Role.COORDINATOR, Role.OPERATOR}),
        f"{_SHARD}/TakeCheckpoint": frozenset({Role.COORDINATOR}),
        f"{_SHARD}/Rollback": frozenset({Role.COORDINATOR}),
        f"{_SHARD}/Read": frozenset({Role.SERVER}),
        PUSH: frozenset({Role.WORKER}),
        PULL: frozenset({Role.WORKER}),
        f"{_SERVING}/GetServed": frozenset({Role.READER}),
        f"{_SERVING}/GetRows": frozenset({Role.READER}),
        f"{_SERVING}/GetVariable": frozenset({Role.READER}),
        SUBSCRIBE: frozenset({Role.READER}),
        f"{_HEALTH}/Check": frozenset(Role),
        f"{_HEALTH}/List": frozenset(),  # the library does not implement it
        f"{_HEALTH}/Watch": frozenset(),  # each would hold a thread without bound
    }
)
"""Full name of an RPC -> roles that may call it; one of them in the caller's certificate is enough."""


def check_call(method: str, uris: Sequence[str]) -> None:
    """Raise unless the caller's certificate has a role that may make the call."""
    allowed = ALLOWED.get(method, frozenset())
    identities = identities_in(uris)
    if not any(identity.role in allowed for identity in identities):
        raise NotAllowed(
            f"{method.lstrip('/')}: the certificate's roles are {in_words(identities)}; "
            f"allowed: {', '.join(sorted(allowed)) or 'none'}"
        )
