"""What people hear of shards whose disk is full: a line when it begins, and a line when it is over (P21)."""

from __future__ import annotations

from parashard._proto.shard_pb2 import InspectReply
from parashard.process.backoff import STEADY_S
from parashard_coordinator.shards.monitor import DiskTroubles

FULL = InspectReply(failed_checkpoints=1, checkpoint_error="no space left on device")
SOUND = InspectReply(checkpoints=4)
TOLD = ("checkpoint-1", "shard-1: checkpoint failed: no space left on device", False)
OVER = ("checkpoint-1", "shard-1: checkpoints are saved again", True)


def test_a_failing_checkpoint_is_reported_once_and_again_when_it_is_over() -> None:
    troubles = DiskTroubles()
    assert troubles.changed(1, SOUND, 0.0) is None
    assert [troubles.changed(1, FULL, now_s) for now_s in (1.0, 2.0)] == [TOLD, None]
    assert troubles.changed(0, SOUND, 99.0) is None, "of another shard"
    assert troubles.changed(1, SOUND, 2.0 + STEADY_S) == OVER
    assert troubles.changed(1, SOUND, 99.0) is None


def test_a_shard_that_was_started_again_has_not_saved_anything_yet() -> None:
    troubles = DiskTroubles()
    troubles.changed(1, FULL, 0.0)
    assert troubles.changed(1, InspectReply(), 99.0) is None
    assert troubles.changed(1, SOUND, 99.0) == OVER
