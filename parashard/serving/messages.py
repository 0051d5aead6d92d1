"""Messages of the serving protocol (`protos/serving.proto`), to and from values; every length is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from parashard._proto import serving_pb2 as pb
from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.pulled_rows import TableSet
from parashard.errors import ConfigurationError, MalformedFrame
from parashard.plan.embedding import KEY_BYTES, EmbeddingTable, Keys, RowDtype
from parashard.plan.optimizers import SGD
from parashard.plan.partition import ELEMENT_BYTES, Partition
from parashard.plan.variables import Float32s, Initializer, Variable
from parashard.serving.checkpoint_watcher import Published, Sight
from parashard.serving.differences import Part, Shown
from parashard.serving.replica import (
    Begin,
    HeldShard,
    PartitionAhead,
    Replica,
    RowsPart,
    TableAhead,
    VariablePart,
)
from parashard.serving.versions import ShardVersion, age_of

_KEYS = np.dtype("<u8")
_FLOATS = np.dtype("<f4")


def version_message(version: ShardVersion, *, steps: bool = False) -> pb.ShardVersion:
    """Return a version as a message, with its steps or without."""
    message = id_message(version.id)
    message.pushes, message.written_at, message.parts_from = version.pushes, version.written_at, version.parts_from
    if steps:
        message.applied.extend(pb.StepRange(start=start, stop=stop) for start, stop in version.applied)
    return message


def id_message(id_: CheckpointId) -> pb.ShardVersion:
    """Return the name of a version as a message."""
    return pb.ShardVersion(
        plan_version=id_.plan_version, shard=id_.shard, incarnation=id_.incarnation, number=id_.number
    )


def id_of(message: pb.ShardVersion) -> CheckpointId:
    """Return the name of the version in a message."""
    return CheckpointId(message.plan_version, message.shard, message.incarnation, message.number)


def sight_message(published: Published | None, sight: Sight, now_s: float) -> pb.Sight:
    """Return how new what is served is."""
    return pb.Sight(
        newest=map(id_message, sight.newest),
        served=[version_message(version) for version in published.versions] if published else (),
        final=sight.final_steps is not None,
        final_steps=sight.final_steps or 0,
        now=now_s,
        problem=sight.problem,
        looked_at=sight.looked_at or 0.0,
    )


def sight_of(message: pb.Sight) -> Sight:
    """Return how new what is served is."""
    newest = tuple(map(id_of, message.newest))
    final_steps = message.final_steps if message.final else None
    return Sight(newest, final_steps, message.problem, message.looked_at or None)


def table_messages(tables: TableSet, published: Published) -> list[pb.ServedTable]:
    """Return what a client has to know of tables."""
    return [
        pb.ServedTable(
            name=name,
            row_elements=table.row_elements,
            initializer=table.initializer.kind,
            scale=table.initializer.scale,
            dtype=table.dtype,
            rows=sum(shard.tables[name].rows.rows for shard in published.shards),
        )
        for name, table in sorted(tables.by_name.items())
    ]


def tables_of_served(served: pb.GetServedReply, wanted: Iterable[str]) -> TableSet:
    """Return tables as a client knows them: their elements and first values, and no optimizer that matters."""
    try:
        tables = [
            EmbeddingTable(
                table.name,
                table.row_elements,
                SGD(learning_rate=1.0),
                Initializer(table.initializer, table.scale),
                dtype=next((dtype for dtype in get_args(RowDtype) if dtype == table.dtype), "float32"),
            )
            for table in served.tables
            if table.name in wanted
        ]
    except ConfigurationError as error:
        raise MalformedFrame(str(error)) from None
    return TableSet(tuple(tables), served.seed)


def variables_of_served(served: pb.GetServedReply, wanted: Iterable[str]) -> dict[str, Variable]:
    """Return variables as a client knows them: names and shapes; raises MalformedFrame if there can be none such."""
    try:
        return {
            variable.name: Variable(variable.name, tuple(variable.shape))
            for variable in served.variables
            if variable.name in wanted
        }
    except ConfigurationError as error:
        raise MalformedFrame(str(error)) from None


def keys_of(content: bytes) -> Keys:
    """Return keys out of a message's bytes."""
    if len(content) % KEY_BYTES:
        raise MalformedFrame(f"{len(content)} bytes of keys; a key has {KEY_BYTES}")
    return np.frombuffer(content, _KEYS).astype(np.uint64, copy=False)


def floats_of(content: bytes, row_elements: int | None = None) -> Float32s:
    """Return float32 numbers out of a message's bytes, flat or in rows; raises MalformedFrame where they do not fit."""
    row_bytes = ELEMENT_BYTES * (row_elements or 1)
    if len(content) % row_bytes:
        raise MalformedFrame(f"{len(content)} bytes of numbers; a row has {row_bytes}")
    flat = np.frombuffer(content, _FLOATS).astype(np.float32, copy=False)
    return flat if row_elements is None else flat.reshape(-1, row_elements)


def bytes_of(array: npt.NDArray[np.generic]) -> bytes:
    """Return the bytes of keys or of float32 numbers, little-endian."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def part_message(part: Part) -> pb.SubscribeReply:
    """Return a part of a difference as a message."""
    match part:
        case None:
            return pb.SubscribeReply(end=pb.ShardEnd())
        case Begin():
            return pb.SubscribeReply(begin=_begin_message(part))
        case RowsPart(table, keys, values, gone):
            content = pb.RowsPart(table=table, keys=bytes_of(keys), rows=bytes_of(values), gone=bytes_of(gone))
            return pb.SubscribeReply(rows=content)
        case VariablePart((name, start, stop), first, values):
            content_ = pb.VariablePart(
                variable=name, row_start=start, row_stop=stop, first=first, values=bytes_of(values)
            )
            return pb.SubscribeReply(variable=content_)


def feed(replica: Replica, row_elements: dict[str, int], message: pb.SubscribeReply) -> bool:
    """Give a part to a replica; return whether a newer version counts now."""
    match message.WhichOneof("part"):
        case "begin":
            replica.begin(_begin_of(message.begin))
        case "rows":
            part = message.rows
            if part.table not in row_elements:
                raise MalformedFrame(f"rows of table {part.table!r}, which was not subscribed to")
            keys, values = keys_of(part.keys), floats_of(part.rows, row_elements[part.table])
            if len(keys) != len(values):
                raise MalformedFrame(f"table {part.table!r}: {len(keys)} keys and {len(values)} rows")
            replica.rows(RowsPart(part.table, keys, values, keys_of(part.gone)))
        case "variable":
            piece = message.variable
            replica.variable(VariablePart(_partition_of(piece), piece.first, floats_of(piece.values)))
        case "end":
            return replica.end()
        case other:
            raise MalformedFrame(f"{other or 'nothing'} where a part of a version is due")
    return False


def _begin_message(begin: Begin) -> pb.ShardBegin:
    return pb.ShardBegin(
        version=version_message(begin.version, steps=True),
        shards=begin.shards,
        tables=[
            pb.TableBegin(table=t.table, whole=t.whole, rows=t.rows, gone=t.gone, token=t.token) for t in begin.tables
        ],
        elements=begin.elements,
        partitions=[
            pb.PartitionBegin(variable=name, row_start=start, row_stop=stop, token=token, follows=follows)
            for (name, start, stop), token, follows in begin.partitions
        ],
    )


def _begin_of(message: pb.ShardBegin) -> Begin:
    told = message.version
    applied = tuple((step.start, step.stop) for step in told.applied)
    if any(start >= stop for start, stop in applied) or any(a[1] >= b[0] for a, b in itertools.pairwise(applied)):
        raise MalformedFrame(f"{id_of(told)}: its steps are no ascending intervals")
    version = ShardVersion(id_of(told), told.pushes, applied, told.written_at, told.parts_from)
    tables = tuple(TableAhead(t.table, t.whole, t.rows, t.gone, t.token) for t in message.tables)
    partitions = tuple(PartitionAhead(_partition_of(p), p.token, p.follows) for p in message.partitions)
    return Begin(version, message.shards, tables, message.elements, partitions)


def _partition_of(message: pb.PartitionBegin | pb.HeldPartition | pb.VariablePart) -> Partition:
    return Partition(message.variable, message.row_start, message.row_stop)


def held_messages(held: Sequence[HeldShard]) -> list[pb.HeldShard]:
    """Return what a subscriber shows of what it has."""
    return [
        pb.HeldShard(
            version=version_message(shard.state.version),
            tables=[pb.HeldTable(table=table, token=token) for table, token in shard.tokens.items()],
            partitions=[
                pb.HeldPartition(variable=name, row_start=start, row_stop=stop, token=token)
                for (name, start, stop), token in shard.state.digests.items()
            ],
        )
        for shard in held
    ]


def shown_of(messages: Iterable[pb.HeldShard]) -> list[Shown]:
    """Return what a subscriber shows that it has."""
    return [
        Shown(
            age_of(id_of(held.version), held.version.parts_from),
            {table.table: table.token for table in held.tables},
            {_partition_of(partition): partition.token for partition in held.partitions},
        )
        for held in messages
    ]
