"""Frames: the only file that knows the byte layout of the data plane (`protos/tensor.proto` documents it).

Translates between the values of `parashard.messages` and bytes. Every length is checked before anything is read by it;
a frame that is not ours raises `MalformedFrame`, one over a bound `LimitExceeded`. Called by the client and the shard.
"""

from __future__ import annotations

import struct
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from parashard.errors import LimitExceeded, MalformedFrame
from parashard.messages import CHUNK_BYTES_MAX, PullRun, PushChunk, PushResult, Receipt, Slice, Target, Weights
from parashard.partition import Partition
from protos import tensor_pb2

MAGIC = b"PSF1"
HEADER_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 8 + HEADER_BYTES_MAX + 16 + CHUNK_BYTES_MAX
PAYLOAD_ALIGNMENT_BYTES = 16

_PREFIX = struct.Struct("<4sI")
_Header = TypeVar("_Header", bound=Message)


def encode_frame(header: Message, payload: bytes | memoryview = b"") -> bytes:
    """Return one frame; the payload is copied once."""
    head = header.SerializeToString()
    if len(head) > HEADER_BYTES_MAX:
        raise LimitExceeded(f"a frame's header has {len(head)} bytes; allowed are {HEADER_BYTES_MAX}")
    payload_bytes = memoryview(payload).nbytes
    if payload_bytes > CHUNK_BYTES_MAX:
        raise LimitExceeded(f"a frame's payload has {payload_bytes} bytes; allowed are {CHUNK_BYTES_MAX}")
    return b"".join((_PREFIX.pack(MAGIC, len(head)), head, bytes(_padding(len(head))), payload))


def decode_frame(frame: bytes, header_type: type[_Header]) -> tuple[_Header, memoryview]:
    """Return a frame's header and a view of its payload.

    Raises
    ------
    MalformedFrame
        If the frame is short, does not begin with the magic, or its header does not parse.
    LimitExceeded
        If the declared header or the payload is longer than allowed.
    """
    if len(frame) < _PREFIX.size:
        raise MalformedFrame(f"a frame has at least {_PREFIX.size} bytes, found {len(frame)}")
    magic, head_bytes = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise MalformedFrame(f"a frame begins with {MAGIC!r}, found {magic!r}")
    if head_bytes > HEADER_BYTES_MAX:
        raise LimitExceeded(f"a frame declares a header of {head_bytes} bytes; allowed are {HEADER_BYTES_MAX}")
    payload_start = _PREFIX.size + head_bytes + _padding(head_bytes)
    if len(frame) < payload_start:
        raise MalformedFrame(f"a frame declares {payload_start} bytes before its payload but has {len(frame)}")
    if len(frame) - payload_start > CHUNK_BYTES_MAX:
        raise LimitExceeded(f"a payload has {len(frame) - payload_start} bytes; allowed are {CHUNK_BYTES_MAX}")
    view = memoryview(frame)
    header = header_type()
    try:
        header.ParseFromString(frame[_PREFIX.size : _PREFIX.size + head_bytes])
    except DecodeError as error:
        raise MalformedFrame(f"a frame's header is not a {header_type.DESCRIPTOR.name}: {error}") from None
    return header, view[payload_start:]


def _padding(head_bytes: int) -> int:
    return -(_PREFIX.size + head_bytes) % PAYLOAD_ALIGNMENT_BYTES


def encode_push(chunk: PushChunk) -> bytes:
    """Return the frame of a chunk of a push."""
    header = tensor_pb2.PushHeader(
        target=_target_message(chunk.target),
        worker=chunk.worker,
        step=chunk.step,
        attempt=chunk.attempt,
        offset_bytes=chunk.offset_bytes,
        total_bytes=chunk.total_bytes,
        skipped=chunk.skipped,
        pulled=chunk.pulled_version is not None,
        pulled_version=chunk.pulled_version or 0,
    )
    for piece in chunk.slices:
        header.slices.add(
            variable=piece.partition.variable,
            row_start=piece.partition.row_start,
            row_stop=piece.partition.row_stop,
            row_elements=piece.row_elements,
            dtype=tensor_pb2.DTYPE_FLOAT32,
        )
    return encode_frame(header, chunk.payload)


def decode_push(frame: bytes) -> PushChunk:
    """Return the chunk in a frame; its payload is a view of the frame."""
    header, payload = decode_frame(frame, tensor_pb2.PushHeader)
    return PushChunk(
        target=_target(header.target),
        worker=header.worker,
        step=header.step,
        attempt=header.attempt,
        offset_bytes=header.offset_bytes,
        total_bytes=header.total_bytes,
        slices=tuple(_slice(s) for s in header.slices),
        skipped=header.skipped,
        pulled_version=header.pulled_version if header.pulled else None,
        payload=payload,
    )


def encode_receipt(receipt: Receipt) -> bytes:
    """Return the frame of a shard's answer to a chunk."""
    return encode_frame(
        tensor_pb2.PushReply(
            result=receipt.result.value,  # type: ignore[arg-type]  # the enum's values are the wire's
            version=receipt.version,
            staleness_known=receipt.staleness is not None,
            staleness=receipt.staleness or 0,
        )
    )


def decode_receipt(frame: bytes) -> Receipt:
    """Return the receipt in a frame."""
    reply, _ = decode_frame(frame, tensor_pb2.PushReply)
    try:
        result = PushResult(reply.result)
    except ValueError:
        raise MalformedFrame(f"a push was answered with the unknown result {reply.result}") from None
    return Receipt(result, reply.version, reply.staleness if reply.staleness_known else None)


def encode_pull(run: PullRun) -> bytes:
    """Return the frame that asks for a run of a shard's vector."""
    return encode_frame(
        tensor_pb2.PullHeader(
            target=_target_message(run.target),
            for_round=run.round is not None,
            round=run.round or 0,
            for_step=run.step is not None,
            step=run.step or 0,
            offset_bytes=run.offset_bytes,
            length_bytes=run.length_bytes,
        )
    )


def decode_pull(frame: bytes) -> PullRun:
    """Return the request in a frame."""
    header, payload = decode_frame(frame, tensor_pb2.PullHeader)
    if payload.nbytes:
        raise MalformedFrame(f"a pull has no payload, found {payload.nbytes} bytes")
    return PullRun(
        target=_target(header.target),
        round=header.round if header.for_round else None,
        step=header.step if header.for_step else None,
        offset_bytes=header.offset_bytes,
        length_bytes=header.length_bytes,
    )


def encode_weights(weights: Weights) -> bytes:
    """Return the frame of a run of weights, copied out of the view."""
    return encode_frame(tensor_pb2.PullReply(version=weights.version), weights.values)


def decode_weights(frame: bytes) -> Weights:
    """Return the run of weights in a frame, as a view of it."""
    reply, payload = decode_frame(frame, tensor_pb2.PullReply)
    return Weights(reply.version, payload)


def _target_message(target: Target) -> tensor_pb2.Target:
    return tensor_pb2.Target(
        run_id=target.run_id,
        job_digest=target.job_digest,
        plan_version=target.plan_version,
        shard=target.shard,
        incarnation=target.incarnation,
    )


def _target(message: tensor_pb2.Target) -> Target:
    return Target(message.run_id, message.job_digest, message.plan_version, message.shard, message.incarnation)


def _slice(message: tensor_pb2.TensorSlice) -> Slice:
    if message.dtype != tensor_pb2.DTYPE_FLOAT32:
        raise MalformedFrame(f"slices are float32 (dtype 1), found dtype {message.dtype} for {message.variable!r}")
    return Slice(Partition(message.variable, message.row_start, message.row_stop), message.row_elements)
