"""Records of shards: as shards tell them, and as the coordinator keeps them."""

from __future__ import annotations

from typing import Any

from parashard._proto import shard_pb2
from parashard_coordinator import shards
from parashard_coordinator.shards import HOTTEST_MAX, TABLES_MAX, ShardRecord


def told(shard: int, steps: int = 0, staleness: dict[int, int] | None = None, **figures: Any) -> shard_pb2.InspectReply:
    """Return what a shard tells that has applied steps 0..steps-1."""
    return shard_pb2.InspectReply(
        shard=shard,
        version=steps,
        applied=[shard_pb2.Interval(start=0, stop=steps)] if steps else [],
        staleness=[shard_pb2.StalenessCount(staleness=s, pushes=n) for s, n in sorted((staleness or {}).items())],
        **figures,
    )


def record_of(shard: int, steps: int = 0, staleness: dict[int, int] | None = None, **figures: Any) -> ShardRecord:
    """Return what is kept of what a shard tells."""
    return shards.record_of(shard, told(shard, steps, staleness, **figures))


def largest_record(shard: int) -> ShardRecord:
    """Return what is kept of a shard whose every figure is as long as it may be."""
    most: dict[type, Any] = {int: (1 << 64) - 1, float: 1e300, str: "x" * 10_000}
    reply = told(shard, staleness={lag: 1 << 40 for lag in range(10)})
    for field in reply.DESCRIPTOR.fields:
        kind = type(getattr(reply, field.name))
        if kind in most and field.name != "shard":
            setattr(reply, field.name, most[kind])
    reply.tables.extend(
        shard_pb2.TableFigures(
            **{
                field.name: f"{number:0200}" if field.name == "table" else most[int]
                for field in shard_pb2.TableFigures.DESCRIPTOR.fields
                if field.name != "hottest_keys"
            },
            # a status has those of all shards together, as many as one has
            hottest_keys=[shard_pb2.HotKey(key=most[int], pushes=most[int])] * (0 if shard else HOTTEST_MAX),
        )
        for number in range(TABLES_MAX)
    )
    return shards.record_of(shard, reply)
