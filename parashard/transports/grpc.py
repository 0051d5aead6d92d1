"""The gRPC transport: works everywhere. Frames travel as they are (identity serializers), never inside protobuf."""

from __future__ import annotations

from typing import Any

from parashard import rpc
from parashard.errors import Unreachable
from parashard.transports.base import Reply

SERVICE = "parashard.v1.ShardData"


class GrpcReply:
    """A unary call under way; None: the channel was closed before it could begin."""

    def __init__(self, call: Any | None, address: str) -> None:
        self._call = call
        self._address = address

    def result(self) -> bytes:
        """Wait for the frame, until the call's deadline."""
        if self._call is None:
            raise Unreachable("the connection is closed", peer=self._address)
        with rpc.our_errors(self._address):
            frame: bytes = self._call.result()
            return frame


class GrpcTransport:
    """A channel to one shard.

    Parameters
    ----------
    address : str
        host:port.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = rpc.connect(address)
        self._push: Any = self._channel.unary_unary(f"/{SERVICE}/Push")
        self._pull: Any = self._channel.unary_unary(f"/{SERVICE}/Pull")

    def push(self, frame: bytes, deadline_s: float) -> Reply:
        """Send a push frame."""
        return self._begin(self._push, frame, deadline_s)

    def pull(self, frame: bytes, deadline_s: float) -> Reply:
        """Send a pull frame."""
        return self._begin(self._pull, frame, deadline_s)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _begin(self, method: Any, frame: bytes, deadline_s: float) -> GrpcReply:
        try:
            return GrpcReply(method.future(frame, timeout=deadline_s), self._address)
        except ValueError:  # so gRPC says that another thread has closed the channel
            return GrpcReply(None, self._address)
