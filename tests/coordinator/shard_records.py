"""Records of shards, as the coordinator's watch sees them."""

from __future__ import annotations

from typing import Any

from protos import shard_pb2


def record_of(shard: int, steps: int = 0, staleness: dict[int, int] | None = None, **figures: Any) -> Any:
    """Return the record of a shard that has applied steps 0..steps-1."""
    return shard_pb2.InspectReply(
        shard=shard,
        version=steps,
        applied=[shard_pb2.Interval(start=0, stop=steps)] if steps else [],
        staleness=[shard_pb2.StalenessCount(staleness=s, pushes=n) for s, n in sorted((staleness or {}).items())],
        **figures,
    )
