"""gRPC over TLS: server credentials, the check of every call's certificate, and channels that rotate certificates.

Channel options are in `parashard.protocol.rpc`, the table of roles in `parashard.security.identity`; the files are
`parashard.security.credentials`'.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import grpc

from parashard.errors import NotAllowed, NotReady
from parashard.security.credentials import Credentials, Material
from parashard.security.identity import check_call

URI_KEY = "peer_uri"  # only the URIs among a verified certificate's alternative names
CERTIFICATE_KEY = "x509_pem_cert"
CHAIN_KEY = "x509_pem_cert_chain"  # the other certificates that the peer sent


def utc_now() -> datetime:
    """Return the present moment."""
    return datetime.now(UTC)


def check_caller(method: str, context: grpc.ServicerContext, now: datetime) -> None:
    """Refuse a call that the roles in the caller's certificate do not allow, or whose certificate has expired.

    A role that may not make the call gets `NotAllowed`. An expired certificate gets `NotReady`: TLS checks the time
    only in a full handshake, neither on an open connection nor when a session is resumed, which Python's gRPC cannot
    disable. After a late renewal the caller's retries succeed.
    """
    _check_time(context, now)
    check_call(method, uris_of(context))


def uris_of(context: grpc.ServicerContext) -> list[str]:
    """Return the URIs in the caller's verified certificate; empty without TLS."""
    uris: Any = context.auth_context().get(URI_KEY, ())  # a list of bytes, whatever the stubs say
    return [uri.decode() for uri in uris]


def _check_time(context: grpc.ServicerContext, now: datetime) -> None:
    shown: Any = context.auth_context()
    ends = _end(b"".join(shown.get(CERTIFICATE_KEY, ())), b"".join(shown.get(CHAIN_KEY, ())))
    if now > ends:
        raise NotReady(f"the caller's certificate expired at {ends:%Y-%m-%d %H:%M:%S} UTC; renew it and call again")


@lru_cache(maxsize=1024)  # a connection's are the same at every call
def _end(certificate: bytes, others: bytes) -> datetime:
    """Return when a verified certificate or the first of its intermediates expires."""
    from cryptography import x509  # here: slow to import, and needed only with TLS

    try:
        link = x509.load_pem_x509_certificate(certificate)
        issuers = x509.load_pem_x509_certificates(others) if others else []
    except ValueError as error:
        raise NotAllowed(f"the caller's certificate cannot be read: {error}") from None
    end = link.not_valid_after_utc
    # The peer may have sent more than the verified path: of certificates with the same name the latest counts.
    for _ in issuers:
        found = [issuer for issuer in issuers if issuer.subject == link.issuer and issuer.subject != link.subject]
        if not found:
            break
        link = max(found, key=lambda issuer: issuer.not_valid_after_utc)
        end = min(end, link.not_valid_after_utc)
    return end


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Return credentials of a server that requires client certificates; a handshake uses the folder's present files."""
    first = credentials.current()
    used = [first]

    def fetch() -> Any:
        material = credentials.current()
        if material is used[0]:
            return None
        used[0] = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(_configuration(first), fetch, require_client_authentication=True)


def _configuration(material: Material) -> Any:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.ca)


class RotatingChannel:
    """A channel that uses the folder's present certificate; a call under way keeps the earlier one."""

    def __init__(self, credentials: Credentials, open_one: Callable[[grpc.ChannelCredentials], grpc.Channel]) -> None:
        self._credentials = credentials
        self._open_one = open_one
        self._lock = threading.Lock()
        self._material = credentials.current()
        self._channels = [self._opened()]  # the present one is the last
        self._closed = False

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> _RotatingCall:
        """Return a callable for a method, which uses the present channel at each call."""
        return _RotatingCall(self, lambda channel: channel.unary_unary(method, *serializers, **more))

    def stream_unary(self, method: str) -> _RotatingCall:
        """Return the same for a method that takes a stream."""
        return _RotatingCall(self, lambda channel: channel.stream_unary(method))

    def unary_stream(self, method: str, *serializers: Any, **more: Any) -> Callable[..., Any]:
        """Return a callable for a method that answers with a stream."""
        return _RotatingCall(self, lambda channel: channel.unary_stream(method, *serializers, **more)).stream

    def close(self) -> None:
        """Close every channel; calls in progress are cancelled."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.channel.close()

    def begin(self) -> _Channel:
        """Return the channel for a new call; `end` must follow."""
        material = self._credentials.current()
        with self._lock:
            if not self._closed:
                if material is not self._material:
                    self._material = material
                    self._channels.append(self._opened())
                for unused in [channel for channel in self._channels[:-1] if not channel.calls]:
                    self._channels.remove(unused)
                    unused.channel.close()
            self._channels[-1].calls += 1
            return self._channels[-1]

    def end(self, channel: _Channel) -> None:
        """Record the end of a call."""
        with self._lock:
            channel.calls -= 1

    def _opened(self) -> _Channel:
        material = self._material
        return _Channel(self._open_one(grpc.ssl_channel_credentials(material.ca, material.key, material.chain)))


class _Channel:
    """A gRPC channel and its number of calls in progress."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.calls = 0


class _RotatingCall:
    """A method of a `RotatingChannel`, with the interface of gRPC's."""

    def __init__(self, channel: RotatingChannel, method_of: Callable[[grpc.Channel], Any]) -> None:
        self._channel = channel
        self._method_of = method_of
        self._made: tuple[_Channel, Any] | None = None  # replaced as one

    def __call__(self, request: Any, timeout: float) -> Any:
        channel = self._channel.begin()
        try:
            return self._method(channel)(request, timeout=timeout)
        finally:
            self._channel.end(channel)

    def future(self, request: Any, timeout: float) -> Any:
        return self._begun(lambda method: method.future(request, timeout=timeout))

    def stream(self, request: Any, timeout: float) -> Any:
        return self._begun(lambda method: method(request, timeout=timeout))

    def _begun(self, begin: Callable[[Any], Any]) -> Any:
        channel = self._channel.begin()
        try:
            call = begin(self._method(channel))
        except BaseException:
            self._channel.end(channel)
            raise
        call.add_done_callback(lambda _: self._channel.end(channel))
        return call

    def _method(self, channel: _Channel) -> Any:
        made = self._made
        if made is None or made[0] is not channel:
            self._made = made = (channel, self._method_of(channel.channel))
        return made[1]
