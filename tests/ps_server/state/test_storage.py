"""Storage: a shard's rows start alike wherever they lie, slices are checked, and what no slice covers is zero."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ShapeMismatch, UnknownVariable
from parashard.plan.optimizers import Adagrad, Adam, OptimizerSpec
from parashard.plan.partition import Partition, Plan, fixed_shards
from parashard.plan.state import ROUND_STEPS_MAX, counter_rows, counter_values
from parashard.plan.variables import Float32s, Initializer, Variable, initial_rows
from parashard.protocol.messages import Slice
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from, move
from support.in_process import COUNTING, SEED, plan_of, variables_of
from support.optimizer_specs import SPECS

VARIABLES = variables_of(
    Variable("a", (5, 2), Initializer("normal", 1.0)),
    Variable("b", (3,), Initializer("constant", 4.0)),
    Variable("c", (2, 1, 2), Initializer("uniform", 1.0), frozen=True),
)
PLAN = plan_of(VARIABLES, shards=2, partitioner=fixed_shards(2))
A_LOW, A_HIGH = Partition("a", 0, 2), Partition("a", 2, 5)


def storages(optimizer: Optimizer | None = None) -> list[Storage]:
    return [Storage(PLAN, shard, optimizer or Optimizer(COUNTING), drawn_from(SEED)) for shard in range(2)]


def holder_of(partition: Partition) -> Storage:
    return next(s for s in storages() if partition in [placed.partition for placed in s.layout])


def test_each_partition_starts_with_its_rows_of_the_variable() -> None:
    for storage in storages():
        for placed in storage.layout:
            p = placed.partition
            rows = initial_rows(VARIABLES[p.variable], SEED, p.row_start, p.row_stop)
            assert storage.weights[placed.offset : placed.stop].tolist() == rows.ravel().tolist()


def test_the_shards_hold_every_element_once() -> None:
    assert sum(s.elements for s in storages()) == sum(v.elements for v in VARIABLES.values())


def test_slots_lie_beside_the_weights() -> None:
    (adam, _), (adagrad, _) = (
        storages(Optimizer(Adam())),
        storages(Optimizer(Adagrad(learning_rate=1.0, initial_accumulator=0.5))),
    )
    assert {name: slot.tolist() for name, slot in adam.slots.items()} == dict.fromkeys("mv", [0.0] * adam.elements)
    assert adam.slot_bytes == 2 * adam.weights.nbytes
    assert adagrad.slots["accumulator"].tolist() == [0.5] * adagrad.elements


def test_a_shard_without_partitions_has_no_element() -> None:
    storage = Storage(plan_of(variables_of(Variable("a", (1,))), shards=2), 1, Optimizer(COUNTING), drawn_from(SEED))
    assert storage.elements == 0
    storage.apply(np.empty(0, np.float32), t=1)


def test_the_size_of_slices_in_bytes_and_elements() -> None:
    assert holder_of(A_HIGH).check_slices((Slice(A_HIGH, 2),)) == (24, 6)
    assert holder_of(A_HIGH).check_slices(()) == (0, 0)


@pytest.mark.parametrize(
    ("slices", "error", "message"),
    [
        ((Slice(Partition("d", 0, 1), 2),), UnknownVariable, "variable 'd': is not on this shard"),
        ((Slice(Partition("a", 1, 5), 2),), UnknownVariable, r"rows \[1, 5\) of variable 'a': is not on this shard"),
        ((Slice(A_HIGH, 2), Slice(A_HIGH, 2)), UnknownVariable, "comes twice"),
        ((Slice(A_HIGH, 3),), ShapeMismatch, "'a': rows have 2 elements, found 3"),
    ],
)
def test_slices_that_are_refused(slices: tuple[Slice, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        holder_of(A_HIGH).check_slices(slices)


def test_a_frozen_variable_takes_no_slice() -> None:
    frozen = Partition("c", 0, 1)
    with pytest.raises(UnknownVariable, match="'c' is frozen"):
        holder_of(frozen).check_slices((Slice(frozen, 2),))


def test_another_shards_partition_is_refused() -> None:
    here = holder_of(A_LOW)
    elsewhere = next(s for s in storages() if s.layout != here.layout)
    with pytest.raises(UnknownVariable, match="is not on this shard"):
        elsewhere.check_slices((Slice(A_LOW, 2),))


def test_a_gradient_in_the_shards_own_order_is_not_copied() -> None:
    plan = plan_of(variables_of(Variable("a", (2, 2)), Variable("b", (3,))))
    storage = Storage(plan, 0, Optimizer(COUNTING), drawn_from(SEED))
    content = np.arange(7, dtype=np.float32)
    slices = (Slice(Partition("a", 0, 2), 2), Slice(Partition("b", 0, 3), 1))
    assert np.shares_memory(storage.decode_gradient(slices, content.data), content)
    swapped = storage.decode_gradient(slices[::-1], content.data.cast("B"))
    assert not np.shares_memory(swapped, content)
    assert swapped.tolist() == [3.0, 4.0, 5.0, 6.0, 0.0, 1.0, 2.0]


def test_what_no_slice_covers_is_zero() -> None:  # P15
    plan = plan_of(variables_of(Variable("a", (2, 2)), Variable("b", (3,))))
    storage = Storage(plan, 0, Optimizer(COUNTING), drawn_from(SEED))
    laid = storage.decode_gradient((Slice(Partition("b", 0, 3), 1),), np.ones(3, np.float32).data.cast("B"))
    assert laid.tolist() == [0.0] * 4 + [1.0] * 3
    assert not storage.decode_gradient((), memoryview(b"")).any()


def test_apply_moves_weights_and_leaves_frozen_ones_and_the_gradient() -> None:
    for storage in storages():
        before, gradient = storage.weights.copy(), np.ones(storage.elements, np.float32)
        gradient.flags.writeable = False
        storage.apply(gradient, t=1, scale=0.25)
        for placed in storage.layout:
            run = slice(placed.offset, placed.stop)
            moved = 0.0 if placed.partition.variable == "c" else 0.25
            np.testing.assert_allclose(storage.weights[run] - before[run], moved, atol=1e-6)


# --- what has moved ---

MOVING = plan_of(variables_of(*(Variable(name, (2,)) for name in "abcd")))  # 8 bytes each, in the order of their names


def runs_moved(done: list[int], since: int | None, begin: int = 0, end: int = 32) -> list[tuple[int, int]]:
    storage = Storage(MOVING, 0, Optimizer(COUNTING), drawn_from(SEED))
    storage.weights[:] = np.arange(8)
    storage.memory.done[:] = done
    runs = storage.changed_runs(begin, end, since)
    content = storage.weights.tobytes()
    assert all(bytes(run.values) == content[run.offset_bytes : run.offset_bytes + run.values.nbytes] for run in runs)
    assert all(np.shares_memory(np.frombuffer(run.values, np.uint8), storage.weights) for run in runs)
    return [(run.offset_bytes, run.offset_bytes + run.values.nbytes) for run in runs]


@pytest.mark.parametrize(
    ("done", "since", "runs"),
    [
        ([1, 1, 1, 1], None, [(0, 32)]),
        ([0, 0, 0, 0], None, [(0, 32)]),
        ([1, 1, 1, 1], 1, []),
        ([2, 2, 2, 2], 1, [(0, 32)]),  # neighbours are one run
        ([2, 1, 2, 2], 1, [(0, 8), (16, 32)]),
        ([1, 2, 2, 0], 1, [(8, 24)]),
        ([5, 1, 1, 3], 2, [(0, 8), (24, 32)]),
    ],
)
def test_what_has_moved_since_a_version(done: list[int], since: int | None, runs: list[tuple[int, int]]) -> None:
    assert runs_moved(done, since) == runs


@pytest.mark.parametrize(
    ("begin", "end", "runs"),
    [(4, 20, [(4, 8), (16, 20)]), (8, 16, []), (12, 32, [(16, 32)]), (0, 0, []), (32, 32, []), (4, 4, [])],
)
def test_what_has_moved_within_a_part_of_the_vector(begin: int, end: int, runs: list[tuple[int, int]]) -> None:
    assert runs_moved([2, 1, 2, 2], 1, begin, end) == runs
    assert runs_moved([2, 1, 2, 2], None, begin, end) == ([(begin, end)] if end > begin else [])


def test_apply_says_what_it_moves_and_to_which_version() -> None:
    for storage in storages():
        storage.begin_at(6)
        storage.apply(np.ones(storage.elements, np.float32), t=7)
        frozen = [placed.partition.variable == "c" for placed in storage.layout]
        assert storage.memory.begun.tolist() == storage.memory.done.tolist() == [6 if still else 7 for still in frozen]


class Watched(Optimizer):
    """Keeps the versions that a lock-free reader would see during each update, and the number of its elements."""

    def __init__(self, spec: OptimizerSpec = COUNTING) -> None:
        super().__init__(spec)
        self.storage: Storage | None = None
        self.seen: list[tuple[int, list[int], list[int]]] = []

    def update(self, weights: Float32s, *arrays: Any, **more: Any) -> None:
        assert self.storage is not None
        memory = self.storage.memory
        self.seen.append((weights.size, memory.begun.tolist(), memory.done.tolist()))
        super().update(weights, *arrays, **more)


def watched(plan: Plan, spec: OptimizerSpec = COUNTING) -> tuple[Storage, Watched]:
    optimizer = Watched(spec)
    optimizer.storage = storage = Storage(plan, 0, optimizer, drawn_from(SEED))
    return storage, optimizer


def test_a_lock_free_reader_sees_that_a_partition_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parashard_server.state.storage.JOINED_ELEMENTS_MAX", 4)
    storage, optimizer = watched(MOVING)
    storage.apply(np.ones(8, np.float32), t=1)
    assert optimizer.seen == [(4, [1, 1, 0, 0], [0, 0, 0, 0]), (4, [1, 1, 1, 1], [1, 1, 0, 0])]
    assert storage.memory.done.tolist() == [1, 1, 1, 1]


# --- neighbours are updated by one call ---

ALIKE = [
    Variable("a", (3,)),
    Variable("b", (2, 2)),
    Variable("c", (5,), frozen=True),
    Variable("d", (1,)),
    Variable("e", (2,), decay=False),
    Variable("f", (2,), learning_rate_factor=0.5),
    Variable("g", (3,), learning_rate_factor=0.5),
    Variable("h", (2,), state="average:0.5"),
    Variable("i", (1,), state="average:0.5"),
    Variable("j", (1, 8), state="counter"),
    Variable("jj", (2, 8), state="counter"),
    Variable("k", (4,)),
]


def test_neighbours_without_a_decay_to_tell_them_apart_move_together() -> None:
    storage, optimizer = watched(plan_of(variables_of(*ALIKE)), Adam())
    storage.apply(np.ones(storage.elements, np.float32), t=1)
    assert [size for size, *_ in optimizer.seen] == [7, 3, 5, 4]


@pytest.mark.parametrize("kind", SPECS)
def test_neighbours_move_together_as_each_would_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, spec = plan_of(variables_of(*ALIKE)), SPECS[kind][0]
    together, optimizer = watched(plan, spec)
    monkeypatch.setattr("parashard_server.state.storage.JOINED_ELEMENTS_MAX", 0)
    alone, each = watched(plan, spec)
    for t in range(1, 4):
        gradient = np.random.default_rng(t).integers(0, 99, together.elements).astype(np.float32)
        for storage in (together, alone):
            storage.apply(gradient, t=t, pushes=2)
    sizes = [7, 1, 2, 5, 4] if optimizer.by_element else [3, 4, 1, 2, 2, 3, 4]
    assert [size for size, *_ in optimizer.seen] == 3 * sizes
    assert [size for size, *_ in each.seen] == 3 * [3, 4, 1, 2, 2, 3, 4]
    assert together.weights.tobytes() == alone.weights.tobytes()
    assert all(slot.tobytes() == alone.slots[name].tobytes() for name, slot in together.slots.items())
    assert together.memory.done.tolist() == alone.memory.done.tolist()


INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(-1e6, 1e6, width=32)


@given(value=FINITE, batches=st.lists(FINITE, min_size=1, max_size=20), factor=st.floats(0.01, 1))
def test_an_average_stays_between_the_values_that_it_saw(value: float, batches: list[float], factor: float) -> None:
    values = np.array([value], np.float32)
    low, high = min([value, *batches]), max([value, *batches])
    for batch in batches:
        move(values, np.array([batch], np.float32), f"average:{factor}", 1)
    slack = 1e-6 * max(abs(low), abs(high))
    assert low - slack <= values[0] <= high + slack


def test_an_average_moves_towards_the_mean_of_a_round() -> None:
    values = np.array([1.0, -2.0], np.float32)
    move(values, np.array([9.0, 6.0], np.float32), "average:0.5", 3)
    assert values.tolist() == [2.0, 0.0]


@given(start=INT64, added=st.lists(INT64, min_size=1, max_size=30), data=st.data())
def test_a_counter_counts_pushes_alone_and_in_rounds(start: int, added: list[int], data: st.DataObject) -> None:
    values = counter_rows(start).reshape(-1)
    at = 0
    while at < len(added):
        some = added[at : at + data.draw(st.integers(1, 8))]
        pushed = np.sum([counter_rows(number) for number in some], axis=0, dtype=np.float32).reshape(-1)
        move(values, pushed, "counter", len(some))
        at += len(some)
    assert ((values >= 0) & (values <= 255)).all()
    assert (int(counter_values(values.reshape(-1, 8))[0]) - start - sum(added)) % 2**64 == 0


def test_a_counter_counts_in_the_longest_round() -> None:
    values = counter_rows(-1).reshape(-1)
    pushed = counter_rows(-1).reshape(-1) * np.float32(ROUND_STEPS_MAX)
    move(values, pushed, "counter", ROUND_STEPS_MAX)
    assert counter_values(values) == -1 - ROUND_STEPS_MAX


def test_counters_of_several_rows_do_not_touch_each_other() -> None:
    values = counter_rows([255, -1, 7]).reshape(-1)
    move(values, counter_rows([1, 1, 0]).reshape(-1), "counter", 1)
    assert counter_values(values.reshape(-1, 8)).tolist() == [256, 0, 7]


@pytest.mark.parametrize("pushes", [1, 3])
def test_a_sum_adds_what_is_pushed(pushes: int) -> None:
    values = np.array([1.0], np.float32)
    move(values, np.array([0.5], np.float32), "sum", pushes)
    assert values.tolist() == [1.5]
