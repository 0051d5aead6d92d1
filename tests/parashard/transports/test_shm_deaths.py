"""Workers and shards killed in the middle of a push over shared memory: nothing of theirs stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parashard.errors import Unreachable
from parashard.protocol.messages import Push
from parashard.transports.base import ShardAddress
from parashard.transports.shared_weights import can_share
from parashard.transports.shm import ShmTransport
from parashard_server.serving.listeners import LocalSocket, sweep
from support.fake_plane import GREETING, TARGET
from support.shared_shard import DEADLINE_S, ELEMENTS, GRADIENT, mapped_bytes, pull, push_of

pytestmark = pytest.mark.skipif(not can_share(), reason="this machine cannot share weights")


WORKER = """
import sys
import numpy as np
from support.fake_plane import GREETING, TARGET
from support.shared_shard import DEADLINE_S, push_of
from parashard.transports.base import ShardAddress
from parashard.transports.shm import ShmTransport
transport = ShmTransport(ShardAddress("", TARGET.incarnation, local_path=sys.argv[1]), GREETING)
transport.push(push_of(np.ones(3000, np.float32)), DEADLINE_S)
sys.stdin.read()
"""
SHARD = """
import sys
from pathlib import Path
from parashard.protocol.messages import Push
from support.shared_shard import SharedShard
shard = SharedShard(Path(sys.argv[1]))
def hang(request):
    if isinstance(request, Push):
        print("received", flush=True)
        sys.stdin.read()
shard.plane.before = hang
print(shard.socket.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started(popen: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a process with a program."""

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        paths = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]
        return popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    return start


def test_a_worker_killed_in_a_push_leaves_nothing(shard, started) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def hold(request: Push) -> None:
        begun.set()
        let_go.wait(DEADLINE_S)

    shard.plane.before = hold
    before = mapped_bytes("parashard-slot")
    worker = started(WORKER, shard.socket.path)
    try:
        assert begun.wait(DEADLINE_S)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        assert shard.slots.held_bytes == 4 * ELEMENTS, "the shard still reads it"
    finally:
        let_go.set()
    assert shard.slots.ended.acquire(timeout=DEADLINE_S)
    assert shard.slots.held_bytes == 0
    shard.stop()  # waits for the connection's thread
    assert mapped_bytes("parashard-slot") == before
    assert shard.plane.version == 1, "the push had arrived whole"


def test_a_shard_killed_in_a_push_is_unreachable_at_once_and_its_socket_is_swept(root: Path, started) -> None:
    process = started(SHARD, str(root))
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    transport = ShmTransport(ShardAddress("", TARGET.incarnation, local_path=path), GREETING)
    try:
        into = np.empty(ELEMENTS, np.float32)
        pull(transport, into)
        pending = transport.push(push_of(GRADIENT), DEADLINE_S)
        assert process.stdout.readline() == "received\n"
        process.send_signal(signal.SIGKILL)
        with pytest.raises(Unreachable, match="connection"):
            pending.result()
        with pytest.raises(Unreachable):
            pull(transport, into)
    finally:
        transport.close()
    assert [p.name for p in root.rglob("*.sock")] == ["shard-0.7.sock"], "all that is left in the file system"
    process.wait()
    successor = LocalSocket("r", 0, TARGET.incarnation + 1, root=root)
    successor.listening.close()
    assert [p.name for p in root.rglob("*.sock")] == ["shard-0.8.sock"]
    successor.close()
    sweep(root)
    assert list(root.iterdir()) == []
