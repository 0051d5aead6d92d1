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

    gRPC fixes a channel's certificate when it is made. So calls that begin after a change go through a new channel;
    those under way end on the one before, which is closed at the change after that.

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
        self._present = self._opened()
        self._before: grpc.Channel | None = None
        self._closed = False

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> _RotatingCall:
        """Return what calls a method; it finds the present channel at each call."""
        return _RotatingCall(lambda channel: channel.unary_unary(method, *serializers, **more), self._now)

    def close(self) -> None:
        """Close the channels; calls under way are cancelled."""
        with self._lock:
            self._closed = True
            channels = [self._present, self._before]
        for channel in channels:
            if channel is not None:
                channel.close()

    def _now(self) -> grpc.Channel:
        material = self._credentials.current()
        with self._lock:
            if material is not self._material and not self._closed:
                oldest, self._before, self._material = self._before, self._present, material
                self._present = self._opened()
                if oldest is not None:
                    oldest.close()
            return self._present

    def _opened(self) -> grpc.Channel:
        material = self._material
        return self._open_one(grpc.ssl_channel_credentials(material.ca, material.key, material.chain))


class _RotatingCall:
    """A method of a `RotatingChannel`, called as gRPC's own."""

    def __init__(self, of_channel: Callable[[grpc.Channel], Any], now: Callable[[], grpc.Channel]) -> None:
        self._of_channel = of_channel
        self._now = now
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._call: Any = None

    def __call__(self, request: Any, timeout: float) -> Any:
        return self._present()(request, timeout=timeout)

    def future(self, request: Any, timeout: float) -> Any:
        return self._present().future(request, timeout=timeout)

    def _present(self) -> Any:
        channel = self._now()
        with self._lock:
            if channel is not self._channel:
                self._channel, self._call = channel, self._of_channel(channel)
            return self._call
