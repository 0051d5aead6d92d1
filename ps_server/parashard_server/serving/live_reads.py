"""LiveReads: answers readers from a running shard, for `parashard serve --fresh`.

The shard's lock is held for one piece at a time, of a pull's size at most; hashing and sorting are done without it.
Changes neither weights nor rows, so that an error here is answered to the caller, and does not end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from parashard._proto import shard_pb2 as pb
from parashard.client.proto_conversion import interval_messages
from parashard.errors import MalformedFrame, ParashardError, PeerFailed, UnknownVariable
from parashard.plan.partition import ELEMENT_BYTES
from parashard.protocol.messages import Target
from parashard.serving.published_rows import BucketDigests
from parashard_server.core.shard import Shard
from parashard_server.serving.request_handler import RequestHandler
from parashard_server.shard_host import ShardHost
from parashard_server.state.rows.live_rows import PIECE_BYTES, LiveRows, RowOrder, RowsRead, sorted_rows

WEIGHTS_BYTES_MAX = 3 << 20
"""In one answer, beside a piece of rows: together at most a pull's message."""
DIGESTED_PIECES_MAX = 8
"""Most pieces of rows that are digested for one answer, unless a single bucket has more."""

_Result = TypeVar("_Result")


class LiveReads:
    """Answers read requests; `plane` refuses them when the shard takes no requests."""

    def __init__(self, plane: RequestHandler, host: ShardHost) -> None:
        self._plane = plane
        self._host = host

    def read(self, request: pb.ReadRequest, timeout_s: float) -> pb.ReadReply:
        """Answer a request."""
        # Raises as `RequestHandler.check`, UnknownVariable for an unknown table, MalformedFrame for a read of nothing,
        # and QueueFull if the shard's lock is not free in time.
        self._plane.check(_target(request, self._host.shard))
        match request.WhichOneof("what"):
            case "changes":
                return self._changes(request, timeout_s)
            case "weights":
                return self._exclusive(request, lambda shard: _weights_in(shard, request.weights), timeout_s)
            case "buckets":
                return self._buckets(request, timeout_s)
            case _:
                raise MalformedFrame("a read of nothing; allowed: changes, buckets or weights")

    def _changes(self, request: pb.ReadRequest, timeout_s: float) -> pb.ReadReply:
        asked = request.changes

        def read(shard: Shard) -> tuple[pb.ReadReply, dict[str, RowsRead]]:
            reply = pb.ReadReply(version=shard.updates.version, position=1, complete=asked.position > 0)
            rows: dict[str, RowsRead] = {}
            if shard.tables is not None:
                found = shard.tables.live.changes(asked.position, shard.updates.version)
                reply.position, reply.lost, reply.complete = found.position, found.lost, found.complete
                rows = dict(found.rows)
            if reply.complete:
                reply.applied.extend(interval_messages(shard.updates.applied))
                if asked.weights:
                    _add_weights(reply, shard, 0, shard.storage.weights.nbytes, _known(shard, asked), WEIGHTS_BYTES_MAX)
            return reply, rows

        reply, rows = self._exclusive(request, read, timeout_s)
        reply.rows.extend(_message(table, found) for table, found in rows.items())
        return reply

    def _buckets(self, request: pb.ReadRequest, timeout_s: float) -> pb.ReadReply:
        asked = request.buckets

        def live_of(shard: Shard) -> LiveRows:
            if shard.tables is None:
                raise UnknownVariable(f"table {asked.table!r} is none of the job's, which has none")
            begin, stop = shard.tables.buckets
            if not begin <= asked.first < asked.stop <= stop:
                raise MalformedFrame(f"buckets [{asked.first}, {asked.stop}); this shard has [{begin}, {stop})")
            return shard.tables.live

        order = self._exclusive(request, lambda shard: live_of(shard).order(asked.table, asked.position), timeout_s)
        if order is None:
            due = self._exclusive(request, lambda shard: live_of(shard).records_of(asked.table), timeout_s)
            made = order = sorted_rows(*due)
            self._exclusive(request, lambda shard: live_of(shard).keep(asked.table, made), timeout_s)
        row_bytes = self._exclusive(request, lambda shard: live_of(shard).row_bytes(asked.table), timeout_s)
        at_once = max(1, PIECE_BYTES // row_bytes)

        def piece(order: RowOrder, begin: int, stop: int) -> tuple[int, RowsRead]:
            return self._exclusive(
                request,
                lambda shard: (
                    shard.updates.version,
                    live_of(shard).piece(asked.table, order, begin, stop, shard.updates.version),
                ),
                timeout_s,
            )

        if asked.digests:
            return _digested(asked, order, at_once, piece)
        begin, end = order.places(asked.first, asked.stop)
        begin = min(max(begin, order.place(asked.from_key)), end)
        stop = order.key_end(min(end, begin + at_once)) if begin < end else end
        version, rows = piece(order, begin, stop)
        reply = pb.ReadReply(version=version, rows=[_message(asked.table, rows)], more=stop < end)
        if reply.more:
            reply.next_key = int(order.keys[stop])
        return reply

    def _exclusive(self, request: pb.ReadRequest, call: Callable[[Shard], _Result], timeout_s: float) -> _Result:
        with self._host.lock.held(timeout_s):
            shard = self._host.shard
            shard.check_target(_target(request, shard))
            try:
                return call(shard)
            except ParashardError:
                raise
            except Exception as error:  # the lock would end the process, though its weights are unchanged
                raise PeerFailed(f"{type(error).__name__}: {error}") from error


def _target(request: pb.ReadRequest, shard: Shard) -> Target:
    return shard.identity._replace(
        run_id=request.run_id,
        shard=request.shard,
        plan_version=request.plan_version,
        incarnation=request.incarnation,
    )


def _digested(
    asked: pb.ReadBuckets, order: RowOrder, at_once: int, piece: Callable[[RowOrder, int, int], tuple[int, RowsRead]]
) -> pb.ReadReply:
    """Return digests of as many buckets as one answer may take, at least of one."""
    stop_bucket = order.bucket_within(asked.first, asked.stop, DIGESTED_PIECES_MAX * at_once)
    digests = BucketDigests(asked.first, stop_bucket)
    begin, end = order.places(asked.first, stop_bucket)
    while True:
        stop = min(end, begin + at_once)
        version, rows = piece(order, begin, stop)
        digests.add(rows.keys, rows.last_use, rows.values)
        if stop == end:
            return pb.ReadReply(version=version, digests=digests.digests())
        begin = stop


def _weights_in(shard: Shard, asked: pb.ReadWeights) -> pb.ReadReply:
    end = asked.offset_bytes + asked.length_bytes
    if end > shard.storage.weights.nbytes or asked.offset_bytes % ELEMENT_BYTES or end % ELEMENT_BYTES:
        raise MalformedFrame(
            f"bytes [{asked.offset_bytes}, {end}) of a shard of {shard.storage.weights.nbytes} bytes of float32"
        )
    if asked.length_bytes > WEIGHTS_BYTES_MAX:
        raise MalformedFrame(f"{asked.length_bytes} bytes of weights; allowed: at most {WEIGHTS_BYTES_MAX} at once")
    reply = pb.ReadReply(version=shard.updates.version)
    _add_weights(reply, shard, asked.offset_bytes, end, _known(shard, asked), WEIGHTS_BYTES_MAX)
    return reply


def _known(shard: Shard, asked: pb.ReadChanges | pb.ReadWeights) -> int | None:
    if not asked.HasField("known_version"):
        return None
    if asked.known_version > shard.updates.version:
        raise MalformedFrame(f"version {asked.known_version} is known; this shard is at {shard.updates.version}")
    return asked.known_version


def _add_weights(reply: pb.ReadReply, shard: Shard, begin: int, end: int, known: int | None, most_bytes: int) -> None:
    """Add the changed weights, if an answer has room for them."""
    runs = shard.storage.changed_runs(begin, end, known)
    if sum(run.values.nbytes for run in runs) > most_bytes:
        return
    reply.has_weights = True
    reply.run_offsets.extend(run.offset_bytes for run in runs)
    reply.run_lengths.extend(run.values.nbytes for run in runs)
    reply.weights = b"".join(run.values for run in runs)


def _message(table: str, rows: RowsRead) -> pb.ReadRows:
    return pb.ReadRows(
        table=table,
        keys=np.ascontiguousarray(rows.keys, "<u8").tobytes(),
        values=np.ascontiguousarray(rows.values, "<f4").tobytes(),
        last_use=np.ascontiguousarray(rows.last_use, "<u4").tobytes(),
        gone=np.ascontiguousarray(rows.gone, "<u8").tobytes(),
    )
