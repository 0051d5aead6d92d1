"""How a connection over shared memory begins and ends: what a WELCOME must bring, and whose socket is trusted."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parashard._proto import stream_pb2
from parashard.errors import MalformedFrame, StaleIncarnation, Unreachable
from parashard.transports import memory
from parashard.transports.base import ShardAddress
from parashard.transports.shared_weights import SharedWeights, can_share
from parashard.transports.shm import ShmTransport
from parashard.transports.stream import Kind, Stream
from support.fake_plane import GREETING, TARGET
from support.shared_shard import DEADLINE_S, GRADIENT, push, push_of

pytestmark = pytest.mark.skipif(not can_share(), reason="this machine cannot share weights")


@pytest.fixture
def welcomed_with(root: Path) -> Iterator[Callable[..., ShmTransport]]:
    """Return a function that connects to a shard which sends this WELCOME and these descriptors."""
    listening = socket.socket(socket.AF_UNIX)
    path = str(root / "s.sock")
    listening.bind(path)
    listening.listen()
    ends: list[Callable[[], None]] = [listening.close]

    def connect(welcome: stream_pb2.Welcome, *descriptors: int) -> ShmTransport:
        def answer() -> None:
            stream = Stream(listening.accept()[0], "worker")
            ends.append(stream.close)
            stream.receive(deadline_s=float("inf"))
            stream.send(Kind.WELCOME, welcome, deadline_s=float("inf"), descriptors=descriptors)

        thread = threading.Thread(target=answer)
        thread.start()
        transport = ShmTransport(ShardAddress("", TARGET.incarnation, local_path=path), GREETING)
        ends[:0] = [transport.close, thread.join]
        return transport

    yield connect
    for end in ends:
        end()


class TestWelcomes:
    """Whatever a shard sends is checked before it is mapped."""

    WELCOME = stream_pb2.Welcome(slot_bytes=12, elements=3, partitions=1)

    def sealed(self, size_bytes: int, *, seal: bool = True) -> int:
        descriptor = memory.create("test", size_bytes)
        if seal:
            memory.seal(descriptor, writable=True)
        return descriptor

    @pytest.mark.parametrize(
        ("slot_bytes", "seal", "found"),
        [
            (8, True, "a slot: expected 12 bytes of memory, found 8"),
            (12, False, "a slot: its length is not sealed"),
        ],
    )
    def test_a_slot_has_its_declared_length_for_ever(self, welcomed_with, slot_bytes, seal, found) -> None:
        weights, slot = SharedWeights([0, 3]), self.sealed(slot_bytes, seal=seal)
        with pytest.raises(MalformedFrame, match=found):
            push(welcomed_with(self.WELCOME, weights.read_descriptor, slot), GRADIENT[:1])
        os.close(slot)

    def test_a_slot_holds_all_that_can_be_pulled(self, welcomed_with) -> None:
        welcome = stream_pb2.Welcome(slot_bytes=8, elements=3, partitions=1)
        weights, slot = SharedWeights([0, 3]), self.sealed(8)
        with pytest.raises(MalformedFrame, match="a slot of 8 bytes for a shard of 3 elements"):
            push(welcomed_with(welcome, weights.read_descriptor, slot), GRADIENT[:1])
        os.close(slot)

    def test_weights_have_the_declared_size(self, welcomed_with) -> None:
        weights, slot = SharedWeights([0, 2000]), self.sealed(12)
        with pytest.raises(MalformedFrame, match="a shard's weights: expected 4108 bytes of memory, found 12096"):
            push(welcomed_with(self.WELCOME, weights.read_descriptor, slot), GRADIENT[:1])
        os.close(slot)

    @pytest.mark.parametrize("count", [0, 1])
    def test_two_descriptors_are_due(self, welcomed_with, count: int) -> None:
        slot = self.sealed(12)
        with pytest.raises(MalformedFrame, match=f"two descriptors of memory, found {count}"):
            push(welcomed_with(self.WELCOME, *[slot] * count), GRADIENT[:1])
        os.close(slot)


def test_a_closed_connection_keeps_no_memory_of_its_shard(shard) -> None:  # however long its object lives on
    transport = shard.connect()
    opened = []
    real_open = transport._connections._open_one
    transport._connections._open_one = lambda deadline_s: opened.append(real_open(deadline_s)) or opened[-1]
    transport.greet(DEADLINE_S)
    [connection] = opened
    slot = weakref.ref(connection._mapped[0])
    assert slot() is not None
    transport.close()
    assert slot() is None
    with pytest.raises(Unreachable, match="the connection was closed"):
        connection.ask_push(push_of(GRADIENT), time.monotonic() + DEADLINE_S)


def test_another_users_socket_is_unreachable(shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parashard.transports.socket_io.is_own_user", lambda connection: False)
    transport = shard.connect()
    with pytest.raises(Unreachable, match="another user listens there"):
        push(transport, GRADIENT)
    transport.close()


def test_a_shard_that_is_not_there_is_unreachable(root: Path) -> None:
    transport = ShmTransport(ShardAddress("", TARGET.incarnation, local_path=str(root / "none.sock")), GREETING)
    with pytest.raises(Unreachable, match=r"none\.sock") as caught:
        transport.greet(DEADLINE_S)
    assert caught.value.peer == str(root / "none.sock")


def test_another_incarnation_of_the_shard_refuses_the_connection(shard, transport) -> None:  # P3
    def refuse(target: object) -> None:
        raise StaleIncarnation("this is incarnation 2")

    shard.plane.check = refuse
    with pytest.raises(StaleIncarnation, match="this is incarnation 2"):
        transport.greet(DEADLINE_S)


# --- deaths ---
