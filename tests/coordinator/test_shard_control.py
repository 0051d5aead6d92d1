"""The coordinator asks every shard for its record, reports those that do not answer, and keeps channels open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard._proto.shard_pb2 import InspectReply
from parashard.errors import Unreachable, WrongRun
from parashard.process.backoff import STEADY_S
from parashard.protocol.rpc import Server
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.shards import DiskTroubles, ShardChannels, ShardControl

Starts = Callable[[int], ShardRegistration]


class OneShard(shard_pb2_grpc.ShardServicer):  # type: ignore[misc, unused-ignore]
    """Answers with its index; refuses another run."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.asked = 0

    def Inspect(self, request: shard_pb2.InspectRequest, context: Any) -> shard_pb2.InspectReply:
        self.asked += 1
        if request.run_id != "run-1":
            raise WrongRun(f"this shard is of run-1, the call names {request.run_id}")
        return shard_pb2.InspectReply(shard=self.shard, version=self.asked)


@pytest.fixture
def start() -> Iterator[Starts]:
    servers: list[Server] = []

    def one(shard: int) -> ShardRegistration:
        server = Server("127.0.0.1:0")
        shard_pb2_grpc.add_ShardServicer_to_server(OneShard(shard), server.grpc)  # type: ignore[no-untyped-call]
        server.start()
        servers.append(server)
        return ShardRegistration(1, server.address, "")

    yield one
    for server in servers:
        server.stop(grace_s=0.0)


def test_every_record_is_handed_on(start: Starts) -> None:
    registrations, seen = [start(0), start(1)], []
    watch = ShardControl("run-1", 1, 7, ShardChannels())
    assert watch.look(registrations, lambda *told: seen.append(told), 0.0) == {}
    assert watch.look(registrations, lambda *told: seen.append(told), 1.0) == {}
    assert [(shard, record.figures.version) for shard, record in seen] == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_shard_that_refuses_does_not_hide_the_others(start: Starts) -> None:
    registrations, seen = [ShardRegistration(1, "127.0.0.1:1", ""), start(1)], []
    watch = ShardControl("run-1", 1, 7, ShardChannels())
    silence = watch.look(registrations, lambda shard, _: seen.append(shard), 0.0)[0]
    assert isinstance(silence.error, Unreachable)
    assert silence.error.peer == "127.0.0.1:1"
    assert seen == [1]


def test_silence_is_measured_until_the_shard_answers(start: Starts) -> None:
    dead, alive, watch = ShardRegistration(1, "127.0.0.1:1", ""), start(0), ShardControl("run-1", 1, 7, ShardChannels())
    assert [watch.look([dead], pytest.fail, now_s)[0].silent_s for now_s in (5.0, 6.0, 9.0)] == [0.0, 1.0, 4.0]
    assert watch.look([alive], lambda *_: None, 10.0) == {}
    assert watch.look([dead], pytest.fail, 11.0)[0].silent_s == 0.0


def test_silence_is_of_an_incarnation() -> None:
    watch = ShardControl("run-1", 1, 7, ShardChannels())
    watch.look([ShardRegistration(1, "127.0.0.1:1", "")], pytest.fail, 5.0)
    silence = watch.look([ShardRegistration(2, "127.0.0.1:1", "")], pytest.fail, 9.0)[0]
    assert (silence.incarnation, silence.silent_s) == (2, 0.0), "it has just begun"


def test_shards_of_another_run_are_errors(start: Starts) -> None:  # P2
    registrations = [start(0), start(1)]
    silent = ShardControl("run-2", 1, 7, ShardChannels()).look(registrations, pytest.fail, 0.0)
    assert [type(silent[shard].error) for shard in (0, 1)] == [WrongRun, WrongRun]
    assert [silent[shard].error.peer for shard in (0, 1)] == [registration.address for registration in registrations]


def test_no_shards_no_calls() -> None:
    assert ShardControl("run-1", 1, 7, ShardChannels()).look([], pytest.fail, 0.0) == {}


FIRST, SECOND = ShardRegistration(1, "127.0.0.1:1", ""), ShardRegistration(1, "127.0.0.1:2", "")


@pytest.fixture
def stubs() -> Iterator[ShardChannels]:
    stubs = ShardChannels()
    yield stubs
    stubs.keep([])


def test_an_address_has_one_channel_whichever_incarnation_is_there(stubs: ShardChannels) -> None:
    assert stubs.of(FIRST) is stubs.of(ShardRegistration(2, FIRST.address, ""))
    assert stubs.of(FIRST) is not stubs.of(SECOND)


def test_the_channel_of_an_incarnation_that_is_gone_is_closed(stubs: ShardChannels) -> None:
    gone, stays = stubs.of(FIRST), stubs.of(SECOND)
    stubs.keep([SECOND])
    with pytest.raises(ValueError, match="closed"):
        gone.Inspect(shard_pb2.InspectRequest())
    assert stubs.of(SECOND) is stays
    assert stubs.of(FIRST) is not gone, "an incarnation that is there again"


FULL = InspectReply(failed_checkpoints=1, checkpoint_error="no space left on device")
SOUND = InspectReply(checkpoints=4)
TOLD = ("checkpoint-1", "shard-1: checkpoint failed: no space left on device", False)
OVER = ("checkpoint-1", "shard-1: checkpoints are saved again", True)


def test_a_failing_checkpoint_is_told_as_it_fails_now_and_when_it_is_over() -> None:
    troubles = DiskTroubles()
    assert troubles.changed(1, SOUND, 0.0) is None
    assert [troubles.changed(1, FULL, now_s) for now_s in (1.0, 2.0)] == [TOLD, TOLD]
    other = InspectReply(checkpoint_error="forbidden")
    assert troubles.changed(1, other, 2.0) == ("checkpoint-1", "shard-1: checkpoint failed: forbidden", False)
    assert troubles.changed(0, SOUND, 99.0) is None, "of another shard"
    assert troubles.changed(1, SOUND, 2.0 + STEADY_S) == OVER
    assert troubles.changed(1, SOUND, 99.0) is None


def test_a_shard_that_was_started_again_has_not_saved_anything_yet() -> None:
    troubles = DiskTroubles()
    troubles.changed(1, FULL, 0.0)
    assert troubles.changed(1, InspectReply(), 99.0) is None
    assert troubles.changed(1, SOUND, 99.0) == OVER
