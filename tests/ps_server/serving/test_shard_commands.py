"""What a coordinator tells a shard, over real sockets: save, note a round to save, return to a round (P3, P8, P12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.checkpoints.manifest import ShardPart
from parashard.client.proto_conversion import intervals_from
from parashard.errors import (
    DamagedCheckpoint,
    MalformedFrame,
    ParashardError,
    StaleIncarnation,
    StaleRound,
    StoreFailed,
    Superseded,
    WrongRun,
)
from parashard.plan.intervals import IntervalSet
from parashard.protocol import rpc
from support.shard_process import ADAM, RUN, ShardProcess, bits_of
from support.store_fakes import MemoryStore
from support.waiting import DEADLINE_S

COORDINATOR = 4


class Commanded:
    """A shard of a `sync:2` job that listens and obeys incarnation 4 of the coordinator."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.process = ShardProcess(self.store, optimizer=ADAM, consistency="sync:2", checkpoint={"every_s": 0.0})
        self.process.service.coordinator_incarnation = COORDINATOR
        self.server = rpc.Server("127.0.0.1:0")
        self.process.service.add_to(self.server)
        self.server.start()
        self.channel = rpc.connect(self.server.address)
        self._stub = shard_pb2_grpc.ShardStub(self.channel)  # type: ignore[no-untyped-call]

    def save(self, round_: int | None = None, **changed: Any) -> shard_pb2.TakeCheckpointReply:
        request = shard_pb2.TakeCheckpointRequest(**{**self._named(), "round": round_, **changed})
        with rpc.our_errors(self.server.address):
            reply: shard_pb2.TakeCheckpointReply = self._stub.TakeCheckpoint(request, timeout=DEADLINE_S)
            return reply

    def roll_back(self, round_: int, **changed: Any) -> int:
        request = shard_pb2.RollbackRequest(**{**self._named(), "round": round_, **changed})
        with rpc.our_errors(self.server.address):
            return int(self._stub.Rollback(request, timeout=DEADLINE_S).incarnation)

    def inspect(self) -> shard_pb2.InspectReply:
        with rpc.our_errors(self.server.address):
            reply: shard_pb2.InspectReply = self._stub.Inspect(shard_pb2.InspectRequest(run_id=RUN), timeout=DEADLINE_S)
            return reply

    def _named(self) -> dict[str, Any]:
        return {"run_id": RUN, "incarnation": 1, "coordinator_incarnation": COORDINATOR}


@pytest.fixture
def it() -> Iterator[Commanded]:
    commanded = Commanded()
    try:
        yield commanded
    finally:
        commanded.channel.close()
        commanded.server.stop(grace_s=0.0)


def test_a_checkpoint_is_reported_as_a_drained_one_s_manifest_names_its_parts(it: Commanded) -> None:  # P8
    it.process.push(0, 1)
    reply = it.save(1)
    assert intervals_from(reply.applied) == IntervalSet([(0, 2)])
    manifest = it.store.contents[f"{reply.folder}/manifest.json"]
    part = ShardPart(name=reply.folder, size_bytes=reply.manifest_bytes, sha256=reply.manifest_sha256)
    assert part.size_bytes == len(manifest)
    record = it.inspect()
    assert (record.checkpoints, record.failed_checkpoints, list(record.checkpoint_rounds)) == (1, 0, [0, 1])
    assert record.checkpoint_bytes > 0


def test_the_same_request_sent_again_is_answered_alike(it: Commanded) -> None:  # its answer was lost
    it.process.push(0, 1)
    assert it.save(1) == it.save(1)


def test_one_that_the_coordinator_found_damaged_is_not_handed_out_again(it: Commanded) -> None:
    it.process.push(0, 1)
    first = it.save(1)
    second = it.save(1, damaged=first.folder)
    assert second.folder != first.folder
    assert it.save(1, damaged=first.folder) == second


def test_a_round_that_is_named_ahead_is_noted_and_saved_when_it_is_reached(it: Commanded) -> None:  # P12
    assert it.save(1, ahead=True) == shard_pb2.TakeCheckpointReply()
    it.process.push(0, 1)
    assert it.process.checkpointer.pending is None
    it.process.reach(1)
    assert it.process.checkpointer.pending is not None


def test_a_round_that_the_shard_does_not_stand_at_is_refused(it: Commanded) -> None:  # P11
    it.process.push(0)
    with pytest.raises(StaleRound):
        it.save(1)


def test_a_return_gives_the_new_incarnation(it: Commanded) -> None:  # P3, P12
    at_first = bits_of(it.process.shard)
    it.process.push(0, 1)
    it.process.reach(1)
    assert it.roll_back(0) == 2
    assert bits_of(it.process.shard) == at_first
    assert it.inspect().incarnation == 2


@pytest.mark.parametrize("command", ["save", "roll_back"])
@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"coordinator_incarnation": 3}, Superseded, "obeys incarnation 4 of the coordinator, not 3"),
        ({"run_id": "run-7"}, WrongRun, "this shard is of run run-9, the call names run-7"),
        ({"run_id": ""}, WrongRun, r"\(none\)"),
        ({"incarnation": 2}, StaleIncarnation, "names incarnation 2 of shard 0; this is 1 of shard 0"),
        ({"shard": 1}, StaleIncarnation, "names incarnation 1 of shard 1; this is 1 of shard 0"),
        ({"incarnation": 0}, StaleIncarnation, "the command names incarnation 0"),
    ],
)
def test_a_command_that_is_not_for_this_incarnation_or_from_an_old_coordinator_changes_nothing(
    it: Commanded, command: str, changed: dict[str, Any], error: type[ParashardError], told: str
) -> None:  # P2, P3
    before, stored = bits_of(it.process.shard), dict(it.store.contents)
    with pytest.raises(error, match=told):
        getattr(it, command)(0, **changed)
    assert (bits_of(it.process.shard), it.process.shard.identity.incarnation) == (before, 1)
    assert it.store.contents == stored


def test_an_earlier_incarnation_s_command_that_comes_late_is_refused_after_a_return(it: Commanded) -> None:  # P3
    it.roll_back(0)
    with pytest.raises(StaleIncarnation):
        it.roll_back(0)
    assert it.roll_back(0, incarnation=2) == 3


def test_a_newer_coordinator_s_command_is_obeyed_and_the_older_one_s_no_longer(it: Commanded) -> None:  # P3
    it.save(coordinator_incarnation=9)
    with pytest.raises(Superseded, match="obeys incarnation 9"):
        it.save(coordinator_incarnation=8)


@pytest.mark.parametrize("changed", [{"ahead": True}, {"ahead": True, "round": None}])
def test_a_checkpoint_ahead_of_time_has_to_name_its_round(it: Commanded, changed: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame, match="names no round"):
        it.save(**changed)


def test_a_store_that_fails_is_reported_and_nothing_is_acknowledged(it: Commanded) -> None:
    it.process.push(0, 1)
    it.store.fail("create", "manifest")
    with pytest.raises(StoreFailed, match="no space left") as refusal:
        it.save(1)
    assert refusal.value.peer == it.server.address
    record = it.inspect()
    assert (record.checkpoints, record.failed_checkpoints) == (0, 1)
    assert "no space left" in record.checkpoint_error


def test_a_return_to_a_round_that_is_not_there_is_refused(it: Commanded) -> None:  # P12
    with pytest.raises(DamagedCheckpoint, match="no checkpoint of round 5"):
        it.roll_back(5)
    assert it.inspect().incarnation == 1
