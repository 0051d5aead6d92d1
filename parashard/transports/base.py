"""The transport interface: send a shard its push, receive a shard's weights.

A transport knows addresses, deadlines and bytes; it knows no plan, no step and no retry. Every one passes the same
tests (`tests/parashard/transports/test_conformance.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from parashard.protocol.messages import Ack, Buffers, Fetched, FoundRows, PullRun, Push, Target

TransportKind = Literal["auto", "shm", "tcp", "grpc"]
"""Values of `cluster.transport`; with "auto" each worker uses the first of the others that works."""

ReadRows = Callable[[Mapping[str, FoundRows]], None]
"""Takes rows, by table, in the requested order."""

_Answer_co = TypeVar("_Answer_co", covariant=True)


def no_rows(rows: Mapping[str, FoundRows]) -> None:
    """Take the rows of a pull that asks for none."""


def allows(kind: TransportKind, way: Literal["shm", "tcp"]) -> bool:
    """Return whether a job's workers may use this transport. gRPC always serves: control and health need it too."""
    return kind in ("auto", way)


class ShardAddress(NamedTuple):
    """Addresses of one incarnation of a shard."""

    address: str  # host:port of its gRPC server
    incarnation: int
    data_address: str = ""  # host:port of its stream server; empty: none
    local_path: str = ""  # its Unix socket, for processes on the same host; empty: none


class View(NamedTuple):
    """Current addresses and incarnation of every shard, by index; `number` rises with every change."""

    number: int
    shards: tuple[ShardAddress, ...]


class Greeting(NamedTuple):
    """The worker that connects, and the incarnation of a shard that it means."""

    target: Target
    worker: str


class Pending(Protocol[_Answer_co]):
    """A request in progress, or one that the thread which waits for its answer will make."""

    def start(self) -> None:
        """Begin the request, if it has not begun, so that it proceeds while the caller works, or raise Unreachable."""

    def result(self) -> _Answer_co:
        """Wait for the answer, until the request's deadline.

        Raises the shard's error, with its address; `Unreachable` if it did not answer in time, or the request was
        cancelled. The outcome of the request is unknown then; a push may be sent again.
        """

    def cancel(self) -> None:
        """Stop waiting; `result` raises `Unreachable`, at once in a thread that called `start` and waits in it."""


class Deferred(Generic[_Answer_co]):
    """A request that the thread which waits for its answer makes, by `call`."""

    def __init__(self, call: Callable[[], _Answer_co]) -> None:
        self.result = call

    def start(self) -> None:
        """Do nothing: no other thread makes the request."""

    def cancel(self) -> None:
        """Do nothing: no request is in progress."""


class Transport(Protocol):
    """Connection to one incarnation of one shard. Calls may be made from several threads, and overlap."""

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Send a whole push; its payload is only read, and must not change before the answer arrives."""

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Fetch a run of the weights, and rows of tables; return the version, and how long the shard waited for it.

        Parameters
        ----------
        run : PullRun
            The request; of any length, and for at most `ROWS_BYTES_MAX` of rows, if all keys have one.
        into : Buffers
            `run.length_bytes` long; bytes that have not changed since `run.known_version` are left as they are. After
            an error its content is undefined.
        deadline_s : float
            Seconds from now.
        read : callable
            Takes the requested rows, which are valid only during the call.
        """

    def close(self) -> None:
        """Release everything; requests in progress end with `Unreachable`."""


Connect = Callable[[ShardAddress, Greeting], Transport]
"""Makes a transport to one incarnation of a shard; sends nothing before the first request."""
