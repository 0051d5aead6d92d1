"""A push's payload is borrowed: used where it lies, never written, and after the call it may become anything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from parashard.plan.optimizers import Adam
from parashard.plan.partition import Plan
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import Buffers, DType, Push, PushResult
from parashard_server.core.shard import Shard
from support.in_process import plan_of, pull, push, push_for, shard_of, slices_of, state_of, variables_of


def plan_in(encoding: str) -> Plan:
    a = Variable("a", (3, 2), Initializer("normal", 1.0), encoding=encoding)
    return plan_of(variables_of(a, Variable("b", (4,), encoding=encoding)))


PLANS = {dtype: plan_in(dtype.name.lower()) for dtype in (DType.FLOAT32, DType.BFLOAT16)}
PLAN = PLANS[DType.FLOAT32]
GRADIENT = np.arange(1, 11, dtype=np.float32)

SHARDS: dict[str, Callable[[Plan], Shard]] = {
    "async": lambda plan: shard_of(plan, spec=Adam(weight_decay=0.1)),
    "rounds": lambda plan: shard_of(plan, spec=Adam(), round_steps=2),
}
KINDS = pytest.mark.parametrize("kind", SHARDS)


def borrowed(shard: Shard, step: int, dtype: DType = DType.FLOAT32, **more: object) -> tuple[Push, bytearray]:
    """Return a push, and the memory that its payload is a view of."""
    push = push_for(shard, step, GRADIENT * (step + 1), **more)
    content = bytearray(push.payload.whole())
    if dtype is DType.BFLOAT16:  # the upper halves; these values have nothing in the lower ones
        content = bytearray((np.frombuffer(content, "<u4") >> 16).astype("<u2").tobytes())
    slices = tuple(piece._replace(dtype=dtype) for piece in slices_of(shard))
    return push._replace(payload=Buffers([content]), slices=slices), content


@KINDS
@pytest.mark.parametrize("dtype", PLANS)
def test_what_becomes_of_the_payload_after_the_call_changes_nothing(kind: str, dtype: DType) -> None:
    shard, other = (SHARDS[kind](PLANS[dtype]) for _ in range(2))
    for step in (1, 0):  # in rounds the first waits for its turn
        for each in (shard, other):
            pull(each, round_=0 if kind == "rounds" else None, step=step)
            request, content = borrowed(each, step, dtype, pulled_version=0)
            each.push(request)
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
    request, content = borrowed(shard, 1, pulled_version=0)
    before = bytes(content)
    shard.push(request)
    if kind == "rounds":
        shard.updates.reach(1)
    assert content == before
    read_only, _ = borrowed(shard, 2)
    assert shard.push(read_only._replace(payload=Buffers([bytes(read_only.payload.whole())]))).result in (
        PushResult.APPLIED,
        PushResult.BUFFERED,
    )
