"""ShardCommands: the coordinator's commands to shards: save now, save at a round, roll back to a round.

Every command names the incarnations of the coordinator and of the shard. Called by the coordinator's main thread,
never under the core's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from parashard._proto import shard_pb2
from parashard.errors import ParashardError
from parashard.protocol import rpc
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.shards.monitor import ShardChannels
from parashard_coordinator.shards.shard_reports import SavedShard, saved_shard

NAME_DEADLINE_S = 1.0
ROLLBACK_DEADLINE_S = 20.0
SAVE_DEADLINE_S = 20.0  # then the command is retried: it returns a checkpoint that was stored meanwhile
NONE_DAMAGED: Mapping[int, str] = MappingProxyType({})


class ShardCommands:
    """Sends commands to the registered incarnations of shards.

    Parameters
    ----------
    run_id : str
        The run.
    incarnation : int
        The coordinator's.
    plan_version : int
        Of the shards' plan.
    stubs : ShardChannels
        The shards' stubs.
    """

    def __init__(self, run_id: str, incarnation: int, plan_version: int, stubs: ShardChannels) -> None:
        self._stubs = stubs
        self._run_id = run_id
        self._plan_version = plan_version
        self._incarnation = incarnation

    def save(
        self, registrations: Sequence[ShardRegistration], round_: int | None, damaged: Mapping[int, str] = NONE_DAMAGED
    ) -> list[SavedShard]:
        """Have every shard save its present state, in sync mode the start of a round; raise the first error.

        `damaged` has by shard the folder of a damaged checkpoint, which must not be returned again.
        """
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
