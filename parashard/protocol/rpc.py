"""gRPC channels and servers, and the only translation between parashard's errors and gRPC's.

The only file that knows gRPC's options, status codes and metadata. A servicer raises a `ParashardError`; the client
that called it gets the same class, with the peer's address. Every call has a deadline.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from parashard import errors
from parashard.errors import ParashardError, PeerFailed, Unavailable, Unreachable
from parashard.process.addresses import address_family, split_address
from parashard.process.logs import log
from parashard.protocol import wire
from parashard.security.credentials import Credentials
from parashard.security.grpc_admission import METADATA_BYTES_MAX, AdmissionInterceptor
from parashard.security.grpc_tls import RotatingChannel, check_caller, server_credentials, utc_now

CONTROL_DEADLINE_S = 10.0
DATA_DEADLINE_S = 60.0
SLOWEST_BYTES_PER_S = 8 << 20  # slowest link that the deadlines of large pushes and pulls allow for
SERVER_THREADS = 64  # of one server: calls served at once
CALLS_MAX = 128  # served, or answered and not yet read: each answer may be of 4 MiB; one more is refused
WAITING_CALLS_MAX = 4 * SERVER_THREADS  # served, or waiting for a thread; gRPC itself refuses one more
STREAMS_MAX = 128  # concurrent calls on one connection
CONNECTIONS_MAX = 1024
_CONNECT_S = 5.0  # to a socket of this process
HANDSHAKE_DEADLINE_S = 5.0  # for a peer's TLS handshake and the start of HTTP/2
CODE_KEY = "parashard-error"
UNKNOWN_CALL = "UNIMPLEMENTED"  # prefix of the message if the server has no such call: it is none of ours
TLS_MARK = "OPENSSL_internal:"  # precedes the reason in gRPC's message of a failed handshake
MESSAGE_BYTES_MAX = 2000  # gRPC sends it percent-encoded, three bytes for one, in metadata of at most 8 KiB

_RECEIVE_OPTION = "grpc.max_receive_message_length"
_SHARED_OPTIONS = [
    ("grpc.max_send_message_length", wire.FRAME_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.write_buffer_size", 1 << 20),  # the default of 64 KiB makes a push 1.1 times as long
]
_SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_DEADLINE_S * 1000)),
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # two processes on one port would split a shard's pushes between them
]
_CHANNEL_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever http_proxy says
    ("grpc.enable_retries", 0),  # only the application retries: it knows that a push has an identity
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted container may keep its name at another address; by default gRPC resolves a name only twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]

_STATUS_BY_GROUP: list[tuple[type[ParashardError], grpc.StatusCode]] = [
    (errors.NotAllowed, grpc.StatusCode.PERMISSION_DENIED),
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.StaleRequest, grpc.StatusCode.ABORTED),
    (errors.Fenced, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.RetryLater, grpc.StatusCode.UNAVAILABLE),
    (errors.ConfigurationError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.StoreFailed, grpc.StatusCode.UNAVAILABLE),
    (errors.PeerFailed, grpc.StatusCode.INTERNAL),
    (errors.JobFailed, grpc.StatusCode.FAILED_PRECONDITION),
]

# Meaning of a status without our code: gRPC itself, or another program on that port, sent it.
ERROR_BY_FOREIGN_STATUS: dict[grpc.StatusCode, type[ParashardError]] = {
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unreachable,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,  # a message over the size limit: see `_foreign_kind`
    grpc.StatusCode.INVALID_ARGUMENT: errors.MalformedFrame,
    grpc.StatusCode.OUT_OF_RANGE: errors.MalformedFrame,
    grpc.StatusCode.UNIMPLEMENTED: errors.WrongRun,
    grpc.StatusCode.NOT_FOUND: errors.WrongRun,
    grpc.StatusCode.ALREADY_EXISTS: errors.WrongRun,
    grpc.StatusCode.FAILED_PRECONDITION: errors.WrongRun,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: errors.NotAllowed,
    grpc.StatusCode.ABORTED: Unreachable,
    grpc.StatusCode.INTERNAL: PeerFailed,
    grpc.StatusCode.UNKNOWN: PeerFailed,
    grpc.StatusCode.DATA_LOSS: PeerFailed,
    grpc.StatusCode.OK: PeerFailed,
}


def status_of(error: ParashardError) -> grpc.StatusCode:
    """Return the gRPC status that carries an error."""
    return next(status for group, status in _STATUS_BY_GROUP if isinstance(error, group))


def _bounded(message: str) -> str:
    """Return a message that fits into metadata: a longer one would replace the error by one about metadata."""
    content = message.encode(errors="replace")
    if len(content) <= MESSAGE_BYTES_MAX:
        return content.decode()
    return content[:MESSAGE_BYTES_MAX].decode(errors="ignore") + " ..."


def _answer_with(error: Exception, method: str, context: grpc.ServicerContext) -> NoReturn:
    """End a call with an error of ours; any other is a bug, and logged."""
    if isinstance(error, ParashardError):
        context.set_trailing_metadata(((CODE_KEY, error.code),))
        context.abort(status_of(error), _bounded(error.message))
    log.error("call-broke", method=method, exc_info=error)
    context.set_trailing_metadata(((CODE_KEY, PeerFailed.code),))
    context.abort(grpc.StatusCode.INTERNAL, _bounded(f"{type(error).__name__}: {error}"))


def data_deadline_s(length_bytes: int) -> float:
    """Return the seconds that a push or a pull of this length may take on one shard."""
    return DATA_DEADLINE_S + length_bytes / SLOWEST_BYTES_PER_S


def check_reachable(host: str) -> None:
    """Raise ConfigurationError if the processes of this machine could not reach each other on a host."""
    try:
        with (
            socket.create_server((host, 0), family=address_family(host)) as listening,
            socket.create_connection((host, listening.getsockname()[1]), timeout=_CONNECT_S),
        ):
            return
    except OSError as error:
        raise errors.ConfigurationError(
            f"cluster.host (host= of a strategy): processes cannot reach each other on {host!r}: {error}; "
            "allowed: an address of this machine whose interface is up, such as 127.0.0.1, or ::1 where there is IPv6"
        ) from None


def _cause_in(address: str) -> str:
    """Return why nothing can listen on an address, as the system says it; "": it can."""
    try:
        host, port = split_address(address, 0)
        socket.create_server((host, port), family=address_family(host)).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _server_options(request_bytes_max: int, connections_max: int) -> list[tuple[str, int]]:
    options = [
        *_SERVER_OPTIONS,
        (_RECEIVE_OPTION, request_bytes_max),
        ("grpc.max_allowed_incoming_connections", connections_max),
    ]
    if request_bytes_max < wire.FRAME_BYTES_MAX:
        # With this probe gRPC's receive window grows with a connection's speed. Only pushes are worth that memory.
        options.append(("grpc.http2.bdp_probe", 0))
    return options


class Server:
    """A gRPC server with our options, the error seam and the standard health service; port 0 picks a free one.

    With credentials every caller must show a certificate, whose role determines the allowed calls until it expires.
    gRPC refuses a message of more than `request_bytes_max` by its declared length; each call being served may hold that
    much memory. Beside these, the service may keep `held_max` calls waiting (`admission.releasing_place`), each with a
    thread.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials | None = None,
        request_bytes_max: int = wire.FRAME_BYTES_MAX,
        held_max: int = 0,
        *,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        check = None if credentials is None else lambda method, context: check_caller(method, context, now())
        self.admission = AdmissionInterceptor(CALLS_MAX + held_max, _answer_with, check, served_max=SERVER_THREADS)
        self.grpc = grpc.server(
            futures.ThreadPoolExecutor(SERVER_THREADS + held_max, thread_name_prefix="rpc"),
            interceptors=[self.admission],
            options=_server_options(request_bytes_max, CONNECTIONS_MAX + held_max),
            maximum_concurrent_rpcs=WAITING_CALLS_MAX + held_max,
        )
        self._health = health.HealthServicer()
        self._serving = health_pb2.HealthCheckResponse.SERVING
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        host = address.rpartition(":")[0]
        try:
            if credentials is None:
                port = self.grpc.add_insecure_port(address)
            else:
                port = self.grpc.add_secure_port(address, server_credentials(credentials))
        except RuntimeError as error:  # it says nothing of the cause
            raise Unavailable(f"cannot listen on {address}: {_cause_in(address) or error}") from None
        self.address = f"{host}:{port}"

    def start(self) -> None:
        """Listen, and answer health checks with SERVING."""
        self.grpc.start()
        self.admission.start()
        self._health.set("", self._serving)

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, let running ones end within `grace_s`."""
        self._health.enter_graceful_shutdown()
        self.grpc.stop(grace_s).wait()
        self.admission.stop()


def data_handlers(
    service: str,
    push: Callable[[Iterator[bytes], grpc.ServicerContext], bytes],
    pull: Callable[[bytes, grpc.ServicerContext], Iterator[bytes]],
) -> Any:
    """Return generic handlers of Push, which takes a stream, and Pull, which returns one; of bytes, not protobuf."""
    handlers: dict[str, Any] = {
        "Push": grpc.stream_unary_rpc_method_handler(push),
        "Pull": grpc.unary_stream_rpc_method_handler(pull),
    }
    return grpc.method_handlers_generic_handler(service, handlers)


def connect(address: str, credentials: Credentials | None = None, answer_bytes_max: int = wire.FRAME_BYTES_MAX) -> Any:
    """Return a channel, inside TLS where there are credentials; nothing is sent before the first call."""
    # An answer of more than `answer_bytes_max` is refused by its declared length, as `LimitExceeded`.
    options = [*_CHANNEL_OPTIONS, (_RECEIVE_OPTION, answer_bytes_max)]
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return RotatingChannel(credentials, lambda ours: grpc.secure_channel(address, ours, options=options))


@contextmanager
def our_errors(address: str) -> Iterator[None]:
    """Translate errors of a gRPC call inside into a ParashardError that names the peer."""
    try:
        yield
    except grpc.RpcError as error:
        raise translated(error, address) from None
    except grpc.FutureTimeoutError:
        raise Unreachable("no answer before the deadline", peer=address) from None
    except grpc.FutureCancelledError:
        raise Unreachable("the request was cancelled", peer=address) from None


def translated(error: grpc.RpcError, address: str) -> ParashardError:
    """Translate a failed call into a ParashardError."""
    assert isinstance(error, grpc.Call), f"an RpcError that is not a call: {error!r}"
    ours = dict(error.trailing_metadata() or ()).get(CODE_KEY)
    known = ParashardError.from_code(ours) if isinstance(ours, str) else None
    details = error.details() or ""
    kind = known or _foreign_kind(error.code(), details)
    return kind(details if known else _foreign_message(error.code(), details), peer=address)


def _foreign_kind(status: grpc.StatusCode, details: str) -> type[ParashardError]:
    # gRPC uses RESOURCE_EXHAUSTED both for a message above the size limit and for a server that is full at the moment.
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return errors.LimitExceeded
    return ERROR_BY_FOREIGN_STATUS[status]


def _foreign_message(status: grpc.StatusCode, details: str) -> str:
    """Shorten gRPC's own message of an error."""
    if status is grpc.StatusCode.UNAVAILABLE:
        if TLS_MARK in details:
            return f"no TLS with the server: {details.rpartition(TLS_MARK)[2].removesuffix(': OK')}"
        if "Socket closed" in details:
            return "no answer: Socket closed (perhaps a missing certificate, or one that the other side refuses)"
        return f"no answer: {details.rpartition(': ')[2] or 'unavailable'}"
    return f"{status.name}: {details}" if details else status.name
