"""Decoding of the shards' reports of themselves, within bounds, before the coordinator keeps or forwards them.

Owns how much a shard may say. Decides nothing about the job.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.checkpoints.catalogue import shard_folder
from parashard.checkpoints.manifest import ShardPart
from parashard.client.proto_conversion import intervals_from
from parashard.errors import LimitExceeded, MalformedFrame
from parashard.frozen_model import first_problem
from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.input_limits import (
    PATH_BYTES_MAX,
    REASON_BYTES_MAX,
    checked_address,
    checked_text,
    readable,
)
from parashard_coordinator.core.membership import ShardRegistration

INTERVALS_MAX = 1 << 15  # in a shard's applied steps, and in those it holds; each gap is a lease that is late
ROUNDS_MAX = 1 << 16  # that a shard can return to
TABLES_MAX = 1 << 8  # embedding tables of a job
HOTTEST_MAX = 5  # keys of a table that were pushed the most often
STALENESS_VALUES_MAX = 1 << 12  # that a shard tells apart
ERROR_BYTES_MAX = 300  # of its checkpoints' and of its log's error, each: a status has them of every shard

_FIGURES = tuple(
    field.name
    for field in shard_pb2.InspectReply.DESCRIPTOR.fields
    if isinstance(getattr(shard_pb2.InspectReply(), field.name), int | float | str)
)

TABLE_FIGURES = tuple(field.name for field in shard_pb2.TableFigures.DESCRIPTOR.fields if field.name != "hottest_keys")


class ShardRecord(NamedTuple):
    """A shard's own record as it is kept and shown: its size is bounded, whatever the shard says."""

    figures: shard_pb2.InspectReply  # without its lists
    steps_applied: int  # how many steps are in the weights
    staleness: Counter[int]  # pushes by staleness
    tables: tuple[shard_pb2.TableFigures, ...] = ()  # its rows of embedding tables


class SavedShard(NamedTuple):
    """What a shard says of a checkpoint that it took."""

    part: ShardPart  # where it is, as a drained checkpoint names it
    applied: IntervalSet  # the steps in it
    skipped: IntervalSet  # those of them whose push was empty


def announcement(request: pb.RegisterShardRequest) -> Announcement:
    """Return what a shard announces."""
    _check_counts(request)
    check_count("skipped", request.skipped, INTERVALS_MAX)
    check_count("chain_rounds", request.chain_rounds, ROUNDS_MAX)
    registration = ShardRegistration(
        request.incarnation,
        checked_address(request.address, "address"),
        checked_address(request.http_address, "http_address"),
        checked_address(request.data_address, "data_address"),
        checked_text(request.local_path, "local_path", PATH_BYTES_MAX),
    )
    return Announcement(
        registration,
        applied=intervals_from(request.applied),
        held=intervals_from(request.held or request.applied),
        skipped=intervals_from(request.skipped),
        returnable=frozenset(request.checkpoint_rounds),
        chains=frozenset(request.chain_rounds),
        restored=readable(request.restored, REASON_BYTES_MAX),
        first_incarnation=request.first_incarnation,
    )


def record_of(shard: int, reply: shard_pb2.InspectReply) -> ShardRecord:
    """Return the record that came from where a shard should be."""
    if reply.shard != shard:
        raise MalformedFrame(f"shard {reply.shard} answers where shard {shard} should be")
    _check_counts(reply)
    check_count("staleness", reply.staleness, STALENESS_VALUES_MAX)
    check_count("tables", reply.tables, TABLES_MAX)
    for table in reply.tables:
        check_count("hottest_keys", table.hottest_keys, HOTTEST_MAX)
    # A new message: a decoded one keeps the memory of cleared fields, and unknown fields.
    return ShardRecord(
        figures=shard_pb2.InspectReply(**{name: _figure(name, getattr(reply, name)) for name in _FIGURES}),
        steps_applied=_length(reply.applied),
        staleness=Counter({count.staleness: count.pushes for count in reply.staleness}),
        tables=tuple(
            shard_pb2.TableFigures(
                **{name: _figure(name, getattr(table, name)) for name in TABLE_FIGURES},
                hottest_keys=[shard_pb2.HotKey(key=hot.key, pushes=hot.pushes) for hot in table.hottest_keys],
            )
            for table in reply.tables
        ),
    )


def saved_shard(plan_version: int, shard: int, reply: shard_pb2.TakeCheckpointReply) -> SavedShard:
    """Return what a shard says of its checkpoint."""
    check_count("applied", reply.applied, INTERVALS_MAX)
    check_count("skipped", reply.skipped, INTERVALS_MAX)
    try:
        part = ShardPart(name=reply.folder, size_bytes=reply.manifest_bytes, sha256=reply.manifest_sha256)
    except ValueError as error:
        raise MalformedFrame(f"shard {shard}: no checkpoint is like that: {first_problem(error)}") from None
    if not part.name.startswith(f"{shard_folder(plan_version, shard)}/"):
        raise MalformedFrame(f"shard {shard} of plan {plan_version} does not save to {part.name}")
    return SavedShard(part, intervals_from(reply.applied), intervals_from(reply.skipped))


def check_count(what: str, entries: Any, most: int) -> None:
    """Raise `LimitExceeded` if a list has more entries than may be said."""
    if len(entries) > most:
        raise LimitExceeded(f"{what} has {len(entries)} entries; allowed are {most}")


def _check_counts(says: pb.RegisterShardRequest | shard_pb2.InspectReply) -> None:
    check_count("applied", says.applied, INTERVALS_MAX)
    check_count("held", says.held, INTERVALS_MAX)
    check_count("checkpoint_rounds", says.checkpoint_rounds, ROUNDS_MAX)


def _figure(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return readable(value, ERROR_BYTES_MAX)
    if not math.isfinite(value):
        raise MalformedFrame(f"{name} is {value}")
    return value


def _length(ascending: Iterable[shard_pb2.Interval]) -> int:
    """Return how many steps are in intervals; no set is made, whose cost depends on their order."""
    length = stop = 0
    for interval in ascending:
        if not stop <= interval.start <= interval.stop:
            raise MalformedFrame(f"applied: [{interval.start}, {interval.stop}) comes after step {stop}")
        length, stop = length + interval.stop - interval.start, interval.stop
    return length
