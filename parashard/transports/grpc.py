"""The gRPC transport: works everywhere. Frames travel as they are (identity serializers), never inside protobuf.

A push or a pull that is longer than one message goes as several, a bounded number of them under way at once (P19): one
large message is slower in Python than several (docs/decisions/0013). Chunks of a push carry an attempt id (P4).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from parashard.errors import QueueFull, UnknownAttempt, Unreachable
from parashard.process import failpoints
from parashard.protocol import rpc, wire
from parashard.protocol.buffers import Buffers
from parashard.protocol.messages import CHUNK_BYTES_MAX, PullRun, Push, PushResult, Receipt
from parashard.transports.base import Greeting, Pending, ShardAddress

SERVICE = "parashard.v1.ShardData"
IN_FLIGHT_MAX = 16  # messages of one operation that wait for an answer, each of at most 4 MiB
WHOLE_ATTEMPTS_MAX = 5
FULL_PAUSE_S = 0.02
FULL_PATIENCE_S = 2.0  # then the caller decides, who knows whether anybody still wants it

_Request = TypeVar("_Request")


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
        self._push: Any = self._channel.unary_unary(f"/{SERVICE}/Push")
        self._pull: Any = self._channel.unary_unary(f"/{SERVICE}/Pull")

    def push(self, push: Push, deadline_s: float) -> Pending[Receipt]:
        """Send the first chunk of a push; the others go while its answer is waited for."""
        return _PushUnderWay(push, self._calls(self._push, deadline_s))

    def pull(self, run: PullRun, into: Buffers, deadline_s: float) -> Pending[int]:
        """Ask for the first messages of a run."""
        return _PullUnderWay(run, into, self._calls(self._pull, deadline_s))

    def greet(self, deadline_s: float) -> None:
        """Do nothing: a channel connects by itself, and the first request says what stands against it."""

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _calls(self, method: Any, deadline_s: float) -> _Calls:
        return _Calls(method, self._address, time.monotonic() + deadline_s)


class _Calls:
    """The calls of one operation, which have one deadline and are cancelled together."""

    def __init__(self, method: Any, address: str, deadline_s: float) -> None:
        self._method = method
        self._address = address
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        self._cancelled = False

    def begin(self, frame: bytes) -> Any:
        """Start a call; return what `answer` waits for."""
        with self._lock:
            if self._cancelled:
                raise Unreachable("the request was cancelled", peer=self._address)
            try:
                call = self._method.future(frame, timeout=self.left_s)
            except ValueError:  # so gRPC says that another thread has closed the channel
                raise Unreachable("the connection is closed", peer=self._address) from None
            self._open.add(call)
            return call

    def answer(self, call: Any) -> bytes:
        """Wait for a call's frame."""
        try:
            with rpc.our_errors(self._address):
                frame: bytes = call.result()
                return frame
        finally:
            with self._lock:
                self._open.discard(call)

    def in_flight(
        self,
        requests: Iterator[_Request],
        frame_of: Callable[[_Request], bytes],
        begun: Iterable[tuple[_Request, Any]] = (),
    ) -> Iterator[tuple[_Request, bytes]]:
        """Send requests, after those that have begun, at most IN_FLIGHT_MAX at a time; yield each with its answer."""
        waiting = deque(begun)
        while True:
            for request in islice(requests, IN_FLIGHT_MAX - len(waiting)):
                waiting.append((request, self.begin(frame_of(request))))
            if not waiting:
                return
            first, call = waiting.popleft()
            yield first, self._patiently(call, first, frame_of)

    def cancel(self) -> None:
        """End every call."""
        with self._lock:
            self._cancelled = True
            calls = list(self._open)
        for call in calls:
            call.cancel()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.001, self._deadline_s - time.monotonic())

    def _patiently(self, call: Any, request: _Request, frame_of: Callable[[_Request], bytes]) -> bytes:
        """Wait for a frame; while the shard's line is full send the request again, since others have been taken."""
        until_s = min(self._deadline_s, time.monotonic() + FULL_PATIENCE_S)
        while True:
            try:
                return self.answer(call)
            except QueueFull:
                if time.monotonic() + FULL_PAUSE_S >= until_s:
                    raise
                time.sleep(FULL_PAUSE_S)
                call = self.begin(frame_of(request))


_Answer_co = TypeVar("_Answer_co", covariant=True)


class _UnderWay(Generic[_Answer_co]):
    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    def cancel(self) -> None:
        """Wait no more."""
        self._calls.cancel()


class _PushUnderWay(_UnderWay[Receipt]):
    def __init__(self, push: Push, calls: _Calls) -> None:
        super().__init__(calls)
        self._push = push
        self._attempt = new_attempt()
        self._first: Any = self._begun()

    def result(self) -> Receipt:
        """Wait for the receipt; send the rest of the chunks first."""
        for _ in range(WHOLE_ATTEMPTS_MAX):
            try:
                return self._sent()
            except UnknownAttempt:  # P4: the assembly is gone; send it again whole
                self._attempt = new_attempt()
                self._first = self._begun()
        raise UnknownAttempt(f"step {self._push.step}: the shard lost {WHOLE_ATTEMPTS_MAX} attempts in a row")

    def _begun(self) -> Any:
        return self._calls.begin(self._frame(0))

    def _sent(self) -> Receipt:
        receipt = wire.decode_receipt(self._calls.answer(self._first))
        if receipt.result is not PushResult.PENDING:
            return receipt
        frames = self._calls.in_flight(self._offsets(), self._frame)
        receipts = [wire.decode_receipt(frame) for _, frame in frames]
        done = [r for r in receipts if r.result is not PushResult.PENDING]
        if not done:
            raise UnknownAttempt(f"step {self._push.step}: every chunk is in and the push is not")
        return next((r for r in done if r.result is not PushResult.DUPLICATE), done[0])

    def _offsets(self) -> Iterator[int]:
        for offset in range(CHUNK_BYTES_MAX, self._push.payload.nbytes, CHUNK_BYTES_MAX):
            failpoints.hit("worker.push.between_chunks")
            yield offset

    def _frame(self, offset_bytes: int) -> bytes:
        return wire.encode_push(self._push, self._attempt, offset_bytes)


class _PullUnderWay(_UnderWay[int]):
    def __init__(self, run: PullRun, into: Buffers, calls: _Calls) -> None:
        super().__init__(calls)
        self._run = run
        self._into = into
        self._parts = self._cut()
        self._begun = deque((part, calls.begin(wire.encode_pull(part))) for part in islice(self._parts, IN_FLIGHT_MAX))

    def result(self) -> int:
        """Wait for the weights; ask for the rest of them meanwhile."""
        first, call = self._begun.popleft()
        versions = [self._filled(first, self._calls.answer(call))]  # refused, where the line is full: to be asked later
        for part, frame in self._calls.in_flight(self._parts, wire.encode_pull, self._begun):
            versions.append(self._filled(part, frame))
        return min(versions)

    def _filled(self, part: PullRun, frame: bytes) -> int:
        version, runs = wire.decode_weights(frame, part)
        for offset, values in runs:
            self._into.fill(offset - self._run.offset_bytes, values)
        return version

    def _cut(self) -> Iterator[PullRun]:
        run = self._run
        end = run.offset_bytes + run.length_bytes
        for offset in range(run.offset_bytes, end, CHUNK_BYTES_MAX) if run.length_bytes else (run.offset_bytes,):
            length = min(CHUNK_BYTES_MAX, end - offset)  # an empty shard is asked too: its version and its round matter
            yield PullRun(run.target, run.round, run.step, offset, length, run.known_version, run.traceparent)


def new_attempt() -> int:
    """Return a random attempt id (P4)."""
    return secrets.randbits(64)
