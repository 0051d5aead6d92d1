"""A channel for each address of a present incarnation, and none for those of incarnations that are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parashard._proto import shard_pb2
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.shards.monitor import ShardChannels

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
