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
from parashard_coordinator.api.shard_reports import SavedShard, saved_shard
from parashard_coordinator.core.membership import ShardLife
from parashard_coordinator.shards.channels import ShardChannels

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
        self, lives: Sequence[ShardLife], round_: int | None, damaged: Mapping[int, str] = NONE_DAMAGED
    ) -> list[SavedShard]:
        """Have every shard save its present state, in sync mode the start of a round; raise the first error.

        `damaged` has by shard the folder of a damaged checkpoint, which must not be returned again.
        """
        requests = [
            self._save_request(shard, life, round_, damaged=damaged.get(shard, "")) for shard, life in enumerate(lives)
        ]
        saved = []
        for shard, (life, call) in enumerate(self._begun(lives, requests, SAVE_DEADLINE_S)):
            with rpc.our_errors(life.address):
                reply = call.result()
            saved.append(saved_shard(self._plan_version, shard, reply))
        return saved

    def name_round(self, lives: Sequence[ShardLife], round_: int) -> dict[int, ParashardError]:
        """Have every shard save a round when it is reached; return the errors by shard."""
        requests = [self._save_request(shard, life, round_, ahead=True) for shard, life in enumerate(lives)]
        return _errors(dict(enumerate(self._begun(lives, requests, NAME_DEADLINE_S))))

    def roll_back(self, lives: Mapping[int, tuple[ShardLife, int]]) -> dict[int, ParashardError]:
        """Roll shards back to rounds; return the errors by shard."""
        calls = {
            shard: (
                life,
                self._stubs.of(life).Rollback.future(
                    shard_pb2.RollbackRequest(
                        run_id=self._run_id,
                        incarnation=life.incarnation,
                        coordinator_incarnation=self._incarnation,
                        round=round_,
                        shard=shard,
                    ),
                    timeout=ROLLBACK_DEADLINE_S,
                ),
            )
            for shard, (life, round_) in lives.items()
        }
        return _errors(calls)

    def _begun(
        self, lives: Sequence[ShardLife], requests: Sequence[shard_pb2.TakeCheckpointRequest], deadline_s: float
    ) -> list[tuple[ShardLife, Any]]:
        """Send a request to every shard; return the calls in progress."""
        return [
            (life, self._stubs.of(life).TakeCheckpoint.future(request, timeout=deadline_s))
            for life, request in zip(lives, requests, strict=True)
        ]

    def _save_request(
        self, shard: int, life: ShardLife, round_: int | None, *, ahead: bool = False, damaged: str = ""
    ) -> shard_pb2.TakeCheckpointRequest:
        return shard_pb2.TakeCheckpointRequest(
            run_id=self._run_id,
            incarnation=life.incarnation,
            coordinator_incarnation=self._incarnation,
            round=round_,
            ahead=ahead,
            shard=shard,
            damaged=damaged,
        )


def _errors(calls: Mapping[int, tuple[ShardLife, Any]]) -> dict[int, ParashardError]:
    """Wait for calls, and return their errors by shard."""
    errors = {}
    for shard, (life, call) in calls.items():
        try:
            with rpc.our_errors(life.address):
                call.result()
        except ParashardError as error:
            errors[shard] = error
    return errors
