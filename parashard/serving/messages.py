"""Messages of the serving protocol (`protos/serving.proto`), to and from values; every length is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import get_args

import numpy as np
import numpy.typing as npt

from parashard._proto import serving_pb2 as pb
from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.pulled_rows import TableSet
from parashard.errors import ConfigurationError, MalformedFrame
from parashard.plan.embedding import KEY_BYTES, EmbeddingTable, Keys, RowDtype
from parashard.plan.optimizers import SGD
from parashard.plan.partition import ELEMENT_BYTES
from parashard.plan.variables import Float32s, Initializer, Variable
from parashard.serving.checkpoint_watcher import Published, Sight
from parashard.serving.versions import ShardVersion

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


def version_of(message: pb.ShardVersion) -> ShardVersion:
    """Return the version in a message, with its steps."""
    applied = tuple((step.start, step.stop) for step in message.applied)
    if any(start >= stop for start, stop in applied) or any(a[1] >= b[0] for a, b in itertools.pairwise(applied)):
        raise MalformedFrame(f"{id_of(message)}: its steps are no ascending intervals")
    return ShardVersion(id_of(message), message.pushes, applied, message.written_at, message.parts_from)


def sight_message(published: Published | None, sight: Sight, now_s: float) -> pb.Sight:
    """Return the served and the newest versions as a message."""
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
    """Return the newest versions in a message."""
    newest = tuple(map(id_of, message.newest))
    final_steps = message.final_steps if message.final else None
    return Sight(newest, final_steps, message.problem, message.looked_at or None)


def table_messages(tables: TableSet, published: Published) -> list[pb.ServedTable]:
    """Return tables as messages, with the settings that a client needs."""
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
    """Return tables as a client knows them: row length, initial values and dtype; the optimizer is a placeholder."""
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
    """Return variables as a client knows them: names and shapes; raises MalformedFrame if one is invalid."""
    try:
        return {
            variable.name: Variable(variable.name, tuple(variable.shape))
            for variable in served.variables
            if variable.name in wanted
        }
    except ConfigurationError as error:
        raise MalformedFrame(str(error)) from None


def keys_of(content: bytes) -> Keys:
    """Return keys from a message's bytes."""
    if len(content) % KEY_BYTES:
        raise MalformedFrame(f"{len(content)} bytes of keys; a key has {KEY_BYTES}")
    return np.frombuffer(content, _KEYS).astype(np.uint64, copy=False)


def floats_of(content: bytes, row_elements: int | None = None) -> Float32s:
    """Return float32 numbers from a message's bytes, flat or in rows; raises MalformedFrame if they do not fit."""
    row_bytes = ELEMENT_BYTES * (row_elements or 1)
    if len(content) % row_bytes:
        raise MalformedFrame(f"{len(content)} bytes of numbers; a row has {row_bytes}")
    flat = np.frombuffer(content, _FLOATS).astype(np.float32, copy=False)
    return flat if row_elements is None else flat.reshape(-1, row_elements)


def bytes_of(array: npt.NDArray[np.generic]) -> bytes:
    """Return the bytes of keys or of float32 numbers, little-endian."""
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
