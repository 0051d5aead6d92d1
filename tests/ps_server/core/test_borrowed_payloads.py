"""A push's payload is borrowed: used where it lies, never written, and after the call it may become anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from parashard.plan.optimizers import Adam
from parashard.plan.partition import Plan
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import DType, PushChunk, PushResult
from parashard_server.core.shard import Shard
from support.in_process import chunks_of, plan_of, pull, push, shard_of, slices_of, state_of, variables_of


def plan_in(encoding: str) -> Plan:
    a = Variable("a", (3, 2), Initializer("normal", 1.0), encoding=encoding)
    return plan_of(variables_of(a, Variable("b", (4,), encoding=encoding)))


PLANS = {dtype: plan_in(dtype.name.lower()) for dtype in (DType.FLOAT32, DType.BFLOAT16)}
PLAN = PLANS[DType.FLOAT32]
GRADIENT = np.arange(1, 11, dtype=np.float32)

SHARDS: dict[str, Callable[[Plan], Shard]] = {
    "async": lambda plan: shard_of(plan, spec=Adam(weight_decay=0.1)),
    "compensated": lambda plan: shard_of(plan, spec=Adam(), compensation=0.5),
    "rounds": lambda plan: shard_of(plan, spec=Adam(), round_steps=2),
}
KINDS = pytest.mark.parametrize("kind", SHARDS)


def borrowed(shard: Shard, step: int, dtype: DType = DType.FLOAT32, **more: object) -> tuple[PushChunk, bytearray]:
    """Return a whole push in one chunk, and the memory that its payload is a view of."""
    (chunk,) = chunks_of(shard, step, GRADIENT * (step + 1), **more)
    content = bytearray(chunk.payload)
    if dtype is DType.BFLOAT16:  # the upper halves; these values have nothing in the lower ones
        content = bytearray((np.frombuffer(content, "<u4") >> 16).astype("<u2").tobytes())
    slices = tuple(replace(piece, dtype=dtype) for piece in slices_of(shard))
    payload = memoryview(content)
    return replace(chunk, payload=payload, total_bytes=len(content), slices=slices), content


@KINDS
@pytest.mark.parametrize("dtype", PLANS)
def test_what_becomes_of_the_payload_after_the_call_changes_nothing(kind: str, dtype: DType) -> None:
    shard, other = (SHARDS[kind](PLANS[dtype]) for _ in range(2))
    for step in (1, 0):  # in rounds the first waits for its turn
        for each in (shard, other):
            pull(each, round_=0 if kind == "rounds" else None, step=step)
            chunk, content = borrowed(each, step, dtype, pulled_version=0)
            each.push(chunk, 0.0)
            if each is shard:
                content[:] = b"\xff" * len(content)
        assert state_of(shard) == state_of(other)
    if kind == "rounds":
        for each in (shard, other):
            each.updates.reach(1)
    assert state_of(shard) == state_of(other)
    assert np.isfinite(shard.storage.weights).all()


@KINDS
def test_the_payload_is_not_written(kind: str) -> None:
    shard = SHARDS[kind](PLAN)
    pull(shard, round_=0 if kind == "rounds" else None, step=1)
    push(shard, 0, 1.0)
    chunk, content = borrowed(shard, 1, pulled_version=0)
    before = bytes(content)
    shard.push(chunk, 0.0)
    if kind == "rounds":
        shard.updates.reach(1)
    assert content == before
    read_only, _ = borrowed(shard, 2)
    assert shard.push(replace(read_only, payload=bytes(read_only.payload)), 0.0).result in (
        PushResult.APPLIED,
        PushResult.BUFFERED,
    )


def test_a_push_that_is_whole_in_one_chunk_takes_no_memory_of_the_queue() -> None:
    shard = shard_of(PLAN, budget_bytes=1)
    first = chunks_of(shard, 5, GRADIENT, cuts=(8,))[0]
    shard.push(first, 0.0)  # the whole budget, and more: it is alone
    push(shard, 0, 1.0)
    assert (len(shard.assemblies), shard.assemblies.memory.held_bytes_max) == (1, GRADIENT.nbytes)


def test_a_push_that_comes_whole_ends_its_step_s_other_attempts() -> None:  # P4
    shard = shard_of(PLAN)
    slow = chunks_of(shard, 0, np.full(10, 100.0), attempt=1, cuts=(8,))
    shard.push(slow[0], 0.0)
    assert push(shard, 0, GRADIENT, attempt=2).result is PushResult.APPLIED
    assert len(shard.assemblies) == 0
    assert shard.push(slow[1], 0.0).result is PushResult.DUPLICATE
    assert shard.updates.version == 1
