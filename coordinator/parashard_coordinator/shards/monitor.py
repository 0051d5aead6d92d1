"""ShardMonitor: polls every shard once a second, for the status, the history and the metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.errors import ParashardError
from parashard.process.backoff import Debounce
from parashard.protocol import rpc
from parashard.security.credentials import Credentials
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.shards.shard_reports import ShardRecord, record_of

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


class DiskTroubles:
    """The present disk failures of shards."""

    def __init__(self) -> None:
        self._checkpoints: defaultdict[int, Debounce] = defaultdict(Debounce)

    def changed(self, shard: int, figures: shard_pb2.InspectReply, now_s: float) -> tuple[str, str, bool] | None:
        """Return the failure that began or ended since this shard's last record: a key, a text, and whether it is over.

        A restarted process does not end its predecessor's failure of checkpoints until it has stored one itself.
        """
        if figures.checkpoint_error:
            if self._checkpoints[shard].begins(now_s):
                return f"checkpoint-{shard}", f"shard-{shard}: checkpoint failed: {figures.checkpoint_error}", False
        elif figures.checkpoints and self._checkpoints[shard].ends(now_s):
            return f"checkpoint-{shard}", f"shard-{shard}: checkpoints are saved again", True
        return None


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
