"""gRPC inside TLS: credentials of servers, the check of every call's role, and channels that outlive a certificate.

Owns what gRPC needs for both; its options are `parashard.rpc`'s, the only caller. The table of roles is
`parashard.security.roles`', the files are `parashard.security.credentials`'.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from parashard.security.credentials import Credentials, Material
from parashard.security.roles import check_call

URI_KEY = "peer_uri"  # of a verified certificate's alternative names only those that are URIs


class RoleInterceptor(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses every call that the caller's role may not make; the caller gets `NotAllowed`, through the error seam."""

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return None  # nobody serves streams of requests: gRPC says that there is no such method
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        method = handler_call_details.method

        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            uris: Any = context.auth_context().get(URI_KEY, ())  # a list of bytes, whatever the stubs say
            check_call(method, [uri.decode() for uri in uris])
            return behavior(request, context)

        return handler_like(handler, checked)


def handler_like(handler: Any, behavior: Callable[[Any, grpc.ServicerContext], Any]) -> Any:
    """Return a handler of one request that behaves in another way and keeps the serializers of the first."""
    kind = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return kind(
        behavior, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


def server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Return the credentials of a server that requires a certificate; a handshake uses the folder's present files."""
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
    """A channel that connects with the folder's present certificate, and ends no call when that changes.

    gRPC fixes a channel's certificate when it is made. So calls that begin after a change go through a new channel; the
    one before is closed once its last call has ended.

    Parameters
    ----------
    credentials : Credentials
        The folder.
    open_one : callable
        Makes a channel with gRPC's credentials.
    """

    def __init__(self, credentials: Credentials, open_one: Callable[[grpc.ChannelCredentials], grpc.Channel]) -> None:
        self._credentials = credentials
        self._open_one = open_one
        self._lock = threading.Lock()
        self._material = credentials.current()
        self._lives = [self._opened()]  # the present one is the last
        self._closed = False

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> _RotatingCall:
        """Return what calls a method; it finds the present channel at each call."""
        return _RotatingCall(self, lambda channel: channel.unary_unary(method, *serializers, **more))

    def close(self) -> None:
        """Close every channel; calls under way are cancelled."""
        with self._lock:
            self._closed = True
            lives = list(self._lives)
        for life in lives:
            life.channel.close()

    def begin(self) -> _Life:
        """Return the channel for a call that begins; `end` must follow."""
        material = self._credentials.current()
        with self._lock:
            if not self._closed:
                if material is not self._material:
                    self._material = material
                    self._lives.append(self._opened())
                self._close_unused()
            self._lives[-1].calls += 1
            return self._lives[-1]

    def end(self, life: _Life) -> None:
        """Say that a call has ended."""
        with self._lock:
            life.calls -= 1

    def _close_unused(self) -> None:
        for life in [life for life in self._lives[:-1] if not life.calls]:
            self._lives.remove(life)
            life.channel.close()

    def _opened(self) -> _Life:
        material = self._material
        return _Life(self._open_one(grpc.ssl_channel_credentials(material.ca, material.key, material.chain)))


class _Life:
    """One of gRPC's channels, and how many calls are under way in it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.calls = 0


class _RotatingCall:
    """A method of a `RotatingChannel`, called as gRPC's own."""

    def __init__(self, channel: RotatingChannel, method_of: Callable[[grpc.Channel], Any]) -> None:
        self._channel = channel
        self._method_of = method_of
        self._made: tuple[_Life, Any] | None = None  # replaced as one

    def __call__(self, request: Any, timeout: float) -> Any:
        life = self._channel.begin()
        try:
            return self._method(life)(request, timeout=timeout)
        finally:
            self._channel.end(life)

    def future(self, request: Any, timeout: float) -> Any:
        life = self._channel.begin()
        try:
            call = self._method(life).future(request, timeout=timeout)
        except BaseException:
            self._channel.end(life)
            raise
        call.add_done_callback(lambda _: self._channel.end(life))
        return call

    def _method(self, life: _Life) -> Any:
        made = self._made
        if made is None or made[0] is not life:
            self._made = made = (life, self._method_of(life.channel))
        return made[1]
