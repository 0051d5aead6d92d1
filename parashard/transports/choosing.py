"""Choice of the transport to a shard: the job's own, or the fastest that works.

Owns the order of preference, and decides once for each incarnation of a shard, at the first request. Knows nothing of
how transports work. `parashard.client.shard_client` makes its transports with `connect_by`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from parashard.errors import ConfigurationError, Fenced, NotAllowed, NotReady, ParashardError, StaleRequest, Unreachable
from parashard.process.logs import log
from parashard.protocol import rpc
from parashard.protocol.messages import Ack, Buffers, Fetched, PullRun, Push
from parashard.security.credentials import Credentials
from parashard.transports.base import (
    Connect,
    Deferred,
    Greeting,
    Pending,
    ReadRows,
    ShardAddress,
    Transport,
    TransportKind,
    no_rows,
)
from parashard.transports.grpc import GrpcTransport
from parashard.transports.shared_weights import can_share
from parashard.transports.shm import ShmTransport
from parashard.transports.tcp import TcpTransport

GREET_S = 2.0  # for the HELLO of one kind, before the next is tried

_Answer = TypeVar("_Answer")


class ProbedTransport(Transport, Protocol):
    """A transport that can find out whether it works."""

    def greet(self, deadline_s: float) -> None:
        """Ensure that there is a connection, or raise the reason why not."""


class Candidate(NamedTuple):
    """A kind of transport that may be chosen."""

    kind: str
    reason: Callable[[ShardAddress], str | None]  # why it cannot work there, without trying it; None: it may
    connect: Callable[[ShardAddress, Greeting], ProbedTransport]


def _reason_against_shm(where: ShardAddress) -> str | None:
    if not can_share():
        return "this machine cannot share weights"
    return None if where.local_path else "the shard offers no shared memory"


def _reason_against_tcp(where: ShardAddress) -> str | None:
    return None if where.data_address else "the shard has no stream server"


SHM = Candidate("shm", _reason_against_shm, ShmTransport)
TCP = Candidate("tcp", _reason_against_tcp, TcpTransport)
GRPC = Candidate("grpc", lambda where: None, GrpcTransport)  # sends no HELLO: as the last one it is always chosen
CANDIDATES: dict[TransportKind, Sequence[Candidate]] = {
    "auto": (SHM, TCP, GRPC),
    "shm": (SHM,),
    "tcp": (TCP,),
    "grpc": (GRPC,),
}


class ChosenTransport:
    """The first of several kinds of transport that works; if none does, requests fail, and each one tries again."""

    def __init__(self, where: ShardAddress, greeting: Greeting, candidates: Sequence[Candidate]) -> None:
        self._where = where
        self._greeting = greeting
        self._candidates = candidates
        self._choosing = threading.Lock()  # held while one thread tries the candidates, perhaps for long
        self._lock = threading.Lock()  # held for the two below
        self._tried: Transport | None = None
        self._closed = False
        self._chosen: Transport | None = None
        # Requests choose a transport first; once it is chosen, these are its own methods.
        self.push: Callable[[Push, float], Pending[Ack]] = self._first_push
        self.pull: Any = self._first_pull  # as `Transport.pull`

    def close(self) -> None:
        """Close the transport that was chosen or is being tried."""
        with self._lock:
            self._closed = True
            transport = self._tried
        if transport is not None:
            transport.close()

    def _first_push(self, push: Push, deadline_s: float) -> Pending[Ack]:
        return self._begin(lambda transport, left_s: transport.push(push, left_s), deadline_s)

    def _first_pull(self, run: PullRun, into: Buffers, deadline_s: float, read: ReadRows = no_rows) -> Pending[Fetched]:
        return self._begin(lambda transport, left_s: transport.pull(run, into, left_s, read), deadline_s)

    def _begin(self, begin: Callable[[Transport, float], Pending[_Answer]], deadline_s: float) -> Pending[_Answer]:
        until_s = time.monotonic() + deadline_s
        try:
            transport = self._choice(until_s)
        except ParashardError as error:
            return Deferred(partial(_fail, error.with_traceback(None)))  # a traceback would keep this frame's objects
        return begin(transport, until_s - time.monotonic())

    def _choice(self, until_s: float) -> Transport:
        if not self._choosing.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise Unreachable("no way to the shard was found before the deadline", peer=self._where.address)
        try:
            if self._chosen is None:
                self._chosen = self._first_that_works(until_s)
            return self._chosen
        finally:
            self._choosing.release()

    def _first_that_works(self, until_s: float) -> Transport:
        reasons: dict[str, str] = {}
        tried = 0
        for candidate in self._candidates:
            reason = candidate.reason(self._where)
            if reason is None:
                tried += 1
                reason = self._tried_out(candidate, until_s)
            if reason is None:
                return self._settled(candidate.kind, reasons)
            reasons[candidate.kind] = reason
        told = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
        if not tried:  # it will never work
            raise ConfigurationError(f"cluster.transport allows no way to the shard: {told}", peer=self._where.address)
        raise Unreachable(f"no way to the shard works: {told}", peer=self._where.address)

    def _tried_out(self, candidate: Candidate, until_s: float) -> str | None:
        """Send HELLO by a candidate; return the reason against it, or None. Raise a reason against all of them."""
        transport = candidate.connect(self._where, self._greeting)
        self._try(transport)
        try:
            transport.greet(min(GREET_S, until_s - time.monotonic()))
            return None
        except (StaleRequest, Fenced, NotReady, NotAllowed):
            transport.close()
            raise  # the shard has answered, and would answer the same any other way
        except ParashardError as error:
            transport.close()
            return str(error)

    def _try(self, transport: Transport) -> None:
        with self._lock:
            if not self._closed:
                self._tried = transport
                return
        transport.close()
        raise Unreachable("the transport is closed", peer=self._where.address)

    def _settled(self, kind: str, reasons: dict[str, str]) -> Transport:
        log.info("transport", shard=self._greeting.target.shard, kind=kind, passed_over=reasons)
        assert self._tried is not None
        self.push, self.pull = self._tried.push, self._tried.pull
        return self._tried


def _fail(error: ParashardError) -> NoReturn:
    raise error


def connect_by(kind: TransportKind, credentials: Credentials | None = None) -> Connect:
    """Return a factory of transports of a kind, with credentials inside TLS; "auto": shared memory, TCP, else gRPC."""
    candidates = (
        [_secured(candidate, credentials) for candidate in CANDIDATES[kind]] if credentials else CANDIDATES[kind]
    )
    return lambda where, greeting: ChosenTransport(where, greeting, candidates)


def _secured(candidate: Candidate, credentials: Credentials) -> Candidate:
    if candidate is TCP:
        return candidate._replace(connect=partial(TcpTransport, tls=credentials.client_context))
    if candidate is GRPC:
        return candidate._replace(connect=partial(GrpcTransport, connect=partial(rpc.connect, credentials=credentials)))
    return candidate  # a Unix socket, whose other end is this user or root
