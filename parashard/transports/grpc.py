"""The gRPC transport: works everywhere. A push or pull of at most 1 MiB is one message each way, a longer one a stream.

Frames travel as they are (identity serializers), never inside protobuf. One message goes by a blocking call on a thread
that is kept: gRPC's own futures start a thread for each call (docs/decisions/0025). A longer push or pull is a stream
of such messages: while one is copied the next is on its way (docs/decisions/0022).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, Generic, TypeVar

from parashard.errors import MalformedFrame, Unreachable
from parashard.process import failpoints
from parashard.protocol import rpc, wire
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import MESSAGE_BYTES, PullRun, Push, Receipt
from parashard.transports import memory
from parashard.transports.base import Greeting, Pending, ShardAddress

SERVICE = "parashard.v1.ShardData"
CALLS_MAX = 8  # of one message, at once; as many as a stream transport has connections

_Answer = TypeVar("_Answer")


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
        # A stream of one message is a unary call on the wire.
        self._push: Any = self._channel.unary_unary(f"/{SERVICE}/Push")
        self._push_stream: Any = self._channel.stream_unary(f"/{SERVICE}/Push")
        self._pull: Any = self._channel.unary_unary(f"/{SERVICE}/Pull")
        self._pull_stream: Any = self._channel.unary_stream(f"/{SERVICE}/Pull")
        self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="grpc-calls")

    def push(self, push: Push, deadline_s: float) -> Pending[Receipt]:
        """Begin to send a push."""
        first, rest = wire.encode_push(push)
        if push.payload.nbytes <= MESSAGE_BYTES:
            return _OneMessage(self._threads, self._push, first, self._address, deadline_s, wire.decode_receipt)
        messages = chain((first,), _each_noticed(rest))
        return _PushStream(self._begun(self._push_stream.future, messages, deadline_s), self._address)

    def pull(self, run: PullRun, into: Buffers, deadline_s: float) -> Pending[int]:
        """Ask for a run."""
        frame, filling = wire.encode_pull(run), _Filling(run, into, self._address)
        if run.length_bytes <= MESSAGE_BYTES:
            read = filling.from_one
            return _OneMessage(self._threads, self._pull, frame, self._address, deadline_s, read)
        return _PullStream(self._begun(self._pull_stream, frame, deadline_s), self._address, filling)

    def greet(self, deadline_s: float) -> None:
        """Do nothing: a channel connects by itself, and the first request says what stands against it."""

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()
        self._threads.shutdown(wait=False)

    def _begun(self, method: Any, request: Any, deadline_s: float) -> Any:
        try:
            return method(request, timeout=max(0.001, deadline_s))
        except ValueError:  # so gRPC says that another thread has closed the channel
            raise Unreachable("the connection is closed", peer=self._address) from None


def _each_noticed(messages: Iterator[bytes]) -> Iterator[bytes]:
    for message in messages:
        failpoints.hit("worker.push.between_messages")
        yield message


class _OneMessage(Generic[_Answer]):
    """A call of one message each way, which a thread makes; `read` is called with the answer by who waits for it."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        method: Callable[..., bytes],
        frame: bytes,
        address: str,
        deadline_s: float,
        read: Callable[[bytes], _Answer],
    ) -> None:
        self._address = address
        self._until_s = time.monotonic() + deadline_s
        self._read = read
        self._answer: Future[bytes] = Future()
        try:
            threads.submit(self._call, method, frame)
        except RuntimeError:  # so an executor says that another thread has closed it
            self._answer.set_exception(Unreachable("the connection is closed", peer=address))

    def result(self) -> _Answer:
        """Wait for the answer."""
        try:
            with rpc.our_errors(self._address):
                return self._read(self._answer.result(self._left_s()))
        except CancelledError:
            raise Unreachable("the request was cancelled", peer=self._address) from None
        except TimeoutError:
            raise Unreachable("no answer before the deadline", peer=self._address) from None

    def cancel(self) -> None:
        """Wait no more; the call ends with its deadline or with the channel."""
        self._answer.cancel()

    def _call(self, method: Callable[..., bytes], frame: bytes) -> None:
        if self._answer.cancelled():
            return
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                answer = method(frame, timeout=self._left_s())
            except ValueError:  # so gRPC says that another thread has closed the channel
                self._answer.set_exception(Unreachable("the connection is closed", peer=self._address))
            except BaseException as error:  # noqa: BLE001  # whoever waits for the answer is to have it
                self._answer.set_exception(error.with_traceback(None))
            else:
                self._answer.set_result(answer)

    def _left_s(self) -> float:
        return max(0.001, self._until_s - time.monotonic())


class _PushStream:
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


class _PullStream:
    def __init__(self, call: Any, address: str, filling: _Filling) -> None:
        self._call = call
        self._address = address
        self._filling = filling

    def result(self) -> int:
        """Wait for the weights."""
        with rpc.our_errors(self._address):
            for frame in self._call:
                self._filling.take(frame)
        return self._filling.end()

    def cancel(self) -> None:
        """Wait no more."""
        self._call.cancel()


class _Filling:
    """What a pull has brought so far."""

    def __init__(self, run: PullRun, into: Buffers, address: str) -> None:
        self._run = run
        self._into = into
        self._address = address
        self._position = run.offset_bytes
        self._received_bytes = 0
        self._versions: list[int] = []

    def from_one(self, frame: bytes) -> int:
        """Return the version of a pull whose answer is this frame alone, once its weights are in place."""
        self.take(frame)
        return self.end()

    def take(self, frame: bytes) -> None:
        """Put a frame's weights in their place."""
        run = self._run
        end = run.offset_bytes + run.length_bytes
        left = PullRun(run.target, run.round, run.step, self._position, end - self._position, run.known_version)
        version, runs = wire.decode_weights(frame, left)
        self._versions.append(version)
        for offset, values in runs:
            memory.scatter(values, self._into, offset - run.offset_bytes)
            self._position = offset + values.nbytes
            self._received_bytes += values.nbytes

    def end(self) -> int:
        """Return the lowest version among the frames; raise `MalformedFrame` if some are missing."""
        if not self._versions:
            raise MalformedFrame("a pull was answered with nothing", peer=self._address)
        wire.check_answered(self._run, self._received_bytes, peer=self._address)
        return min(self._versions)
