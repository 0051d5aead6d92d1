"""ShardCommands: what the coordinator tells shards to do: save, note a round to save, return to a round.

Every command names the coordinator's incarnation and the life that it means (P3). Called by the coordinator's main
thread, never under the core's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.membership import ShardLife
from parashard import rpc
from parashard.errors import ParashardError
from parashard.security.credentials import Credentials
from protos import shard_pb2, shard_pb2_grpc

NAME_DEADLINE_S = 1.0
ROLLBACK_DEADLINE_S = 20.0
SAVE_DEADLINE_S = 20.0  # asked again after that: a shard that has saved meanwhile says so


class ShardCommands:
    """Sends commands to the shards' registered lives.

    Parameters
    ----------
    run_id : str
        The run.
    incarnation : int
        The coordinator's.
    credentials : Credentials, optional
        Shown to shards.
    """

    def __init__(self, run_id: str, incarnation: int, credentials: Credentials | None = None) -> None:
        self._credentials = credentials
        self._run_id = run_id
        self._incarnation = incarnation
        self._stubs: dict[str, shard_pb2_grpc.ShardStub] = {}

    def save(self, lives: Sequence[ShardLife], round_: int | None) -> list[shard_pb2.TakeCheckpointReply]:
        """Have every shard save its present state, in sync mode the start of a round; raise the first error."""
        calls = [
            (life, self._stub(life).TakeCheckpoint.future(self._save_request(life, round_), timeout=SAVE_DEADLINE_S))
            for life in lives
        ]
        replies = []
        for life, call in calls:
            with rpc.our_errors(life.address):
                replies.append(call.result())
        return replies

    def name_round(self, lives: Sequence[ShardLife], round_: int) -> dict[int, ParashardError]:
        """Tell every shard to save a round when it is reached; return the errors by shard."""
        requests = [self._save_request(life, round_, ahead=True) for life in lives]
        calls = [
            (life, self._stub(life).TakeCheckpoint.future(request, timeout=NAME_DEADLINE_S))
            for life, request in zip(lives, requests, strict=True)
        ]
        errors = {}
        for shard, (life, call) in enumerate(calls):
            try:
                with rpc.our_errors(life.address):
                    call.result()
            except ParashardError as error:
                errors[shard] = error
        return errors

    def roll_back(self, lives: Mapping[int, tuple[ShardLife, int]]) -> dict[int, ParashardError]:
        """Send shards back to rounds; return the errors by shard."""
        calls = {
            shard: (
                life,
                self._stub(life).Rollback.future(
                    shard_pb2.RollbackRequest(
                        run_id=self._run_id,
                        incarnation=life.incarnation,
                        coordinator_incarnation=self._incarnation,
                        round=round_,
                    ),
                    timeout=ROLLBACK_DEADLINE_S,
                ),
            )
            for shard, (life, round_) in lives.items()
        }
        errors = {}
        for shard, (life, call) in calls.items():
            try:
                with rpc.our_errors(life.address):
                    call.result()
            except ParashardError as error:
                errors[shard] = error
        return errors

    def _save_request(
        self, life: ShardLife, round_: int | None, *, ahead: bool = False
    ) -> shard_pb2.TakeCheckpointRequest:
        return shard_pb2.TakeCheckpointRequest(
            run_id=self._run_id,
            incarnation=life.incarnation,
            coordinator_incarnation=self._incarnation,
            round=round_,
            ahead=ahead,
        )

    def _stub(self, life: ShardLife) -> shard_pb2_grpc.ShardStub:
        if life.address not in self._stubs:
            channel = rpc.connect(life.address, self._credentials)
            self._stubs[life.address] = shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
        return self._stubs[life.address]
