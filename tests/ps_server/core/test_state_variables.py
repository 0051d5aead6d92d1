"""State without gradients on a shard: outside of the optimizer, and moved by each push but an empty one, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.errors import ShapeMismatch
from parashard.plan.optimizers import Adam, AdamW
from parashard.plan.state import counter_values
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import Buffers, PushResult
from parashard_server.core.shard import Shard
from support.in_process import plan_of, pull, push, push_for, shard_of, slices_of, state_of, variables_of

VARIABLES = variables_of(
    Variable("count", (1, 8), state="counter"),
    Variable("mean", (2,), Initializer("constant", 1.0), state="average:0.5"),
    Variable("weight", (3,), Initializer("constant", 1.0)),
)
PLAN = plan_of(VARIABLES)
COUNT, MEAN, WEIGHT = slice(0, 8), slice(8, 10), slice(10, 13)


def content(count: int = 1, mean: float = 3.0, weight: float = 1.0) -> Any:
    return np.array([count, *[0] * 7, *[mean] * 2, *[weight] * 3], np.float32)


def read(shard: Shard, round_: int | None = None) -> tuple[int, list[float], list[float]]:
    values = pull(shard, round_=round_)[1]
    return int(counter_values(values[COUNT])), values[MEAN].tolist(), values[WEIGHT].tolist()


def empty(shard: Shard, step: int) -> PushResult:
    return shard.push(push_for(shard, step, (), slices=(), skipped=True)).result


def test_the_optimizer_has_no_part_in_it() -> None:
    spec = AdamW(learning_rate=0.1, weight_decay=0.5, clip_value=0.01)
    shard = shard_of(PLAN, spec=spec)
    push(shard, 0, content(), pulled_version=0)
    push(shard, 1, content(), pulled_version=0)
    count, mean, weight = read(shard)
    assert (count, mean) == (2, [2.5, 2.5])
    assert 0 < weight[0] < 1


def test_an_empty_push_leaves_it_alone_and_counts_for_the_optimizer() -> None:  # P15
    shard = shard_of(PLAN, spec=Adam(learning_rate=0.1))
    push(shard, 0, content())
    before = read(shard)
    version = shard.storage.memory.done.tolist()
    empty(shard, 1)
    after = read(shard)
    assert (after[:2], after[2] != before[2]) == (before[:2], True)
    assert [new - old for new, old in zip(shard.storage.memory.done.tolist(), version, strict=True)] == [0, 0, 1]


def test_a_push_without_it_is_refused_and_changes_nothing() -> None:  # P14
    shard = shard_of(PLAN)
    slices = tuple(piece for piece in slices_of(shard) if piece.partition.variable != "mean")
    before = state_of(shard)
    with pytest.raises(ShapeMismatch, match=r"variable 'mean' is average:0\.5: every push but an empty one has it"):
        shard.push(push_for(shard, 0, (), slices=slices, payload=Buffers([np.ones(11, "<f4").tobytes()])))
    assert state_of(shard) == before


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_round_takes_the_mean_of_its_averages_and_the_sum_of_its_counts(mean: bool, order: tuple[int, ...]) -> None:
    shard = shard_of(PLAN, round_steps=3, mean=mean)
    for step in order:
        push(shard, step, content(count=10 + step, mean=3.0 * step))
    assert read(shard, 1)[:2] == (33, [2.0, 2.0]), "the average of 0, 3 and 6 is 3"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_an_empty_push_of_a_round_is_no_part_of_its_average(order: tuple[int, ...]) -> None:  # P15, P24
    shard = shard_of(PLAN, round_steps=3)
    for step in order:
        assert (empty(shard, 1) if step == 1 else push(shard, step, content(mean=7.0)).result) is PushResult.BUFFERED
    assert read(shard, 1)[:2] == (2, [4.0, 4.0])
    for step in (3, 4, 5):
        empty(shard, step)
    assert read(shard, 2)[:2] == (2, [4.0, 4.0])


def test_a_round_that_begins_again_forgets_what_it_had_counted() -> None:  # P24
    shard = shard_of(PLAN, round_steps=3)
    for step in (0, 1):
        push(shard, step, content(mean=9.0))
    shard.begin_round_again(2)
    for step in range(3):
        push(shard, step, content(mean=7.0))
    assert read(shard, 1)[:2] == (3, [4.0, 4.0])


def test_a_snapshot_keeps_it_as_it_was() -> None:
    shard = shard_of(PLAN)
    cut = shard.cut()
    push(shard, 0, content())
    while cut.snapshot.save_next():
        pass
    assert (cut.snapshot.weights[COUNT].sum(), cut.snapshot.weights[MEAN].tolist()) == (0, [1.0, 1.0])
