"""Resharding: a drained checkpoint on 2, then 3, 5 and 2 shards keeps every bit of variables, slots and applied set.

Rule P8.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.manifest import JobManifest
from parashard.checkpoints.state import assemble, whole_model
from parashard.errors import DamagedCheckpoint
from parashard.plan.intervals import IntervalSet
from parashard.plan.partition import (
    Partition,
    Partitioner,
    fixed_shards,
    maximum_size,
    minimum_size,
    place,
    split,
    whole,
)
from parashard.plan.variables import Variable
from support.checkpoint_cases import (
    PLAN,
    SLOTS,
    STEPS,
    VARIABLES,
    model_of,
    slots_of,
    state_of,
    write_drained,
    write_job,
    write_plan,
    write_shard,
    write_state,
)
from support.store_fakes import MemoryStore

SHARDS = (2, 3, 5, 2)
FIRST_SHARDS = [CheckpointId(1, 0, 1, 1), CheckpointId(1, 1, 1, 1)]


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()  # not ==: NaN differs from itself, and -0.0 equals 0.0


@st.composite
def partitioners(draw: st.DrawFn) -> Partitioner:
    size = draw(st.integers(1, 60))
    return draw(st.sampled_from([whole, fixed_shards(1 + size % 7), minimum_size(size, 5), maximum_size(size)]))


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=4), st.lists(partitioners(), min_size=4, max_size=4), st.integers(0, 99))
def test_2_then_3_then_5_then_2_shards(shapes_of, cuts, seed):
    variables = {f"v{i}": Variable(f"v{i}", shape) for i, shape in enumerate(shapes_of)}
    model, slots = model_of(seed, variables), slots_of(seed, variables)
    store, before = MemoryStore(), None
    for version, (shards, cut) in enumerate(zip(SHARDS, cuts, strict=True), 1):
        plan = place(variables, split(variables, cut), shards, version)
        write_plan(store, plan)
        parts = []
        for shard, held in enumerate(plan.shards):
            state = assemble(store, *before, held, SLOTS) if before else state_of(plan, shard, seed)
            assert state.applied == IntervalSet([(0, STEPS)])
            assert state.version == STEPS
            parts.append(write_state(store, plan, CheckpointId(version, shard, 1, 1), state))
            for p, array in state.variables.items():
                assert_same_bits(array, model[p.variable][p.row_start : p.row_stop])
            for slot in SLOTS:
                for p, array in state.slots[slot].items():
                    assert_same_bits(array, slots[slot][p.variable][p.row_start : p.row_stop])
        before = (write_job(store, version, parts), plan)
    for name, array in whole_model(store, before[0]).items():
        assert_same_bits(array, model[name])


def test_what_is_assembled_is_the_callers_to_change():
    store = MemoryStore()
    job = write_drained(store)
    state = assemble(store, job, PLAN, [Partition("dense/bias", 1, 4)], SLOTS)
    for arrays in (state.variables, *state.slots.values()):
        for array in arrays.values():
            array[:] = 0.0
    assert_same_bits(whole_model(store, job)["dense/bias"], model_of(0)["dense/bias"])


def test_the_common_round_comes_along():  # P12
    store = MemoryStore()
    job = write_job(store, 1, [write_shard(store, id_, round=3) for id_ in FIRST_SHARDS])
    assert assemble(store, job, PLAN, [], ()).round == 3


def test_parts_without_wanted_rows_are_not_read():
    store = MemoryStore()
    job = write_drained(store)
    wanted, shard = PLAN.shards[0][0], FIRST_SHARDS[1]
    store.calls.clear()
    assemble(store, job, PLAN, [wanted], SLOTS)
    assert [name for op, name in store.calls if op == "read" and shard.folder in name] == [shard.manifest_name]


def test_a_job_that_was_drained_before_its_first_step_has_no_applied_steps():
    store = MemoryStore()
    parts = [write_shard(store, id_, applied=(), version=0) for id_ in FIRST_SHARDS]
    state = assemble(store, write_job(store, 1, parts, steps=0), PLAN, PLAN.shards[0], SLOTS)
    assert len(state.applied) == 0


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_the_shape_is_the_variables_however_a_shard_wrote_its_rows(shape):
    store, rows = MemoryStore(), model_of(0)["dense/bias"]
    plan = place({"dense/bias": VARIABLES["dense/bias"]}, [Partition("dense/bias", 0, 5)], 1)
    state = replace(state_of(plan, 0, 0), variables={plan.shards[0][0]: rows.reshape(shape)}, slots={})
    job = write_job(store, 1, [write_state(store, plan, FIRST_SHARDS[0], state)])
    assert_same_bits(assemble(store, job, plan, plan.shards[0], ()).variables[plan.shards[0][0]], rows)


# --- what does not belong together ---


def drained_of(store: MemoryStore, second: dict[str, object]) -> JobManifest:
    """Write a drained checkpoint in whose second part some fields of the manifest are others."""
    return write_job(store, 1, [write_shard(store, FIRST_SHARDS[0]), write_shard(store, FIRST_SHARDS[1], **second)])


ODD = {
    "run": ({"run_id": "run-2"}, "run run-2"),
    "digest": ({"job_digest": "e" * 64}, "job digest eee"),
    "steps": ({"applied": ((0, 4), (5, 10))}, "applied steps"),
    "round": ({"round": 7}, "is at round 7, 0 at None"),
    "slots": ({"slots": ("m",)}, "the optimizer slots m; due: m, v"),
    "partitions": ({"partitions": (("dense/bias", 2, 5),)}, "other partitions than plan 1 says"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_part_of_another_checkpoint_is_refused(case):  # P2, P7
    changed, said = ODD[case]
    store = MemoryStore()
    with pytest.raises(DamagedCheckpoint, match=said):
        assemble(store, drained_of(store, changed), PLAN, PLAN.shards[0], SLOTS)


def test_a_part_that_was_written_anew_is_refused():  # P7
    store = MemoryStore()
    job = write_drained(store)
    for name in [name for name in store.contents if name.startswith(FIRST_SHARDS[1].folder)]:
        store.delete(name)
    write_shard(store, FIRST_SHARDS[1], seed=5)
    with pytest.raises(DamagedCheckpoint):
        assemble(store, job, PLAN, PLAN.shards[0], SLOTS)


def test_a_part_that_is_gone_is_named():
    store = MemoryStore()
    job = write_drained(store)
    del store.contents[FIRST_SHARDS[1].manifest_name]
    with pytest.raises(DamagedCheckpoint, match=f"{FIRST_SHARDS[1].manifest_name}: is not there"):
        assemble(store, job, PLAN, PLAN.shards[0], SLOTS)


def test_parts_in_the_wrong_order_are_refused():
    store = MemoryStore()
    job = write_job(store, 1, [write_shard(store, id_) for id_ in reversed(FIRST_SHARDS)])
    with pytest.raises(DamagedCheckpoint, match="shard 1, and drained checkpoint j1 has 0"):
        assemble(store, job, PLAN, PLAN.shards[0], SLOTS)


@pytest.mark.parametrize("shards", [1, 3])
def test_another_plan_than_the_checkpoints_is_refused(shards):
    store = MemoryStore()
    job = write_drained(store)
    other = place(VARIABLES, split(VARIABLES, fixed_shards(shards)), shards)
    with pytest.raises(DamagedCheckpoint, match=f"2 parts of plan 1, and plan 1 has {shards} shards"):
        assemble(store, job, other, other.shards[0], SLOTS)
