"""A shard whose vector crosses 2^31 bytes: pushed and pulled over TCP, saved, restored, and its memory given back."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.proto_conversion import plan_message
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Variable
from parashard.protocol.messages import Buffers, PullRun, Push, PushResult, Slice
from parashard.store import open_store
from parashard.transports.base import Greeting, ShardAddress
from parashard.transports.tcp import TcpTransport
from parashard_server.push_memory import PushMemory
from parashard_server.serving.stream_services import TcpService
from support.in_process import plan_of, variables_of
from support.shard_process import COUNTING, ShardProcess, job_reply
from support.stream_cases import serving

MIB = 1 << 20
ROWS, COLUMNS = (1 << 31) // 4096 + 32 * 1024, 1024  # 2.125 GiB of float32
ELEMENTS = ROWS * COLUMNS
BOUNDARY = (1 << 31) // 4
CHUNK = 1 << 24
PERIOD = np.random.default_rng(1).permutation(65521).astype(np.float32) + 1.0  # a prime: 2^29 is no multiple of it
DEADLINE_S = 300.0
FREE_BYTES, DISK_BYTES = 12 << 30, 6 << 30
LEFT_BYTES = 256 * MIB  # kernels, threads, pools


def available_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pattern(first: int, stop: int) -> Float32s:
    """Return what a push adds to elements [first, stop): no neighbour, and no element 2^31 bytes away, has the same."""
    return np.resize(np.roll(PERIOD, -first), stop - first)


def assert_pattern(values: Float32s) -> None:
    """Compare every element."""
    for first in range(0, ELEMENTS, CHUNK):
        stop = min(ELEMENTS, first + CHUNK)
        assert np.array_equal(values[first:stop], pattern(first, stop)), f"elements from {first}"


def started(folder: Path) -> ShardProcess:
    plan = plan_of(variables_of(Variable("w", (ROWS, COLUMNS))))
    checkpoint = {"every_s": 0.0}
    return ShardProcess(
        open_store(str(folder)),
        reply=job_reply(optimizer=COUNTING, checkpoint=checkpoint, queue_bytes=1 << 33, plan=plan_message(plan)),
    )


def push_over_tcp(process: ShardProcess) -> None:
    """Push the pattern, and pull the whole vector and a run across the boundary."""
    identity = process.shard.identity
    gradient = np.concatenate([pattern(at, min(ELEMENTS, at + CHUNK)) for at in range(0, ELEMENTS, CHUNK)])
    slices = (Slice(Partition("w", 0, ROWS), COLUMNS),)
    buffers = PushMemory(1 << 33)
    with serving(TcpService(process.plane, buffers).serve) as (server, _):
        address = ShardAddress("", identity.incarnation, data_address=server.address)
        transport = TcpTransport(address, Greeting(identity, "worker-0"))
        push = Push(identity, "worker-0", 0, slices, False, None, Buffers([gradient]))
        assert transport.push(push, DEADLINE_S).result().result is PushResult.APPLIED
        gradient[:] = -1.0  # now the place that weights are pulled into
        whole = PullRun(identity, None, None, 0, 4 * ELEMENTS)
        assert transport.pull(whole, Buffers([gradient]), DEADLINE_S).result().version == 1
        assert_pattern(gradient)
        around = np.full(2048, -1.0, np.float32)
        run = PullRun(identity, None, None, 4 * (BOUNDARY - 1024), around.nbytes)
        transport.pull(run, Buffers([around]), DEADLINE_S).result()
        assert np.array_equal(around, pattern(BOUNDARY - 1024, BOUNDARY + 1024))
        transport.close()


@pytest.mark.full("lengths and offsets are 64 bits: test_wire.py, test_tcp_service.py; this takes 9 GiB and a minute")
@pytest.mark.timeout(600)
def test_a_vector_of_more_than_two_gib_is_pushed_pulled_saved_and_restored(tmp_path: Path) -> None:
    if not os.environ.get("PARASHARD_LARGE"):
        pytest.skip("NO TEST OF A VECTOR OVER 2 GIB: `make test-large` runs it")
    if available_bytes() < FREE_BYTES or shutil.disk_usage(tmp_path).free < DISK_BYTES:
        pytest.skip("NO TEST OF A VECTOR OVER 2 GIB: it takes 12 GiB of free memory and 6 GiB of disk")
    before = resident_bytes()
    process = started(tmp_path)
    assert process.shard.storage.weights.nbytes > 1 << 31
    push_over_tcp(process)
    stored = process.checkpointer.take()
    del process
    gc.collect()
    assert resident_bytes() < before + LEFT_BYTES, "the shard's memory is given back"
    again = started(tmp_path)
    assert again.host.restored == f"restored {CheckpointId.of(stored)} with 1 step"
    assert_pattern(again.shard.storage.weights)
    del again
    gc.collect()
    assert resident_bytes() < before + LEFT_BYTES
    shutil.rmtree(tmp_path)
