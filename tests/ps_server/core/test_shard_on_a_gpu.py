"""A whole shard on a GPU of NumPy: the bits of one on the host, and how often it waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.checkpoints.state import ShardState
from parashard.errors import ConfigurationError, NonFiniteGradient, QueueFull, StaleRound
from parashard.plan.variables import Float32s
from parashard.protocol.messages import Buffers, PullRun, PushResult, Weights
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import NOTHING, Shard
from parashard_server.core.update_policies import BatchUpdates
from parashard_server.state.cuda_storage import CudaStorage
from parashard_server.state.storage import Storage
from support.hosted_cuda import received
from support.in_process import push, push_for
from support.late_device import LateDevice
from support.shard_process import ADAM, job_reply


def built(device: LateDevice, state: ShardState | None = None, **of_job: Any) -> Shard:
    reply = job_reply(**{"steps_total": 12, **of_job})
    return ShardBuilder(reply, 0, device="cuda:0", open_device=lambda asked, shard: device).build(4, state)


def pulled(shard: Shard, known: int | None = None, round_: int | None = None) -> tuple[int, list[bytes]]:
    length = shard.storage.weights.nbytes
    weights: Weights = shard.pull(PullRun(shard.identity, round_, None, 0, length, known_version=known))
    return weights.version, [bytes(run.values) for run in weights.runs]


def gradient(storage: Storage, step: int) -> Float32s:
    return np.random.default_rng(step).normal(size=storage.elements).astype(np.float32)


def read(storage: Storage) -> list[bytes]:
    return [bytes(run.values) for run in storage.changed_runs(0, storage.weights.nbytes, None)]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_flag_or_the_job_puts_a_shard_on_a_gpu(device: str) -> None:
    opened: list[tuple[str, int]] = []

    def open_device(asked: str, shard: int) -> LateDevice:
        opened.append((asked, shard))
        return LateDevice()

    assert isinstance(
        ShardBuilder(job_reply(), 1, device=device, open_device=open_device).build(1, None).storage, CudaStorage
    )
    assert opened == [(device, 1)]


def test_without_either_it_is_on_the_host() -> None:
    assert type(ShardBuilder(job_reply(), 0).build(1, None).storage) is Storage


def test_pushes_and_pulls_of_a_shard_on_a_gpu() -> None:
    host = ShardBuilder(job_reply(optimizer=ADAM, steps_total=12), 0).build(4, None)
    gpu = built(LateDevice(), optimizer=ADAM)
    known = None
    for step in (3, 0, 7):
        for shard in (host, gpu):
            assert push(shard, step, float(step + 1)).result is PushResult.APPLIED
        assert pulled(gpu, known) == pulled(host, known)
        known = gpu.updates.version
        assert pulled(gpu, known) == (known, [])
    assert push(gpu, 3, 1.0).result is PushResult.DUPLICATE  # P1
    with pytest.raises(NonFiniteGradient):
        push(gpu, 4, np.nan)
    assert pulled(gpu) == pulled(host)


def test_a_push_is_checked_on_the_gpu_and_waited_for_twice() -> None:  # P6
    device = LateDevice()
    shard = built(device, optimizer=ADAM)
    elements = shard.storage.elements
    slot = np.zeros(4 * elements, np.uint8)
    shard.storage.lock_pages(slot)
    for step in range(3):
        slot.view(np.float32)[:] = step + 1
        device.counted.clear()
        ack = shard.push(push_for(shard, step, [], payload=Buffers([slot.data])))
        assert ack.result is PushResult.APPLIED
        del device.counted["vectors"]
        assert device.counted == {"in": 1, "in bytes": slot.nbytes, "launches": 2, "waits": 2}
    assert device.staged == []
    before = pulled(shard)
    slot.view(np.float32)[-1] = np.inf
    device.counted.clear()
    with pytest.raises(NonFiniteGradient, match="step 4"):
        shard.push(push_for(shard, 4, [], payload=Buffers([slot.data])))
    assert (device.counted["launches"], device.counted["waits"]) == (1, 1)
    assert pulled(shard) == before


def test_parts_of_batches_of_a_shard_on_a_gpu_are_clipped_as_on_the_host() -> None:
    of_job = {"optimizer": ADAM, "consistency": "auto"}
    host = ShardBuilder(job_reply(**of_job, steps_total=12), 0).build(4, None)
    gpu = built(LateDevice(), **of_job)
    gradients = [np.random.default_rng(step).normal(size=host.storage.elements).astype(np.float32) for step in (0, 1)]
    for shard in (host, gpu):
        updates = BatchUpdates(shard.storage, parts=2, clip_norm=0.5)
        for step in (1, 0):
            there = received(shard.storage, gradients[step])
            assert shard.storage.is_finite(there)
            updates.take(step, there)
    assert read(gpu.storage) == read(host.storage)


def test_a_part_before_its_turn_comes_again_where_the_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    host, gpu = ShardBuilder(job_reply(), 0).build(4, None).storage, built(device).storage
    updates = {storage: BatchUpdates(storage, parts=3) for storage in (host, gpu)}

    def take(storage: Storage, step: int) -> None:
        there = received(storage, gradient(storage, step))
        assert storage.is_finite(there)
        updates[storage].take(step, there)

    def full(elements: int, value: float) -> Any:
        raise ConfigurationError("cuda:0 has no room")

    for step in (0, 2, 1):
        take(host, step)
    take(gpu, 0)
    with monkeypatch.context() as patched:
        patched.setattr(device, "full", full)
        with pytest.raises(QueueFull, match="a gradient that comes before its turn waits for room: cuda:0 has no room"):
            take(gpu, 2)
        assert not updates[gpu].holds(2)
        take(gpu, 1)
    take(gpu, 2)
    assert read(gpu) == read(host)


def test_a_part_that_moves_nothing_may_come_before_its_turn() -> None:
    host, gpu = ShardBuilder(job_reply(), 0).build(4, None).storage, built(LateDevice()).storage
    for storage in (host, gpu):
        updates = BatchUpdates(storage, parts=3)
        for step in (1, 2, 0, 4, 3, 5):
            updates.take(step, NOTHING if step != 3 else received(storage, gradient(storage, step)))
        assert updates.version == 2
    assert read(gpu) == read(host)


def test_rounds_of_a_shard_on_a_gpu() -> None:  # P10, P11
    host = ShardBuilder(job_reply(optimizer=ADAM, consistency="sync:3", steps_total=12), 0).build(4, None)
    gpu = built(LateDevice(), optimizer=ADAM, consistency="sync:3")
    for round_ in range(3):
        for step in (3 * round_ + 2, 3 * round_, 3 * round_ + 1):
            for shard in (host, gpu):
                assert push(shard, step, float(step + 1)).result is PushResult.BUFFERED
        before = pulled(gpu, round_=round_)
        assert before == pulled(host, round_=round_)  # the round is full, and not committed
        assert pulled(gpu, round_=round_ + 1) == pulled(host, round_=round_ + 1)
        with pytest.raises(StaleRound):
            pulled(gpu, round_=round_)
