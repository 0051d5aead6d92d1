"""Building a shard: its place in the plan, its arithmetic by the job file, its first values by seed or file."""

from typing import Any

import numpy as np
import pytest

from parashard.checkpoints.catalogue import Catalogue
from parashard.checkpoints.state import ShardState, initial_sha256
from parashard.checkpoints.tensors import write_tensors
from parashard.checkpoints.verify import damage_in_store
from parashard.errors import ConfigurationError, DamagedCheckpoint, Unavailable
from parashard.plan.intervals import IntervalSet
from parashard.plan.optimizers import SGD, Adam
from parashard.plan.partition import Partition
from parashard.plan.variables import initial_rows, values_sha256
from parashard.protocol.messages import PushResult, Target
from parashard.store import Store
from parashard_coordinator.run.store import RunStore
from parashard_server.build import ShardBuilder
from parashard_server.core.shard import Shard
from parashard_server.core.update_policies import ImmediateUpdates, RoundUpdates
from support.in_process import pull, push
from support.shard_process import ADAM, DIGEST, PLAN, RUN, SEED, VARIABLES, bits_of, gradient_of, job_reply
from support.store_fakes import MemoryStore


def built(index: int = 0, store: Store | None = None, *, state: ShardState | None = None, **of_job: Any) -> Shard:
    return ShardBuilder(job_reply(**{"steps_total": 10, **of_job}), index, store).build(incarnation=4, state=state)


def joined(store: Store | None = None, **more: Any) -> dict[str, np.ndarray]:
    """Return the variables of both shards, put together."""
    values = {name: np.full(v.shape, np.nan, np.float32) for name, v in VARIABLES.items()}
    for index in range(2):
        shard = built(index, store, **more)
        for placed in shard.storage.layout:
            p = placed.partition
            target = values[p.variable][p.row_start : p.row_stop]
            target[:] = shard.storage.weights[placed.offset : placed.stop].reshape(target.shape)
    return values


def test_a_shard_knows_which_incarnation_of_which_job_it_is() -> None:  # P2, P3
    shard = built(1)
    assert shard.identity == Target(RUN, DIGEST, PLAN.version, 1, 4)
    assert shard.steps_total == 10


@pytest.mark.parametrize("index", [2, -1])
def test_a_shard_that_the_plan_lacks_cannot_be_built(index: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"shards 0\.\.1; this process was started as {index}"):
        built(index)


def test_a_shard_without_memory_names_the_variable_that_takes_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 37.3 GiB")

    monkeypatch.setattr("parashard_server.build.weight_memory", full)
    told = r"^no memory for .* MiB of weights and 2 slots .* rows \[\d+, \d+\) of variable '\w+': Unable to allocate 37"
    with pytest.raises(Unavailable, match=told):
        built(optimizer=ADAM)


def test_without_a_file_values_are_drawn_from_the_jobs_seed() -> None:
    for name, values in joined().items():
        np.testing.assert_array_equal(values, initial_rows(VARIABLES[name], SEED, 0, VARIABLES[name].rows))


def test_consistency_chooses_what_becomes_of_pushes() -> None:
    for policy in ("async", "ssp:3"):
        shard = built(consistency=policy)
        assert isinstance(shard.updates, ImmediateUpdates)
        assert push(shard, 0, 1.0).result is PushResult.APPLIED
    shard = built(consistency="sync:4")
    assert isinstance(shard.updates, RoundUpdates)
    assert push(shard, 0, 1.0).result is PushResult.BUFFERED


@pytest.mark.parametrize(("reduce", "moved"), [("mean", 1.5), ("sum", 3.0)])
def test_rounds_are_reduced_as_the_job_says(reduce: str, moved: float) -> None:  # P13
    shard = built(consistency="sync:2", reduce=reduce)
    before = pull(shard, round_=0)[1]
    push(shard, 0, 1.0)
    push(shard, 1, 2.0)
    np.testing.assert_allclose(pull(shard, round_=1)[1] - before, moved, rtol=1e-5)


@pytest.mark.parametrize(("consistency", "updates"), [("async", 10), ("sync:4", 3)])
def test_a_schedule_as_long_as_the_job_counts_its_updates(consistency: str, updates: int) -> None:  # P15
    shard = built(
        optimizer={"schedule": {"kind": "exponential", "decay_steps": "job", "rate": 0.5}}, consistency=consistency
    )
    assert shard.storage._optimizer.spec.schedule.factor(1 + updates) == 0.5


def test_the_optimizer_has_its_slots() -> None:
    adam = built(optimizer={"kind": "adam", "learning_rate": 0.1})
    assert isinstance(adam.storage._optimizer.spec, Adam)
    assert set(adam.storage.slots) == {"m", "v"}
    assert isinstance(built().storage._optimizer.spec, SGD)


# --- the state of a checkpoint ---


def state_of(shard: Shard) -> ShardState:
    """Return what a checkpoint of a shard would hold."""
    storage, updates = shard.storage, shard.updates

    def rows(vector: np.ndarray) -> dict[Partition, np.ndarray]:
        return {
            placed.partition: vector[placed.offset : placed.stop]
            .copy()
            .reshape(placed.partition.rows, *VARIABLES[placed.partition.variable].shape[1:])
            for placed in storage.layout
        }

    slots = {name: rows(slot) for name, slot in storage.slots.items()}
    return ShardState(updates.applied.copy(), updates.version, updates.round, rows(storage.weights), slots)


@pytest.mark.parametrize("consistency", ["async", "ssp:8", "sync:2"])
def test_a_shard_built_from_a_state_goes_on_as_the_one_that_it_is_of(consistency: str) -> None:  # P1, P15
    first = built(1, optimizer=ADAM, consistency=consistency)
    for step in range(4):
        push(first, step, gradient_of(first, step))
    if consistency == "sync:2":
        first.updates.reach(2)
    second = built(1, optimizer=ADAM, consistency=consistency, state=state_of(first))
    assert bits_of(second) == bits_of(first)
    assert push(second, 3, 1.0).result is PushResult.DUPLICATE
    for shard in (first, second):
        for step in (4, 5):
            push(shard, step, gradient_of(shard, step))
        shard.updates.reach(3 if consistency == "sync:2" else None)
    assert bits_of(second) == bits_of(first)


def test_the_applied_steps_may_have_gaps_and_are_the_shards_own() -> None:  # P1
    first = built(0)
    for step in (0, 1, 7):
        push(first, step, 1.0)
    state = state_of(first)
    second = built(0, state=state)
    push(second, 2, 1.0)
    assert second.updates.applied == IntervalSet([(0, 3), (7, 8)])
    assert state.applied == IntervalSet([(0, 2), (7, 8)])


# --- first values in the store ---

FIRST = {"weight": np.arange(12, dtype=np.float32).reshape(4, 3)}


def joined_from(store: MemoryStore, arrays: dict[str, np.ndarray] = FIRST) -> dict[str, np.ndarray]:
    """Store first values as the coordinator does, and return what both shards make of them."""
    RunStore(store, 1).keep_initial(DIGEST, arrays)
    return joined(store, initial_sha256=values_sha256(arrays))


def test_the_store_gives_the_values_of_the_variables_that_it_has(store: MemoryStore) -> None:
    values = joined_from(store)
    assert values["weight"].tolist() == FIRST["weight"].tolist()
    assert values["bias"].tolist() == [0.0, 0.0]  # drawn


def test_first_values_may_lie_in_several_files(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = np.array([5.0, 6.0], np.float32)
    monkeypatch.setattr(write_tensors, "__kwdefaults__", {"file_bytes": 8})
    values = joined_from(store, {**FIRST, "bias": bias})
    assert sum(".safetensors" in name for name in store.contents) == 2
    assert (values["weight"].tolist(), values["bias"].tolist()) == (FIRST["weight"].tolist(), [5.0, 6.0])


def test_the_store_gives_the_slots_that_it_has(store: MemoryStore) -> None:
    slots = {"m": {"weight": FIRST["weight"] + 1}, "v": {"weight": FIRST["weight"] + 2}}
    RunStore(store, 1).keep_initial(DIGEST, FIRST, slots=slots)
    of_slots = {slot: np.full((4, 3), np.nan, np.float32) for slot in slots}
    for index in range(2):
        shard = built(index, store, optimizer=ADAM, initial_sha256=initial_sha256(FIRST, {}, slots))
        for placed in shard.storage.layout:
            p = placed.partition
            for slot, values in shard.storage.slots.items():
                own = values[placed.offset : placed.stop]
                if p.variable == "weight":
                    of_slots[slot][p.row_start : p.row_stop] = own.reshape(-1, 3)
                else:
                    assert not own.any(), "a variable without kept slots begins with new ones"
    np.testing.assert_equal(of_slots, {slot: of_slot["weight"] for slot, of_slot in slots.items()})
    assert list(damage_in_store(Catalogue(store))) == []


def test_values_that_are_not_the_variable_s_are_refused(store: MemoryStore) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"tensor 'weight\[0:4\]' has shape \(4, 2\), .* \(4, 3\)"):
        joined_from(store, {"weight": np.zeros((4, 2), np.float32)})


def test_values_that_are_not_there_are_not_drawn(store: MemoryStore) -> None:
    with pytest.raises(DamagedCheckpoint, match="first values are not there"):
        joined(store, initial_sha256="a" * 64)


def test_values_with_another_bit_are_refused(store: MemoryStore) -> None:
    joined_from(store)
    name = next(name for name in store.contents if name.endswith(".safetensors"))
    store.contents[name] = store.contents[name][:-1] + b"\1"
    with pytest.raises(DamagedCheckpoint, match=r"variables-0\.safetensors: SHA-256"):
        joined_from(store)


def test_no_shard_is_built_whose_kernels_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: bool) -> None:  # on a thread of its own
        raise OSError("the cache of machine code cannot be read")

    monkeypatch.setattr("parashard_server.build.fused.warm_up", broken)
    with pytest.raises(OSError, match="machine code"):
        built()


def test_a_job_loads_the_kernels_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[dict[str, bool]] = []
    monkeypatch.setattr("parashard_server.build.fused.warm_up", lambda **needed: loaded.append(needed))
    built()
    built(consistency="sync:3")
    assert loaded == [{"rounds": False}, {"rounds": True}]
