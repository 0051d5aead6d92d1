"""The transport interface: send a shard its push, receive a shard's weights.

A transport knows addresses, deadlines and bytes; it knows no plan, no step and no retry. Every one passes the same
tests (`tests/parashard/transports/test_conformance.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from parashard.protocol.messages import Ack, Buffers, Fetched, FoundRows, PullRun, Push, Target

TransportKind = Literal["auto", "shm", "tcp", "grpc"]
"""What `cluster.transport` may be; with "auto" each worker takes the first of the others that can be."""

ReadRows = Callable[[Mapping[str, FoundRows]], None]
"""Takes rows, by table, in the order in which they were asked for."""

_Answer_co = TypeVar("_Answer_co", covariant=True)


def no_rows(rows: Mapping[str, FoundRows]) -> None:
    """Take the rows of a pull that asks for none."""


def allows(kind: TransportKind, way: Literal["shm", "tcp"]) -> bool:
    """Return whether a job's workers may go this way. gRPC always serves: control and health need it too."""
    return kind in ("auto", way)


class ShardAddress(NamedTuple):
    """Where one incarnation of a shard is."""

    address: str  # host:port of its gRPC server
    incarnation: int
    data_address: str = ""  # host:port of its stream server; empty: none
    local_path: str = ""  # its Unix socket, for processes on the same host; empty: none


class View(NamedTuple):
    """Where every shard is now, by index, and which incarnation it is; `number` rises with every change."""

    number: int
    shards: tuple[ShardAddress, ...]


class Greeting(NamedTuple):
    """Who connects to which incarnation of a shard."""

    target: Target
    worker: str


class Pending(Protocol[_Answer_co]):
    """A request that is under way, or is made by the thread that waits for its answer."""

    def start(self) -> None:
        """Be under way from now on, while the caller does something else, or raise Unreachable."""

    def result(self) -> _Answer_co:
        """Wait for the answer, until the request's deadline.

        Raises what the shard answered, with its address; `Unreachable` where it did not answer in time, or the request
        was cancelled. What became of the request is unknown then; a push may be sent again.
        """

    def cancel(self) -> None:
        """Wait no more; `result` raises `Unreachable`, at once where another thread is in it and called `start`."""


class Deferred(Generic[_Answer_co]):
    """A request that the thread which waits for its answer makes by a call."""

    def __init__(self, call: Callable[[], _Answer_co]) -> None:
        self.result = call

    def start(self) -> None:
        """Nothing: no other thread makes it."""

    def cancel(self) -> None:
        """Nothing is under way."""


class Transport(Protocol):
    """A way to one incarnation of one shard. Calls may be made from several threads, and overlap."""

    def push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        """Send a push, whole; its payload is only read, and must not change before the answer is there."""

    def pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        """Fetch a run of the weights, and rows of tables; return the version, and how long the shard waited for it.

        Parameters
        ----------
        run : PullRun
            What is wanted; of any length, and at most `ROWS_BYTES_MAX` of rows, whichever of the keys have one.
        into : Buffers
            `run.length_bytes` long; bytes that have not moved since `run.known_version` are left as they are. After an
            error its content is undefined.
        deadline_s : float
            Seconds from now.
        read : callable
            Takes the rows that were asked for, which are valid while it does.
        """

    def close(self) -> None:
        """Release everything; requests under way end with `Unreachable`."""


Connect = Callable[[ShardAddress, Greeting], Transport]
"""Makes a transport to one incarnation of a shard; sends nothing before the first request."""
