"""Admission of gRPC calls: a limit on concurrent calls, and deadlines for sending and reading.

Owns the count and the two deadlines, each for one message, and decodes messages. gRPC's own limit does not count unread
answers; its threads would wait without bound for a message that does not come, and it would keep an unread answer
without bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from parashard.errors import LimitExceeded, MalformedFrame, NotAllowed, QueueFull, Unreachable
from parashard.security.identity import PULL, PUSH, SUBSCRIBE

MESSAGE_DEADLINE_S = 20.0  # to receive a message, at most little more than 4 MiB, after the headers or the last one
ANSWER_DEADLINE_S = 20.0  # for the peer to read a message of the answer, of the same size
METADATA_BYTES_MAX = 16 << 10  # of one call
LOOK_S = 1.0


class AdmissionInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Admits permitted calls, up to a limit, before their message is received; ends calls of slow peers.

    `refuse` answers with the error raised, `check` raises unless the caller may call the method. At most `served_max`
    calls with a single message are served at once. Streams are served for the named methods only, which bound a call's
    time.
    """

    def __init__(
        self,
        calls_max: int,
        refuse: Callable[[Exception, str, grpc.ServicerContext], NoReturn],
        check: Callable[[str, grpc.ServicerContext], None] | None = None,
        streams: Collection[str] = (PUSH, PULL, SUBSCRIBE),
        clock: Callable[[], float] = time.monotonic,
        served_max: int = 1 << 16,
    ) -> None:
        self._streams = streams
        self._calls_max = calls_max
        self._refuse = refuse
        self._check = check
        self._places = threading.Semaphore(served_max)
        self.under_way = 0
        """Calls served now, or with an unread answer."""
        self.refused = 0
        """Calls refused because `calls_max` were under way."""
        self.slow = 0
        """Calls ended because their peer did not send its message or read its answer in time."""
        self._clock = clock
        self._handlers: dict[str, Any] = {}  # of methods that are served: gRPC asks at every call
        self._lock = threading.Lock()
        self._until_s: dict[_Call, float] = {}  # deadlines of calls that wait for their peer
        self._stopping = threading.Event()
        self._looking = threading.Thread(target=self._look_again, name="rpc-slow", daemon=True)

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return a handler that is called before the message is received, and receives it within a deadline."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler = continuation(handler_call_details)
            if handler is None or (handler.request_streaming and method not in self._streams):
                return None  # gRPC answers UNIMPLEMENTED
            self._handlers[method] = self._admitting(method, handler)
        return self._handlers[method]

    def _admitting(self, method: str, handler: Any) -> Any:
        serve = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        answers_with_stream = handler.response_streaming and method in self._streams
        if handler.response_streaming and not answers_with_stream:
            serve = _not_served
        decode = handler.request_deserializer

        def admitted(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            try:
                call = self._begin(method, context)
                try:
                    request: Any = self._received(messages, call)
                    if handler.request_streaming:
                        return serve(request, context)
                    with self._places:
                        return serve(_decoded(decode, next(request)) if decode else next(request), context)
                finally:
                    self._waits(call, ANSWER_DEADLINE_S)
            except Exception as error:  # noqa: BLE001  # after any failure the caller gets an error
                self._refuse(error, method, context)

        def admitted_stream(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                call = self._begin(method, context)
                try:
                    request: Any = self._received(messages, call)
                    if not handler.request_streaming:
                        request = _decoded(decode, next(request)) if decode else next(request)
                    for answer in serve(request, context):
                        self._waits(call, ANSWER_DEADLINE_S)
                        yield answer  # it is on its way when gRPC asks for the next
                        self._waits(call, None)
                finally:
                    self._waits(call, ANSWER_DEADLINE_S)
            except Exception as error:  # noqa: BLE001
                self._refuse(error, method, context)

        # Bytes: if gRPC itself decodes, an invalid message is answered and logged as an internal error.
        if answers_with_stream:
            return grpc.stream_stream_rpc_method_handler(
                admitted_stream, response_serializer=handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(admitted, response_serializer=handler.response_serializer)

    @contextmanager
    def releasing_place(self) -> Iterator[None]:
        """Let another call be served during the block, in which this one waits; this one counts as under way."""
        self._places.release()
        try:
            yield
        finally:
            self._places.acquire()

    def start(self) -> None:
        """Begin to end calls whose peers are slow."""
        self._looking.start()

    def stop(self) -> None:
        """Stop."""
        self._stopping.set()
        if self._looking.is_alive():
            self._looking.join()

    def look(self) -> None:
        """End the calls whose deadline has passed."""
        now_s = self._clock()
        with self._lock:
            late = [call for call, until_s in self._until_s.items() if now_s >= until_s]
            for call in late:
                del self._until_s[call]
            self.slow += len(late)
        for call in late:
            call.context.cancel()

    def _look_again(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look()

    def _begin(self, method: str, context: grpc.ServicerContext) -> _Call:
        if self._check is not None:
            self._check(method, context)
        metadata_bytes = sum(len(key) + len(value) for key, value in context.invocation_metadata())
        # gRPC's own limit is per frame, and lets much more pass.
        if metadata_bytes > METADATA_BYTES_MAX:
            raise LimitExceeded(f"{metadata_bytes} bytes of metadata; allowed are {METADATA_BYTES_MAX}")
        call = _Call(context)
        with self._lock:
            if self.under_way >= self._calls_max:
                self.refused += 1
                raise QueueFull(f"{self.under_way} calls are under way here; at most {self._calls_max} may be")
            self.under_way += 1
            self._until_s[call] = self._clock() + MESSAGE_DEADLINE_S
        if not context.add_callback(partial(self._end, call)):
            self._end(call)  # it is over already; the next error is not sent
        return call

    def _received(self, messages: Iterator[bytes], call: _Call) -> Iterator[bytes]:
        """Yield each message, which has its own deadline; a call has at least one."""
        count = 0
        while True:
            if count:
                self._waits(call, MESSAGE_DEADLINE_S)
            try:
                message = next(messages)
            except StopIteration:
                if not count:
                    raise MalformedFrame("a call brings one message, this one none") from None
                self._waits(call, None)
                return
            except grpc.RpcError:  # the peer left, or was too slow
                what = "before its message was here" if not count else f"after {count} messages"
                raise Unreachable(f"the call ended {what}") from None
            count += 1
            self._waits(call, None)
            yield message

    def _waits(self, call: _Call, within_s: float | None) -> None:
        """Set the deadline of a call that waits for its peer; None: it does not wait."""
        with self._lock:
            if within_s is None or call.ended:
                self._until_s.pop(call, None)
            else:
                self._until_s[call] = self._clock() + within_s

    def _end(self, call: _Call) -> None:
        with self._lock:
            call.ended = True
            self._until_s.pop(call, None)
            self.under_way -= 1


@dataclass(eq=False)
class _Call:
    """A call in progress."""

    context: grpc.ServicerContext
    ended: bool = False


def _decoded(decode: Callable[[bytes], Any], message: bytes) -> Any:
    try:
        return decode(message)
    except DecodeError:
        raise MalformedFrame(f"{len(message)} bytes are not the message that this call brings") from None


def _not_served(message: Any, context: grpc.ServicerContext) -> Any:
    raise NotAllowed("calls that are answered with a stream are not served")
