"""Which role may call what: one table, for gRPC and for the streams, and the check against it.

Owns the table; a method that is not in it is always refused. Knows nothing of TLS or gRPC: it is given the URIs of a
verified certificate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from parashard.errors import NotAllowed
from parashard.security.identity import Role, identities_in, in_words

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
