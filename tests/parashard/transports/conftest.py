"""What the conformance tests of all transports are given: a peer of each kind, and a transport to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from parashard.transports.base import ShardAddress, Transport
from parashard.transports.shared_weights import can_share
from parashard.transports.shm import ShmTransport
from support import transport_peers
from support.conformance_cases import ELEMENTS, OFFSETS, Talk
from support.fake_plane import GREETING, TARGET
from support.shared_shard import SharedShard
from support.transport_peers import PEERS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=sorted(PEERS))
def kind(request: pytest.FixtureRequest) -> str:
    """Return the name of the transport under test."""
    if request.param.startswith("shm") and not can_share():
        pytest.skip("this machine cannot share weights")
    return str(request.param)


@pytest.fixture
def start(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[int]], Talk]]:
    """Return what starts a peer with such partitions and a transport to it."""
    started: list[Talk] = []

    def start(offsets: list[int]) -> Talk:
        peer = PEERS[kind](offsets, tmp_path_factory.mktemp("s"))  # a socket's path has little room
        peer.plane.apply = lambda push: push.step  # weights stay as they are; each ack says whose it is
        started.append(Talk(peer, peer.connect(peer.where, GREETING)))
        return started[-1]

    yield start
    for talk in started:
        talk.hold.set()
        talk.transport.close()
        talk.peer.stop()


@pytest.fixture
def talk(start: Callable[[list[int]], Talk]) -> Talk:
    """Return a peer of ELEMENTS weights, which are their own indices, and a transport to it."""
    talk = start(OFFSETS)
    talk.plane.memory.weights[:] = np.arange(ELEMENTS)
    return talk


@pytest.fixture
def dying(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Transport, subprocess.Popen[str]]]:
    """Return a transport to a peer in a process of its own, which never answers, and that process."""
    folder = tmp_path_factory.mktemp("s")
    process = subprocess.Popen(
        [sys.executable, transport_peers.__file__, kind, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    try:
        assert process.stdout is not None
        address, data_address, local_path = json.loads(process.stdout.readline())
        where = ShardAddress(address, TARGET.incarnation, data_address, local_path)
        transport = PEERS[kind].connecting(folder)(where, GREETING)
        yield transport, process
        transport.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a short name: a socket's path has little room."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def shard(root: Path) -> Iterator[SharedShard]:
    """Return a shard that serves over shared memory."""
    shard = SharedShard(root)
    yield shard
    shard.stop()


@pytest.fixture
def transport(shard: SharedShard) -> Iterator[ShmTransport]:
    """Return a transport to it."""
    transport = shard.connect()
    yield transport
    transport.close()
