"""A connection is there by the deadline or not at all, however long a name server takes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from parashard.transports.tcp import dial
from support.waiting import DEADLINE_S

NAME = "shard-0.job"
REAL = socket.getaddrinfo


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def unused_address() -> Iterator[tuple[str, int]]:
    """Return an address without a listener: bound, so that no other process gets it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


class NameServer:
    """Stands for the system's lookup; answers when it is let go, with these addresses."""

    def __init__(self, *addresses: tuple[str, int]) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self._addresses = addresses

    def __call__(self, host: str, port: int, *, type: int, flags: int) -> Any:
        if flags & socket.AI_NUMERICHOST:
            return REAL(host, port, type=type, flags=flags)
        self.asked += 1
        assert self.answers.wait(DEADLINE_S)
        if not self._addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in self._addresses]


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NameServer]]:
    """Return a function that puts a name server in the place of the system's."""
    servers: list[NameServer] = []

    def serve(*addresses: tuple[str, int]) -> NameServer:
        servers.append(NameServer(*addresses))
        monkeypatch.setattr(socket, "getaddrinfo", servers[-1])
        return servers[-1]

    yield serve
    for server in servers:
        server.answers.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lookup-"):
            thread.join(DEADLINE_S)


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def test_a_numeric_address_is_not_looked_up(listening, name_server):
    server = name_server()
    dial("127.0.0.1", listening.getsockname()[1], soon()).close()
    assert server.asked == 0


def test_a_name_is_looked_up(listening, name_server):
    name_server(listening.getsockname()).answers.set()
    connection = dial(NAME, listening.getsockname()[1], soon())
    assert connection.getpeername() == listening.getsockname()
    connection.close()


def test_a_silent_name_server_delays_no_call_past_its_deadline_and_costs_one_thread(listening, name_server):
    server = name_server(listening.getsockname())
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"the name shard-0\.job was not found before the deadline"):
            dial(NAME, 7, time.monotonic() + 0.01)
    (lookup,) = [thread for thread in threading.enumerate() if thread.name.startswith("lookup-")]
    server.answers.set()
    lookup.join(DEADLINE_S)
    assert server.asked == 1
    dial(NAME, 7, soon()).close()


def test_a_name_that_is_none_is_looked_up_again_the_next_time(name_server):
    server = name_server()
    server.answers.set()
    for asked in (1, 2):
        with pytest.raises(OSError, match="not known"):
            dial(NAME, 7, soon())
        assert server.asked == asked


def test_what_the_system_takes_for_no_name_is_an_error_like_others():
    with pytest.raises(OSError, match="is no name"):
        dial("a" * 64 + ".job", 7, soon())


def test_the_next_address_of_a_name_is_tried(listening, unused_address, name_server):
    name_server(unused_address, listening.getsockname()).answers.set()
    dial(NAME, 7, soon()).close()


def test_the_last_address_says_why(unused_address, name_server):
    name_server(unused_address).answers.set()
    with pytest.raises(ConnectionRefusedError):
        dial(NAME, 7, soon())


def test_no_address_is_tried_past_the_deadline(listening):
    with pytest.raises(TimeoutError):
        dial("127.0.0.1", listening.getsockname()[1], time.monotonic())
