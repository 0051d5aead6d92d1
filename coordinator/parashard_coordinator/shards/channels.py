"""ShardChannels: the coordinator's gRPC channels, one for the address of each shard's registered incarnation.

Owns the channels. Knows no call. Called by `parashard_coordinator.shards.monitor` and
`parashard_coordinator.shards.commands`, on the coordinator's main thread alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parashard._proto import shard_pb2_grpc
from parashard.protocol import rpc
from parashard.security.credentials import Credentials
from parashard_coordinator.core.membership import ShardRegistration

ANSWER_BYTES_MAX = 1 << 20
"""Enough for the largest list of intervals of a shard, of steps up to 2^35. Decoded, it can be 20 times as large."""


class ShardChannels:
    """Stubs of shards, by their addresses.

    Parameters
    ----------
    credentials : Credentials, optional
        Shown to shards.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials
        self._open: dict[str, tuple[Any, shard_pb2_grpc.ShardStub]] = {}  # channel and stub by address

    def of(self, registration: ShardRegistration) -> shard_pb2_grpc.ShardStub:
        """Return the stub of a shard's incarnation."""
        if registration.address not in self._open:
            channel = rpc.connect(registration.address, self._credentials, ANSWER_BYTES_MAX)
            self._open[registration.address] = channel, shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
        return self._open[registration.address][1]

    def keep(self, registrations: Iterable[ShardRegistration]) -> None:
        """Close the channels to all other incarnations: a restarted shard may have another port each time."""
        gone = self._open.keys() - {registration.address for registration in registrations}
        for address in gone:
            channel, _ = self._open.pop(address)
            channel.close()
