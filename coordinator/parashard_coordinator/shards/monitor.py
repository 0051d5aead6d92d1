"""ShardMonitor: polls every shard once a second, for the status, the history and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parashard._proto import shard_pb2
from parashard.errors import ParashardError
from parashard.protocol import rpc
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.shards.channels import ShardChannels
from parashard_coordinator.shards.shard_reports import ShardRecord, record_of

DEADLINE_S = 1.0


class Silence(NamedTuple):
    """How long an incarnation of a shard has not answered, and the last error."""

    incarnation: int
    silent_s: float
    error: ParashardError


class ShardMonitor:
    """Polls the shards' records.

    Parameters
    ----------
    run_id : str
        The shards' run.
    stubs : ShardChannels
        The shards' stubs.
    """

    def __init__(self, run_id: str, stubs: ShardChannels) -> None:
        self._request = shard_pb2.InspectRequest(run_id=run_id)
        self._stubs = stubs
        self._silent_since_s: dict[tuple[int, int], float] = {}  # by shard and incarnation

    def look(
        self, registrations: list[ShardRegistration], saw: Callable[[int, ShardRecord], None], now_s: float
    ) -> dict[int, Silence]:
        """Poll every shard concurrently, pass each record to `saw`; return the shards that did not answer, by index."""
        self._stubs.keep(registrations)
        calls = [
            (registration, self._stubs.of(registration).Inspect.future(self._request, timeout=DEADLINE_S))
            for registration in registrations
        ]
        silent, since_s = {}, self._silent_since_s
        self._silent_since_s = {}
        for shard, (registration, call) in enumerate(calls):
            try:
                with rpc.our_errors(registration.address):
                    saw(shard, record_of(shard, call.result()))
            except ParashardError as error:
                key = shard, registration.incarnation
                self._silent_since_s[key] = since_s.get(key, now_s)
                silent[shard] = Silence(registration.incarnation, now_s - self._silent_since_s[key], error)
        return silent
