"""Placement changes nothing (P15): the same pushes to any number of shards, cut in any way, give the same bits."""

import functools
import hashlib

import numpy as np
import pytest

from parashard.plan.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, OptimizerSpec, RMSProp
from parashard.plan.partition import Partitioner, fixed_shards, maximum_size, minimum_size, whole
from parashard.plan.schedules import StepSchedule
from parashard.plan.variables import Initializer, Variable
from support.in_process import Cluster, plan_of, variables_of

VARIABLES = variables_of(
    Variable("bias", (3,), decay=False, learning_rate_factor=2.0),
    Variable("embedding", (11, 2), Initializer("uniform", 1.0)),
    Variable("still", (5, 2), Initializer("normal", 1.0), frozen=True),
    Variable("weight", (7, 3), Initializer("normal", 1.0)),
)
COMMON = {
    "learning_rate": 0.1,
    "weight_decay": 0.1,
    "clip_value": 2.0,
    "schedule": StepSchedule(every_steps=2, factor=0.5),
}
SPECS: dict[str, OptimizerSpec] = {
    kind.model_fields["kind"].default: kind(**COMMON)
    for kind in (SGD, Momentum, Nesterov, Adagrad, RMSProp, Adam, AdamW, FTRL, LAMB)
}
PARTITIONERS: dict[str, Partitioner] = {
    "whole": whole,
    "fixed-shards": fixed_shards(3),
    "maximum-size": maximum_size(16),
    "minimum-size": minimum_size(24, 2),
}
STEPS, ROUND_STEPS = 9, 4


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """Return a step's gradients; every third step leaves a variable out, step 5 all of them."""
    rng = np.random.default_rng(step)
    gradients = {
        name: (rng.standard_normal(v.shape) * 10.0 ** rng.integers(-3, 2)).astype(np.float32)
        for name, v in VARIABLES.items()
        if not v.frozen
    }
    if step % 3 == 0:
        del gradients["weight"]
    return {} if step == 5 else gradients


def trained(kind: str, shards: int, partitioner: str, round_steps: int | None) -> str:
    """Return the digest of all variables after the same pushes in the same order (in a round: another order)."""
    plan = plan_of(VARIABLES, shards, PARTITIONERS[partitioner])
    cluster = Cluster(plan, spec=SPECS[kind], steps=STEPS, round_steps=round_steps)
    client = cluster.client()
    orders = {1: [2, 0, 3, 1, 7, 5, 4, 6, 8], 2: [0, 1, 2, 3, 4, 5, 6, 7, 8], 3: [3, 2, 1, 0, 4, 6, 5, 7, 8]}
    for step in orders[shards] if round_steps else orders[1]:
        client.push(step, gradients_of(step), None)
    variables = client.pull(round_=-(-STEPS // round_steps) if round_steps else None).variables
    assert all(len(shard.updates.applied) == STEPS for shard in cluster.shards)
    return hashlib.sha256(b"".join(variables[name].tobytes() for name in sorted(variables))).hexdigest()


@functools.cache
def on_one_shard(kind: str, round_steps: int | None) -> str:
    return trained(kind, 1, "whole", round_steps)


OTHERS = [(partitioner, shards) for partitioner in PARTITIONERS for shards in (1, 2, 3)][1:]
"""Placements other than whole variables on one shard, which is what they are compared with."""


@pytest.mark.parametrize(("partitioner", "shards"), OTHERS)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("round_steps", [None, ROUND_STEPS], ids=["immediate", "rounds"])
def test_placement_changes_no_bit(round_steps: int | None, kind: str, partitioner: str, shards: int) -> None:
    if SPECS[kind].requires_unsplit_variables and partitioner != "whole":
        assert trained(kind, shards, partitioner, round_steps) != on_one_shard(kind, round_steps)  # why it is refused
    else:
        assert trained(kind, shards, partitioner, round_steps) == on_one_shard(kind, round_steps)


def test_optimizers_differ() -> None:
    assert len({on_one_shard(kind, None) for kind in SPECS}) == len(SPECS)
