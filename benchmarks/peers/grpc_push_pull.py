"""Raw grpcio: a push and a pull are one unary message each, of raw bytes (identity serializers).

The server adds the message up in place with NumPy; the worker's pull ends in an array that views the reply.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np

from benchmarks.peers import seam

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]
NAME = "benchmarks.PushPull"


class Server:
    """The weights, and the three calls."""

    def __init__(self) -> None:
        self._weights = self._step = np.empty(0, np.float32)

    def open(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        """Reset the weights to zeros, of this size."""
        self._weights, self._step = np.zeros((2, int(request)), np.float32)
        return b""

    def push(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        """Apply a gradient."""
        np.multiply(np.frombuffer(request, np.float32), np.float32(seam.LEARNING_RATE), out=self._step)
        np.subtract(self._weights, self._step, out=self._weights)
        return b""

    def pull(self, _: bytes, __: grpc.ServicerContext) -> bytes:
        """Return the weights."""
        return self._weights.tobytes()


class GrpcPushPull(seam.PushPull):
    """The worker."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address, OPTIONS)
        self._open: Any = channel.unary_unary(f"/{NAME}/Open")
        self._push: Any = channel.unary_unary(f"/{NAME}/Push")
        self._pull: Any = channel.unary_unary(f"/{NAME}/Pull")

    def open(self, gradient: seam.Floats) -> None:
        """Put zeros on the server."""
        self._gradient = gradient
        self._open(str(gradient.size).encode())

    def push(self) -> None:
        """Send the gradient as one message, and wait for the answer."""
        self._push(self._gradient.tobytes())

    def pull(self) -> seam.Floats:
        """Ask for the weights as one message."""
        return np.frombuffer(self._pull(b""), np.float32)


def serve() -> None:
    """Run the server, and print its port."""
    weights = Server()
    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    calls = {"Open": weights.open, "Push": weights.push, "Pull": weights.pull}
    handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()


def main() -> None:
    """Start the server and answer rounds."""
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    process, address = seam.start_server("benchmarks.peers.grpc_push_pull", "--serve")
    seam.serve(seam.push_pull_answers(GrpcPushPull(address)), ["grpcio", "numpy"])
    process.kill()


if __name__ == "__main__":
    main()
