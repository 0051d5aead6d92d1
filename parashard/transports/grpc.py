"""The gRPC transport: works everywhere. A push or pull of at most 1 MiB is one message each way, a longer one a stream.

Frames are sent as they are (identity serializers), never inside protobuf. A single message is a blocking call of the
thread that waits for the answer, unless it has other answers to wait for meanwhile: gRPC's futures start a thread for
each call (docs/decisions/0025). A longer push or pull is a stream: while one message is copied the next is in transit
(docs/decisions/0022).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from parashard.errors import MalformedFrame, Unreachable
from parashard.process import failpoints
from parashard.protocol import rpc, wire
from parashard.protocol.messages import MESSAGE_BYTES, NO_KEYS, Ack, Buffers, Fetched, PullRun, Push, fetched
from parashard.transports import memory
from parashard.transports.base import Greeting, Pending, ReadRows, ShardAddress, no_rows

SERVICE = "parashard.v1.ShardData"

_Answer = TypeVar("_Answer")


class GrpcTransport:
    """A channel to one shard, by its `address`. It sends no HELLO: every frame names its target."""

    def __init__(self, where: ShardAddress, greeting: Greeting, *, connect: Callable[[str], Any] = rpc.connect) -> None:
        self._address = where.address
        self._channel = connect(where.address)
        # A stream of one message is a unary call on the wire.
        self._push: Any = self._channel.unary_unary(f"/{SERVICE}/Push")
        self._push_stream: Any = self._channel.stream_unary(f"/{SERVICE}/Push")
        self._pull: Any = self._channel.unary_unary(f"/{SERVICE}/Pull")
        self._pull_stream: Any = self._channel.unary_stream(f"/{SERVICE}/Pull")

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Begin to send a push."""
        first, rest = wire.encode_push(push)
        if push.payload.nbytes <= MESSAGE_BYTES:
            return _OneMessage(self._push, first, self._address, deadline_s, wire.decode_ack)
        try:
            call = self._push_stream.future(chain((first,), _each_noticed(rest)), timeout=deadline_s)
        except ValueError:
            raise _closed(self._address) from None
        return _Stream(call, self._address, _ack_of)

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Ask for a run and for rows."""
        frame, filling = wire.encode_pull(run), partial(_filled, run, into, read, self._address)
        if run.length_bytes <= MESSAGE_BYTES:
            return _OneMessage(self._pull, frame, self._address, deadline_s, lambda answer: filling((answer,)))
        try:
            return _Stream(self._pull_stream(frame, timeout=deadline_s), self._address, filling)
        except ValueError:
            raise _closed(self._address) from None

    def greet(self, deadline_s: float) -> None:
        """Do nothing: a channel connects by itself, and the first request reports a failure."""

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def _each_noticed(messages: Iterator[bytes]) -> Iterator[bytes]:
    for message in messages:
        failpoints.hit("worker.push.between_messages")
        yield message


class _OneMessage(Generic[_Answer]):
    """A call of one message each way; `read` decodes its answer."""

    def __init__(
        self, method: Any, frame: bytes, address: str, deadline_s: float, read: Callable[[bytes], _Answer]
    ) -> None:
        self._method = method
        self._frame = frame
        self._address = address
        self._until_s = time.monotonic() + deadline_s
        self._read = read
        self._call: Any = None  # a call in progress on another thread
        self._cancelled = False

    def start(self) -> None:
        """Begin the call, on a thread of gRPC's."""
        try:
            self._call = self._method.future(self._frame, timeout=self._left_s())
        except ValueError:
            raise _closed(self._address) from None

    def result(self) -> _Answer:
        """Wait for the answer; a call that was not started is made by this thread."""
        if self._cancelled:
            raise Unreachable("the request was cancelled", peer=self._address)
        with rpc.our_errors(self._address):
            if self._call is not None:
                return self._read(self._call.result())
            try:
                answer = self._method(self._frame, timeout=self._left_s())
            except ValueError:
                raise _closed(self._address) from None
            return self._read(answer)

    def cancel(self) -> None:
        """Stop waiting, and cancel the call."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def _left_s(self) -> float:
        return max(0.001, self._until_s - time.monotonic())


def _closed(address: str) -> Unreachable:
    """Return the error for gRPC's ValueError: another thread has closed the channel."""
    return Unreachable("the connection is closed", peer=address)


class _Stream(Generic[_Answer]):
    """A call of several messages; `read` receives and decodes its answer."""

    def __init__(self, call: Any, address: str, read: Callable[[Any], _Answer]) -> None:
        self._call = call
        self._address = address
        self._read = read

    def start(self) -> None:
        """Do nothing: the call began before this was made."""

    def result(self) -> _Answer:
        """Wait for the answer."""
        with rpc.our_errors(self._address):
            return self._read(self._call)

    def cancel(self) -> None:
        """Stop waiting, and cancel the call."""
        self._call.cancel()


def _ack_of(call: Any) -> Ack:
    return wire.decode_ack(call.result())


def _filled(run: PullRun, into: Buffers, read: ReadRows, address: str, frames: Iterable[bytes]) -> Fetched:
    """Copy the weights of each frame to their place, and pass its rows to `read`; return the combined result."""
    left, received_bytes, found = run, 0, []
    end = run.offset_bytes + run.length_bytes
    for frame in frames:
        weights = wire.decode_weights(frame, left)
        if weights.rows:
            read(weights.rows)
        found.append(Fetched(weights.version, weights.waited_s))
        position = left.offset_bytes
        for offset, values in weights.runs:
            memory.scatter(values, into, offset - run.offset_bytes)
            position = offset + values.nbytes
            received_bytes += values.nbytes
        left = run._replace(offset_bytes=position, length_bytes=end - position, keys=NO_KEYS)
    if not found:
        raise MalformedFrame("a pull was answered with nothing", peer=address)
    wire.check_answered(run, received_bytes, peer=address)
    return fetched(found)
