"""All or nothing (P14): whatever a shard refuses has changed neither weights nor slots, applied set nor version."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parashard.errors import (
    MalformedFrame,
    NonFiniteGradient,
    ParashardError,
    ShapeMismatch,
    StaleIncarnation,
    StalePlan,
    StaleRound,
    UnknownVariable,
    WrongRun,
)
from parashard.plan.optimizers import Adam
from parashard.plan.partition import Partition
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import Buffers, Push, Slice
from parashard_server.core.shard import Shard
from support.in_process import plan_of, push, push_for, shard_of, slices_of, state_of, variables_of

VARIABLES = variables_of(
    Variable("bias", (2,)),
    Variable("still", (3,), Initializer("constant", 1.0), frozen=True),
    Variable("weight", (4, 3), Initializer("normal", 1.0)),
)
PLAN = plan_of(VARIABLES)
BIAS, STILL, WEIGHT = Partition("bias", 0, 2), Partition("still", 0, 3), Partition("weight", 0, 4)
STEP = 5  # the step that is refused


def whole(shard: Shard, values: Any = 1.0, **changed: Any) -> Push:
    return push_for(shard, STEP, np.broadcast_to(np.asarray(values, np.float32), 14), **changed)


def aimed_elsewhere(**fields: Any) -> Callable[[Shard], Push]:
    return lambda shard: whole(shard, target=shard.identity._replace(**fields))


def with_slices(*slices: Slice) -> Callable[[Shard], Push]:
    size = sum(max(0, s.size_bytes) for s in slices) // 4
    return lambda shard: push_for(shard, STEP, np.ones(size), slices=slices)


def one_bad_value(value: float) -> Callable[[Shard], Push]:
    return lambda shard: whole(shard, [1.0] * 13 + [value])


REFUSALS: dict[str, tuple[Callable[[Shard], Push], type[ParashardError]]] = {
    "a learning rate that is none": (lambda shard: whole(shard, learning_rate=math.nan), MalformedFrame),
    "another run": (aimed_elsewhere(run_id="run-2"), WrongRun),
    "another job": (aimed_elsewhere(job_digest="e" * 64), WrongRun),
    "another shard": (aimed_elsewhere(shard=3), WrongRun),
    "another plan": (aimed_elsewhere(plan_version=4), StalePlan),
    "another incarnation": (aimed_elsewhere(incarnation=9), StaleIncarnation),
    "a step past the end": (lambda shard: whole(shard)._replace(step=shard.steps_total), MalformedFrame),
    "a negative step": (lambda shard: whole(shard)._replace(step=-1), MalformedFrame),
    "an unknown variable": (with_slices(Slice(Partition("other", 0, 2), 1)), UnknownVariable),
    "rows that are no partition": (with_slices(Slice(Partition("weight", 0, 3), 3)), UnknownVariable),
    "rows that run backwards": (with_slices(Slice(Partition("weight", 4, 0), 3)), UnknownVariable),
    "a slice that comes twice": (with_slices(Slice(BIAS, 1), Slice(BIAS, 1)), UnknownVariable),
    "a frozen variable": (with_slices(Slice(BIAS, 1), Slice(STILL, 1)), UnknownVariable),
    "rows of another length": (with_slices(Slice(WEIGHT, 4)), ShapeMismatch),
    "fewer bytes than its slices need": (lambda shard: whole(shard, payload=Buffers([bytes(52)])), ShapeMismatch),
    "more bytes than its slices need": (lambda shard: whole(shard, payload=Buffers([bytes(60)])), ShapeMismatch),
    "bytes without slices": (lambda shard: whole(shard, slices=()), ShapeMismatch),
    "slices without bytes": (lambda shard: push_for(shard, STEP, [], slices=slices_of(shard)), ShapeMismatch),
    "not a number": (one_bad_value(math.nan), NonFiniteGradient),
    "infinity": (one_bad_value(-math.inf), NonFiniteGradient),
    "a pull from the future": (lambda shard: whole(shard, pulled_version=4), MalformedFrame),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refused_push_changes_nothing(refusal: str) -> None:  # P14
    shard = shard_of(PLAN, spec=Adam())
    for step in range(3):
        push(shard, step, 0.5)
    before = state_of(shard)
    make, error = REFUSALS[refusal]
    with pytest.raises(error):
        shard.push(make(shard))
    assert state_of(shard) == before
    assert shard.record.refused_pushes == 1
    push(shard, STEP, 0.5)  # the step itself is as good as ever
    clean = shard_of(PLAN, spec=Adam())
    for step in (0, 1, 2, STEP):
        push(clean, step, 0.5)
    assert state_of(shard) == state_of(clean)


IN_ROUND_1: dict[str, tuple[int, float, dict[str, Any], type[ParashardError]]] = {
    # of three steps, in a shard that holds all of round 0 and step 4
    "a step of a round to come": (6, 1.0, {}, StaleRound),
    "a step of a round far away": (30, 1.0, {}, StaleRound),
    "a value that is not finite": (3, math.inf, {}, NonFiniteGradient),
    "a wrong shape": (3, 1.0, {"slices": (Slice(WEIGHT, 4),)}, ShapeMismatch),
    "a pull from the future": (3, 1.0, {"pulled_version": 2}, MalformedFrame),
}


@pytest.mark.parametrize("refusal", IN_ROUND_1)
def test_a_push_refused_in_a_round_changes_nothing(refusal: str) -> None:  # P11, P14
    shard = shard_of(PLAN, spec=Adam(), round_steps=3)
    for step in (0, 1, 2, 4):
        push(shard, step, 0.5)
    before = state_of(shard)
    step, value, changed, error = IN_ROUND_1[refusal]
    with pytest.raises(error):
        shard.push(push_for(shard, step, np.full(14, value), **changed))
    assert state_of(shard) == before


def test_a_push_refused_in_the_next_round_has_committed_what_was_due_and_no_more() -> None:  # P10, P14
    refused, asked = (shard_of(PLAN, spec=Adam(), round_steps=3) for _ in range(2))
    for shard in (refused, asked):
        for step in range(3):
            push(shard, step, 0.5)
    with pytest.raises(NonFiniteGradient):
        push(refused, 3, math.nan)
    asked.updates.reach(1)
    assert state_of(refused) == state_of(asked)
