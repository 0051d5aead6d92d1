"""The gRPC transport: works everywhere. A push is one stream of messages, and so is the answer to a pull.

Frames travel as they are (identity serializers), never inside protobuf. One large message is slower in Python than a
stream of several: while one is copied the next is on its way (docs/decisions/0022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from parashard.errors import MalformedFrame, Unreachable
from parashard.process import failpoints
from parashard.protocol import rpc, wire
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import MESSAGE_BYTES, PullRun, Push, Receipt
from parashard.transports import memory
from parashard.transports.base import Greeting, Pending, ShardAddress

SERVICE = "parashard.v1.ShardData"


class GrpcTransport:
    """A channel to one shard.

    Parameters
    ----------
    where : ShardAddress
        Whose `address` is used.
    greeting : Greeting
        Not needed: every frame names whom it is for.
    connect : callable
        From an address to a channel; a test's fake comes in here.
    """

    def __init__(self, where: ShardAddress, greeting: Greeting, *, connect: Callable[[str], Any] = rpc.connect) -> None:
        self._address = where.address
        self._channel = connect(where.address)
        # A stream of one message is a unary call on the wire, and for that gRPC needs no thread to send it.
        self._push_one: Any = self._channel.unary_unary(f"/{SERVICE}/Push")
        self._push: Any = self._channel.stream_unary(f"/{SERVICE}/Push")
        self._pull: Any = self._channel.unary_stream(f"/{SERVICE}/Pull")

    def push(self, push: Push, deadline_s: float) -> Pending[Receipt]:
        """Begin to send a push."""
        first, rest = wire.encode_push(push)
        if push.payload.nbytes <= MESSAGE_BYTES:
            return _PushUnderWay(self._begun(self._push_one.future, first, deadline_s), self._address)
        messages = chain((first,), _each_noticed(rest))
        return _PushUnderWay(self._begun(self._push.future, messages, deadline_s), self._address)

    def pull(self, run: PullRun, into: Buffers, deadline_s: float) -> Pending[int]:
        """Ask for a run."""
        call = self._begun(self._pull, wire.encode_pull(run), deadline_s)
        return _PullUnderWay(call, self._address, run, into)

    def greet(self, deadline_s: float) -> None:
        """Do nothing: a channel connects by itself, and the first request says what stands against it."""

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _begun(self, method: Any, request: Any, deadline_s: float) -> Any:
        try:
            return method(request, timeout=max(0.001, deadline_s))
        except ValueError:  # so gRPC says that another thread has closed the channel
            raise Unreachable("the connection is closed", peer=self._address) from None


def _each_noticed(messages: Iterator[bytes]) -> Iterator[bytes]:
    for message in messages:
        failpoints.hit("worker.push.between_messages")
        yield message


class _PushUnderWay:
    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def result(self) -> Receipt:
        """Wait for the receipt."""
        with rpc.our_errors(self._address):
            return wire.decode_receipt(self._call.result())

    def cancel(self) -> None:
        """Wait no more."""
        self._call.cancel()


class _PullUnderWay:
    def __init__(self, call: Any, address: str, run: PullRun, into: Buffers) -> None:
        self._call = call
        self._address = address
        self._run = run
        self._into = into

    def result(self) -> int:
        """Wait for the weights."""
        run = self._run
        position, end, received = run.offset_bytes, run.offset_bytes + run.length_bytes, 0
        versions = []
        with rpc.our_errors(self._address):
            for frame in self._call:
                left = PullRun(run.target, run.round, run.step, position, end - position, run.known_version)
                version, runs = wire.decode_weights(frame, left)
                versions.append(version)
                for offset, values in runs:
                    memory.scatter(values, self._into, offset - run.offset_bytes)
                    position, received = offset + values.nbytes, received + values.nbytes
        if not versions:
            raise MalformedFrame("a pull was answered with nothing", peer=self._address)
        wire.check_answered(run, received, peer=self._address)
        return min(versions)

    def cancel(self) -> None:
        """Wait no more."""
        self._call.cancel()
