"""The lower bound of a push and pull across the network stack: a TCP socket and a kernel.

Without checks, counters and retries: a server process reads a gradient, applies it with the
product's SGD kernel, answers one byte, and sends the weights when it gets another one.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np

from benchmarks.peers import seam
from benchmarks.races.in_place import InPlace
from parashard.process.resources import EVERY_STEP, keep_freed_memory

PUSH, PULL, DONE = b"p", b"w", b"d"


class BareSocket(seam.PushPull):
    """The worker; every size has a server of its own."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def open(self, gradient: seam.Floats) -> None:
        """Start a server with weights of zeros, and end the one before."""
        self.close()
        self._server, address = seam.start_server("benchmarks.races.bare_socket", str(gradient.size))
        host, port = address.split(":")
        self._connection = without_delay(socket.create_connection((host, int(port))))
        self._gradient = gradient
        self._weights = np.zeros_like(gradient)

    def push(self) -> None:
        """Send the gradient, and wait for the byte that says it is applied."""
        gradient = as_bytes(self._gradient)
        sent = self._connection.sendmsg([PUSH, gradient])
        self._connection.sendall(gradient[sent - len(PUSH) :])
        assert self._connection.recv(1) == DONE, "the server has ended"

    def pull(self) -> seam.Floats:
        """Ask for the weights by one byte, and read them."""
        self._connection.sendall(PULL)
        read(self._connection, self._weights)
        return self._weights

    def close(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._connection.close()
            self._server.kill()
            self._server.wait()


def as_bytes(values: seam.Floats) -> memoryview:
    """Return the memory of an array."""
    return memoryview(values).cast("B")


def read(connection: socket.socket, values: seam.Floats) -> None:
    """Fill an array from a connection."""
    received = connection.recv_into(as_bytes(values), 0, socket.MSG_WAITALL)
    assert received == values.nbytes, f"{received:,} of {values.nbytes:,} bytes came"


def without_delay(connection: socket.socket) -> socket.socket:
    """Return a connection that sends each byte at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def serve(elements: int) -> None:
    """Serve one worker until it leaves, and print the port."""
    gradient = np.empty(elements, np.float32)
    state = InPlace()
    state.open(gradient)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"127.0.0.1:{listening.getsockname()[1]}", flush=True)
        connection = without_delay(listening.accept()[0])
    with connection:
        while request := connection.recv(1):
            if request == PUSH:
                read(connection, gradient)
                state.push()
                connection.sendall(DONE)
            else:
                connection.sendall(as_bytes(state.weights))


def main() -> None:
    """Answer rounds, or run the server."""
    keep_freed_memory(EVERY_STEP)  # as ours does
    if elements := sys.argv[1:]:
        serve(int(elements[0]))
        return
    contestant = BareSocket()
    try:
        seam.serve(seam.push_pull_answers(contestant), ["numpy", "numba"])
    finally:
        contestant.close()


if __name__ == "__main__":
    main()
