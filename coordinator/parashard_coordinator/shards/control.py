"""The coordinator as a client of shards: polls each once a second, and has them save or roll back.

Every command names the incarnations of the coordinator and of the shard. Only the coordinator's main thread is here,
never under the core's lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.errors import ParashardError
from parashard.process.backoff import Debounce
from parashard.protocol import rpc
from parashard.security.credentials import Credentials
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.shards.shard_reports import SavedShard, ShardRecord, record_of, saved_shard

ANSWER_BYTES_MAX = 1 << 20
"""Enough for the largest list of intervals of a shard, of steps up to 2^35. Decoded, it can be 20 times as large."""


class ShardChannels:
    """Stubs of shards, by their addresses."""

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


DEADLINE_S = 1.0


class Silence(NamedTuple):
    """How long an incarnation of a shard has not answered, and the last error."""

    incarnation: int
    silent_s: float
    error: ParashardError


class ShardMonitor:
    """Polls the shards' records."""

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


NAME_DEADLINE_S = 1.0
ROLLBACK_DEADLINE_S = 20.0
SAVE_DEADLINE_S = 20.0  # then the command is retried: it returns a checkpoint that was stored meanwhile
NONE_DAMAGED: Mapping[int, str] = MappingProxyType({})


class ShardCommands:
    """Sends commands to the registered incarnations of shards."""

    def __init__(self, run_id: str, incarnation: int, plan_version: int, stubs: ShardChannels) -> None:
        self._stubs = stubs
        self._run_id = run_id
        self._plan_version = plan_version
        self._incarnation = incarnation

    def save(
        self, registrations: Sequence[ShardRegistration], round_: int | None, damaged: Mapping[int, str] = NONE_DAMAGED
    ) -> list[SavedShard]:
        """Have every shard save its present state, in sync mode the start of a round; raise the first error."""
        requests = [
            self._save_request(shard, registration, round_, damaged=damaged.get(shard, ""))
            for shard, registration in enumerate(registrations)
        ]
        saved = []
        for shard, (registration, call) in enumerate(self._started(registrations, requests, SAVE_DEADLINE_S)):
            with rpc.our_errors(registration.address):
                reply = call.result()
            saved.append(saved_shard(self._plan_version, shard, reply))
        return saved

    def name_round(self, registrations: Sequence[ShardRegistration], round_: int) -> dict[int, ParashardError]:
        """Have every shard save a round when it is reached; return the errors by shard."""
        requests = [
            self._save_request(shard, registration, round_, ahead=True)
            for shard, registration in enumerate(registrations)
        ]
        return _errors(dict(enumerate(self._started(registrations, requests, NAME_DEADLINE_S))))

    def roll_back(self, registrations: Mapping[int, tuple[ShardRegistration, int]]) -> dict[int, ParashardError]:
        """Roll shards back to rounds; return the errors by shard."""
        calls = {
            shard: (
                registration,
                self._stubs.of(registration).Rollback.future(
                    shard_pb2.RollbackRequest(
                        run_id=self._run_id,
                        incarnation=registration.incarnation,
                        coordinator_incarnation=self._incarnation,
                        round=round_,
                        shard=shard,
                    ),
                    timeout=ROLLBACK_DEADLINE_S,
                ),
            )
            for shard, (registration, round_) in registrations.items()
        }
        return _errors(calls)

    def _started(
        self,
        registrations: Sequence[ShardRegistration],
        requests: Sequence[shard_pb2.TakeCheckpointRequest],
        deadline_s: float,
    ) -> list[tuple[ShardRegistration, Any]]:
        """Send a request to every shard; return the calls in progress."""
        return [
            (registration, self._stubs.of(registration).TakeCheckpoint.future(request, timeout=deadline_s))
            for registration, request in zip(registrations, requests, strict=True)
        ]

    def _save_request(
        self, shard: int, registration: ShardRegistration, round_: int | None, *, ahead: bool = False, damaged: str = ""
    ) -> shard_pb2.TakeCheckpointRequest:
        return shard_pb2.TakeCheckpointRequest(
            run_id=self._run_id,
            incarnation=registration.incarnation,
            coordinator_incarnation=self._incarnation,
            round=round_,
            ahead=ahead,
            shard=shard,
            damaged=damaged,
        )


def _errors(calls: Mapping[int, tuple[ShardRegistration, Any]]) -> dict[int, ParashardError]:
    """Wait for calls, and return their errors by shard."""
    errors = {}
    for shard, (registration, call) in calls.items():
        try:
            with rpc.our_errors(registration.address):
                call.result()
        except ParashardError as error:
            errors[shard] = error
    return errors
