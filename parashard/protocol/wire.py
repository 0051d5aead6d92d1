"""The data plane's values as headers and as frames (`protos/tensor.proto` documents both).

Translates between the values of `parashard.protocol.messages`, protobuf headers and, for gRPC, frames of bytes. Every
length is checked before it is used to read; a malformed frame raises `MalformedFrame`, one over a bound
`LimitExceeded`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from parashard._proto import tensor_pb2
from parashard.errors import LimitExceeded, MalformedFrame
from parashard.plan.embedding import BFLOAT16, Keys, dtype_name
from parashard.plan.partition import Partition
from parashard.protocol.messages import (
    MESSAGE_BYTES,
    MESSAGE_BYTES_MAX,
    NO_KEYS,
    NO_ROWS,
    ROWS_BYTES_MAX,
    Ack,
    Buffers,
    DType,
    FoundRows,
    PullRun,
    Push,
    PushResult,
    RowSlice,
    Slice,
    Target,
    VectorRun,
    Weights,
)

MAGIC = b"PSF1"
HEADER_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 8 + HEADER_BYTES_MAX + 16 + MESSAGE_BYTES_MAX
PAYLOAD_ALIGNMENT_BYTES = 16
NOTHING = memoryview(b"")

_PREFIX = struct.Struct("<4sI")
_DTYPES: dict[int, DType] = {dtype.value: dtype for dtype in DType}
_ROW_DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DTYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DTYPE_BFLOAT16: BFLOAT16,
}
_OF_ROW_DTYPES = {dtype_name(dtype.newbyteorder("=")): value for value, dtype in _ROW_DTYPES.items()}
_Header = TypeVar("_Header", bound=Message)


def encode_frame(header: Message, payload: Sequence[memoryview] = ()) -> bytes:
    """Return one frame; the pieces of the payload are copied once."""
    head = header.SerializeToString()
    if len(head) > HEADER_BYTES_MAX:
        raise LimitExceeded(f"a frame's header has {len(head)} bytes; allowed are {HEADER_BYTES_MAX}")
    payload_bytes = sum(piece.nbytes for piece in payload)
    if payload_bytes > MESSAGE_BYTES_MAX:
        raise LimitExceeded(f"a frame's payload has {payload_bytes} bytes; allowed are {MESSAGE_BYTES_MAX}")
    padding = bytes(-(_PREFIX.size + len(head)) % PAYLOAD_ALIGNMENT_BYTES)
    return b"".join((_PREFIX.pack(MAGIC, len(head)), head, padding, *payload))


def decode_frame(frame: bytes, header_type: type[_Header]) -> tuple[_Header, memoryview]:
    """Return a frame's header and a view of its payload."""
    # Raises MalformedFrame if the bytes are not a frame with this type of header; LimitExceeded if the declared header
    # or the payload is longer than allowed.
    if len(frame) < _PREFIX.size:
        raise MalformedFrame(f"a frame has at least {_PREFIX.size} bytes, found {len(frame)}")
    magic, head_bytes = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise MalformedFrame(f"a frame begins with {MAGIC!r}, found {magic!r}")
    if head_bytes > HEADER_BYTES_MAX:
        raise LimitExceeded(f"a frame declares a header of {head_bytes} bytes; allowed are {HEADER_BYTES_MAX}")
    payload_start = -(-(_PREFIX.size + head_bytes) // PAYLOAD_ALIGNMENT_BYTES) * PAYLOAD_ALIGNMENT_BYTES
    if len(frame) < payload_start:
        raise MalformedFrame(f"a frame declares {payload_start} bytes before its payload but has {len(frame)}")
    if len(frame) - payload_start > MESSAGE_BYTES_MAX:
        raise LimitExceeded(f"a payload has {len(frame) - payload_start} bytes; allowed are {MESSAGE_BYTES_MAX}")
    view = memoryview(frame)
    header = header_type()
    try:
        header.ParseFromString(frame[_PREFIX.size : _PREFIX.size + head_bytes])
    except DecodeError as error:
        raise MalformedFrame(f"a frame's header is not a {header_type.DESCRIPTOR.name}: {error}") from None
    return header, view[payload_start:]


# --- headers ---


def push_header(push: Push) -> tensor_pb2.PushHeader:
    """Return the header of a push."""
    header = tensor_pb2.PushHeader(
        target=target_message(push.target),
        worker=push.worker,
        step=push.step,
        total_bytes=push.payload.nbytes,
        skipped=push.skipped,
        pulled=push.pulled_version is not None,
        pulled_version=push.pulled_version or 0,
    )
    if push.traceparent:  # not among the arguments above: there an empty one would cost as much as any other
        header.traceparent = push.traceparent
    if push.learning_rate is not None:
        header.learning_rate = push.learning_rate
    if push.norm is not None:
        header.norm = push.norm
    if push.void:
        header.void = True
    for piece in push.slices:
        header.slices.add(
            variable=piece.partition.variable,
            row_start=piece.partition.row_start,
            row_stop=piece.partition.row_stop,
            row_elements=piece.row_elements,
            dtype=piece.dtype.value,
            kept=piece.kept,
        )
    for rows in push.rows:
        header.rows.add(table=rows.table, rows=rows.rows, row_elements=rows.row_elements, dtype=rows.dtype.value)
    return header


def push_from(header: tensor_pb2.PushHeader, payload: memoryview) -> Push:
    """Build a push from its header and payload."""
    t = header.target
    return Push(
        target=Target(t.run_id, t.job_digest, t.plan_version, t.shard, t.incarnation),
        worker=header.worker,
        step=header.step,
        slices=tuple(_slice(s) for s in header.slices),
        skipped=header.skipped,
        pulled_version=header.pulled_version if header.pulled else None,
        payload=Buffers([payload]),
        traceparent=header.traceparent,
        learning_rate=header.learning_rate or None,
        void=header.void,
        rows=tuple(_row_slice(rows) for rows in header.rows),
        norm=header.norm if header.HasField("norm") else None,
    )


def ack_message(ack: Ack) -> tensor_pb2.PushReply:
    """Return the header of a shard's answer to a push."""
    return tensor_pb2.PushReply(
        result=ack.result.value,  # type: ignore[arg-type]  # the enum's values are the wire's
        version=ack.version,
        staleness_known=ack.staleness is not None,
        staleness=ack.staleness or 0,
    )


def ack(reply: tensor_pb2.PushReply) -> Ack:
    """Return the ack in a header."""
    try:
        result = PushResult(reply.result)
    except ValueError:
        raise MalformedFrame(f"a push was answered with the unknown result {reply.result}") from None
    return Ack(result, reply.version, reply.staleness if reply.staleness_known else None)


def pull_header(run: PullRun, *, in_slot: bool = False) -> tensor_pb2.PullHeader:
    """Return the header of a request for a run of a shard's vector."""
    header = tensor_pb2.PullHeader(
        target=target_message(run.target),
        for_round=run.round is not None,
        round=run.round or 0,
        for_step=run.step is not None,
        step=run.step or 0,
        offset_bytes=run.offset_bytes,
        length_bytes=run.length_bytes,
        known=run.known_version is not None,
        known_version=run.known_version or 0,
        in_slot=in_slot,
        least_version=run.least_version,
    )
    if run.traceparent:
        header.traceparent = run.traceparent
    for table, keys in run.keys.items():
        header.keys.add(table=table, rows=len(keys))
    return header


def keys_bytes_of(header: tensor_pb2.PullHeader) -> int:
    """Return the size of a pull's row keys in bytes."""
    return 8 * sum(named.rows for named in header.keys)


def keys_payload(run: PullRun) -> list[memoryview]:
    """Return the payload of a pull request: each table's row keys as little-endian uint64."""
    return [np.ascontiguousarray(keys, "<u8").data.cast("B") for keys in run.keys.values() if len(keys)]


def check_keys_bytes(header: tensor_pb2.PullHeader, payload_bytes: int) -> None:
    """Raise `MalformedFrame` unless a pull's payload has one key for each row that its header declares."""
    if keys_bytes_of(header) != payload_bytes:
        raise MalformedFrame(f"a pull of {keys_bytes_of(header) // 8} rows has a payload of {payload_bytes} bytes")


def pull_run(header: tensor_pb2.PullHeader, payload: memoryview = NOTHING) -> PullRun:
    """Return the request in a header; its keys are views of the payload."""
    # Raises MalformedFrame unless the payload has one key for each row and each table is named once.
    keys: dict[str, Keys] = {}
    begin = 0
    if header.keys or payload:
        check_keys_bytes(header, payload.nbytes)
    for named in header.keys:
        if named.table in keys:
            raise MalformedFrame(f"a pull names table {named.table!r} twice")
        end = begin + 8 * named.rows
        keys[named.table] = np.frombuffer(payload[begin:end], "<u8")
        begin = end
    t = header.target
    return PullRun(
        target=Target(t.run_id, t.job_digest, t.plan_version, t.shard, t.incarnation),
        round=header.round if header.for_round else None,
        step=header.step if header.for_step else None,
        offset_bytes=header.offset_bytes,
        length_bytes=header.length_bytes,
        known_version=header.known_version if header.known else None,
        traceparent=header.traceparent,
        keys=keys,
        least_version=header.least_version,
    )


def parts_of(run: PullRun, size_bytes: int | None = None) -> Iterator[PullRun]:
    """Split a run into parts of at most `size_bytes` (default: one message); an empty run is one part."""
    # Only the first part has the row keys and the trace context: more spans for one request would add nothing.
    end = run.offset_bytes + run.length_bytes
    offset, size_bytes = run.offset_bytes, size_bytes or MESSAGE_BYTES
    while True:
        length = min(size_bytes, end - offset)
        part = run._replace(offset_bytes=offset, length_bytes=length)
        yield part if offset == run.offset_bytes else part._replace(traceparent="", keys=NO_KEYS)
        offset += length
        if offset == end:
            return


def weights_message(weights: Weights) -> tensor_pb2.PullReply:
    """Return the header of an answer to a pull."""
    reply = tensor_pb2.PullReply(
        version=weights.version,
        run_offsets=[run.offset_bytes for run in weights.runs],
        run_lengths=[run.values.nbytes for run in weights.runs],
        waited_s=weights.waited_s,
    )
    for table, (_, values) in weights.rows.items():
        reply.tables.add(
            table=table,
            present=values.shape[0],
            row_elements=values.shape[1],
            dtype=_OF_ROW_DTYPES[dtype_name(values.dtype)],
        )
    return reply


def rows_payload(weights: Weights) -> list[memoryview]:
    """Return the rows in the payload of an answer to a pull, as views."""
    pieces: list[memoryview] = []
    for present, values in weights.rows.values():
        pieces += [np.packbits(present, bitorder="little").data, _little(values).reshape(-1).data]
    return [piece.cast("B") for piece in pieces if piece.nbytes]


def _little(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def rows_bytes_of(reply: tensor_pb2.PullReply, asked: PullRun) -> int:
    """Return the size in bytes of the rows at the end of an answer's payload."""
    # Raises MalformedFrame unless the tables are the requested ones; LimitExceeded above `ROWS_BYTES_MAX`.
    if not (reply.tables or asked.keys):
        return 0
    if [found.table for found in reply.tables] != list(asked.keys):
        raise MalformedFrame(f"asked for rows of {list(asked.keys)}, answered with {[t.table for t in reply.tables]}")
    found_bytes = sum(sum(_lengths_of(found, len(asked.keys[found.table]))) for found in reply.tables)
    if found_bytes > ROWS_BYTES_MAX:
        raise LimitExceeded(f"rows of {found_bytes} bytes in one answer; allowed are {ROWS_BYTES_MAX}")
    return found_bytes


def _lengths_of(found: tensor_pb2.TableRows, keys: int) -> tuple[int, int]:
    """Return the sizes in bytes of a table's presence bitmap and of its rows."""
    dtype = _ROW_DTYPES.get(found.dtype)
    if dtype is None:
        raise MalformedFrame(f"rows of table {found.table!r} in the encoding {found.dtype}")
    return -(-keys // 8), dtype.itemsize * found.present * found.row_elements


def rows_from(reply: tensor_pb2.PullReply, payload: memoryview, asked: PullRun) -> dict[str, FoundRows]:
    """Return an answer's rows as views of `payload`, the last `rows_bytes_of` bytes of the answer."""
    # Raises MalformedFrame if a presence bitmap does not have as many bits set as there are rows.
    rows: dict[str, FoundRows] = {}
    begin = 0
    for found in reply.tables:
        keys = len(asked.keys[found.table])
        bits_bytes, values_bytes = _lengths_of(found, keys)
        middle, end = begin + bits_bytes, begin + bits_bytes + values_bytes
        bits = np.unpackbits(np.frombuffer(payload[begin:middle], np.uint8), count=keys, bitorder="little")
        if int(bits.sum()) != found.present:
            raise MalformedFrame(
                f"table {found.table!r}: {int(bits.sum())} of the keys have a row, {found.present} came"
            )
        values = np.frombuffer(payload[middle:end], _ROW_DTYPES[found.dtype])
        rows[found.table] = FoundRows(bits.view(np.bool_), values.reshape(found.present, found.row_elements))
        begin = end
    return rows


def runs_within(reply: tensor_pb2.PullReply, asked: PullRun, payload_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, length) in bytes of each run of an answer."""
    # Raises MalformedFrame unless they are ascending, within the requested run, and add up to the payload's length.
    if len(reply.run_offsets) != len(reply.run_lengths):
        raise MalformedFrame(f"{len(reply.run_offsets)} runs begin and {len(reply.run_lengths)} have a length")
    runs = list(zip(reply.run_offsets, reply.run_lengths, strict=True))
    position = asked.offset_bytes
    for offset, length in runs:
        if offset < position or offset + length > asked.offset_bytes + asked.length_bytes:
            raise MalformedFrame(
                f"asked for bytes [{asked.offset_bytes}, {asked.offset_bytes + asked.length_bytes}), answered with "
                f"[{offset}, {offset + length})"
            )
        position = offset + length
    if sum(reply.run_lengths) != payload_bytes:
        raise MalformedFrame(f"runs of {sum(reply.run_lengths)} bytes in a payload of {payload_bytes}")
    return runs


def check_answered(asked: PullRun, answered_bytes: int, *, peer: str | None = None) -> None:
    """Raise `MalformedFrame` if a pull without a known version was not answered with every requested byte."""
    if asked.known_version is None and answered_bytes != asked.length_bytes:
        raise MalformedFrame(f"asked for {asked.length_bytes} bytes, answered with {answered_bytes}", peer=peer)


@lru_cache(maxsize=256)
def target_message(value: Target) -> tensor_pb2.Target:
    """Return the message that names an incarnation of a shard; a request's header copies it."""
    return tensor_pb2.Target(
        run_id=value.run_id,
        job_digest=value.job_digest,
        plan_version=value.plan_version,
        shard=value.shard,
        incarnation=value.incarnation,
    )


def target(message: tensor_pb2.Target) -> Target:
    """Return the incarnation of a shard that a message names."""
    return Target(message.run_id, message.job_digest, message.plan_version, message.shard, message.incarnation)


def _slice(message: tensor_pb2.TensorSlice) -> Slice:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise _unknown_dtype(message.dtype, f"a slice of {message.variable!r}")
    if message.kept and dtype is not DType.TOPK:
        raise MalformedFrame(f"a slice of {message.variable!r} keeps {message.kept} elements, and is not DTYPE_TOPK")
    if message.row_stop <= message.row_start:
        raise MalformedFrame(f"a slice of {message.variable!r} has the rows [{message.row_start}, {message.row_stop})")
    return Slice(
        Partition(message.variable, message.row_start, message.row_stop), message.row_elements, dtype, message.kept
    )


def _row_slice(message: tensor_pb2.RowSlice) -> RowSlice:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise _unknown_dtype(message.dtype, f"the rows of table {message.table!r}")
    if dtype is DType.TOPK:
        raise MalformedFrame(f"the rows of table {message.table!r} are DTYPE_TOPK; allowed: every other dtype")
    return RowSlice(message.table, message.rows, message.row_elements, dtype)


def _unknown_dtype(value: int, what: str) -> MalformedFrame:
    return MalformedFrame(f"{what} has the unknown dtype {value}; allowed: 1 to {len(DType)}")


# --- frames, for gRPC ---


def encode_push(push: Push) -> tuple[bytes, Iterator[bytes]]:
    """Return a push's first frame, and messages with the rest of its payload."""
    size_bytes = push.payload.nbytes
    each = min(size_bytes, MESSAGE_BYTES)
    rest = range(each, size_bytes, each) if each < size_bytes else ()
    return (
        encode_frame(push_header(push), push.payload.run(0, each)),
        (b"".join(push.payload.run(at, min(size_bytes, at + each))) for at in rest),
    )


def decode_push(frame: bytes) -> tuple[tensor_pb2.PushHeader, memoryview]:
    """Return the header in a push's first frame, and a view of that frame's part of the payload."""
    # Raises MalformedFrame if the frame has more payload than the header declares.
    header, payload = decode_frame(frame, tensor_pb2.PushHeader)
    if payload.nbytes > header.total_bytes:
        raise MalformedFrame(f"step {header.step}: a push of {header.total_bytes} bytes begins with {payload.nbytes}")
    return header, payload


def encode_ack(value: Ack) -> bytes:
    """Return the frame of a shard's answer to a push."""
    return encode_frame(ack_message(value))


def decode_ack(frame: bytes) -> Ack:
    """Return the ack in a frame."""
    return ack(decode_frame(frame, tensor_pb2.PushReply)[0])


def encode_pull(run: PullRun) -> bytes:
    """Return the frame of a request for a run of a shard's vector and for rows."""
    return encode_frame(pull_header(run), keys_payload(run) if run.keys else ())


def decode_pull(frame: bytes) -> PullRun:
    """Return the request in a frame."""
    return pull_run(*decode_frame(frame, tensor_pb2.PullHeader))


def encode_weights(weights: Weights) -> bytes:
    """Return the frame of an answer to a pull, copied out of the views."""
    payload = [run.values.cast("B") for run in weights.runs]
    if weights.rows:
        payload += rows_payload(weights)
    return encode_frame(weights_message(weights), payload)


def decode_weights(frame: bytes, asked: PullRun) -> Weights:
    """Return the weights in a frame, as views of it."""
    reply, payload = decode_frame(frame, tensor_pb2.PullReply)
    has_rows = bool(asked.keys or reply.tables)
    middle = payload.nbytes - (rows_bytes_of(reply, asked) if has_rows else 0)
    runs, position = [], 0
    for offset, length in runs_within(reply, asked, middle):
        runs.append(VectorRun(offset, payload[position : position + length]))
        position += length
    rows = rows_from(reply, payload[middle:], asked) if has_rows else NO_ROWS
    return Weights(reply.version, tuple(runs), rows, reply.waited_s)
