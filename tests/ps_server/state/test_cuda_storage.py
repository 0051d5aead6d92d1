"""CudaStorage on a GPU of NumPy: the bits of Storage on every path, and a mirror that readers can trust."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import (
    ShapeMismatch,
    StaleRound,
    UnknownVariable,
)
from parashard.plan.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, OptimizerSpec, RMSProp
from parashard.plan.partition import Partition
from parashard.plan.variables import Float32s, Initializer, Variable
from parashard.protocol.messages import Buffers, DType, Slice
from parashard.transports.shared_weights import SharedWeights, WeightsReader, can_share
from parashard_server.state import cuda_storage
from parashard_server.state.cuda_storage import CudaStorage, warm_up
from parashard_server.state.optimizer import Optimizer
from parashard_server.state.storage import Storage, drawn_from
from support.hosted_cuda import received
from support.in_process import SEED, plan_of, variables_of
from support.late_device import LateDevice

VARIABLES = variables_of(
    Variable("bias", (3,)),
    Variable("count", (2, 8), state="counter"),
    Variable("mean", (3,), state="average:0.25"),
    Variable("still", (2, 2), Initializer("constant", 1.0), frozen=True),
    Variable("table", (5, 2), Initializer("normal", 1.0), decay=False),
    Variable("weight", (4, 3), Initializer("uniform", 0.5), learning_rate_factor=0.5),
)
PLAN = plan_of(VARIABLES)
OFFSETS = [0, *(placed.stop for placed in PLAN.layouts[0])]
ELEMENTS, BYTES = OFFSETS[-1], 4 * OFFSETS[-1]
STILL = [placed.partition.variable for placed in PLAN.layouts[0]].index("still")
EVERY = (SGD, Momentum, Nesterov, Adagrad, RMSProp, Adam, AdamW, FTRL, LAMB)


def on_host(spec: OptimizerSpec | None = None) -> Storage:
    return Storage(PLAN, 0, Optimizer(spec or Adam(learning_rate=0.1)), drawn_from(SEED))


def on_device(device: LateDevice, spec: OptimizerSpec | None = None, memory: Any = None) -> CudaStorage:
    optimizer = Optimizer(spec or Adam(learning_rate=0.1), device.kernels)
    return CudaStorage(PLAN, 0, optimizer, drawn_from(SEED), device=device, memory=memory)


def gradient(t: int) -> Float32s:
    return np.random.default_rng(t).normal(size=ELEMENTS).astype(np.float32)


def apply(storage: Storage, t: int, **more: Any) -> None:
    storage.apply(received(storage, gradient(t)), t=t, **more)


def read(storage: Storage, begin: int = 0, end: int = BYTES, since: int | None = None) -> list[tuple[int, bytes]]:
    return [(run.offset_bytes, bytes(run.values)) for run in storage.changed_runs(begin, end, since)]


def slots_of(storage: Storage) -> dict[str, bytes]:
    return {name: slot.tobytes() for name, slot in storage.slots.items()}


# --- the same numbers as on the host ---


@pytest.mark.parametrize("kind", EVERY)
def test_pushes_give_the_bits_that_they_give_on_the_host(kind: type[OptimizerSpec]) -> None:
    spec = kind(learning_rate=0.1, **({"initial_accumulator": 0.5} if kind is Adagrad else {}))
    host, gpu = on_host(spec), on_device(LateDevice(), spec)
    assert read(gpu) == read(host)
    for t in range(1, 5):
        for storage in (host, gpu):
            apply(storage, t, scale=0.5)
        assert read(gpu) == read(host)
        assert slots_of(gpu) == slots_of(host)
    assert gpu.slot_bytes == host.slot_bytes


EVENTS = st.one_of(
    st.just(("push",)),
    st.tuples(st.just("pull"), st.integers(0, ELEMENTS), st.integers(0, ELEMENTS), st.none() | st.integers(0, 6)),
    st.just(("cut",)),
    st.just(("copy",)),
)


@given(st.lists(EVENTS | st.tuples(st.just("room"), st.booleans()), max_size=16))
def test_no_order_of_pushes_pulls_and_snapshots_tells_it_from_a_host(events: Sequence[Any]) -> None:
    device = LateDevice()
    storages: list[Storage] = [on_host(), on_device(device)]
    pushed, snapshots = 0, []
    for event, *more in events:
        if event == "push":
            pushed += 1
            for storage in storages:
                apply(storage, pushed)
        elif event == "pull":
            begin, end = sorted(more[:2])
            seen, seen_gpu = (read(storage, 4 * begin, 4 * end, more[2]) for storage in storages)
            assert seen_gpu == seen
        elif event == "room":
            device.is_full = not more[0]
        elif event == "cut":
            snapshots.append([storage.snapshot() for storage in storages])
            assert snapshots[-1][1].is_kept != device.is_full
        elif snapshots:
            for snapshot in snapshots[-1]:
                snapshot.save_next()
        for host, gpu in snapshots:
            if not gpu.is_kept:  # a push copies all that is missing, not what it moves
                assert len(gpu.missing) <= len(host.missing)
    for host, gpu in snapshots:
        while host.save_next() or gpu.save_next():
            pass
        assert gpu.weights.tobytes() == host.weights.tobytes()
        assert {n: s.tobytes() for n, s in gpu.slots.items()} == {n: s.tobytes() for n, s in host.slots.items()}


def test_it_goes_on_from_a_checkpoint() -> None:
    before = on_device(LateDevice())
    apply(before, 1)
    snapshot = before.snapshot()
    while snapshot.save_next():
        pass
    places = {placed.partition: slice(placed.offset, placed.stop) for placed in before.layout}
    values = {p: snapshot.weights[run].reshape(p.rows, -1) for p, run in places.items()}
    after = CudaStorage(
        PLAN,
        0,
        Optimizer(Adam(learning_rate=0.1), (device := LateDevice()).kernels),
        lambda variable, start, stop: values[Partition(variable.name, start, stop)],
        device=device,
    )
    after.restore_slots({name: {p: slot[run] for p, run in places.items()} for name, slot in snapshot.slots.items()})
    after.begin_at(1)
    assert read(after, since=1) == []
    for storage in (before, after):
        apply(storage, 2)
    assert (read(after), slots_of(after)) == (read(before), slots_of(before))


def test_a_shard_without_partitions_has_nothing_to_move() -> None:
    device = LateDevice()
    plan = plan_of(variables_of(Variable("a", (1,))), shards=2)
    storage = CudaStorage(plan, 1, Optimizer(SGD(learning_rate=1.0), device.kernels), drawn_from(SEED), device=device)
    storage.apply(np.empty(0, np.float32), t=1)
    assert storage.changed_runs(0, 0, None) == ()


# --- pushes ---


def test_a_push_is_acknowledged_when_the_gpu_has_moved_the_weights() -> None:  # P14
    device = LateDevice()
    storage = on_device(device)
    apply(storage, 1)
    assert not device.asked


def test_a_kernel_that_fails_late_fails_its_push() -> None:  # P14
    device = LateDevice()
    storage = on_device(device)

    def broken(*given: Any, **more: Any) -> None:
        device.asked.append(lambda: 1 // 0)  # type: ignore[arg-type,return-value]

    storage._optimizer._kernel = broken
    with pytest.raises(ZeroDivisionError):
        apply(storage, 1)


def test_a_gradient_goes_by_page_locked_memory_and_is_only_read() -> None:
    device = LateDevice()
    storage = on_device(device)
    device.copied_in.clear()
    pushed = gradient(1)
    pushed.flags.writeable = False
    storage.apply(received(storage, pushed), t=1)
    assert len(device.copied_in) == len(device.staged) == 1
    assert device.copied_in[0].base is device.staged[0]
    assert device.staged[0].tobytes() == pushed.tobytes()


def test_a_gradient_in_page_locked_memory_is_copied_from_there() -> None:
    device, slot = LateDevice(), np.zeros(BYTES + 8, np.uint8)
    storage, host = on_device(device), on_host()
    storage.lock_pages(slot)
    device.copied_in.clear()
    slot[:BYTES] = gradient(1).view(np.uint8)
    storage.apply(received(storage, slot[:BYTES].view(np.float32)), t=1)
    assert device.staged == []
    assert len(device.copied_in) == 1
    assert np.shares_memory(device.copied_in[0], slot)
    apply(host, 1)
    assert read(storage) == read(host)


def test_a_gradient_that_had_to_be_laid_out_is_there_already() -> None:
    device = LateDevice()
    storage = on_device(device, SGD(learning_rate=-1.0))
    before = storage.weights.copy()
    laid = storage.decode_gradient(
        (Slice(Partition("bias", 0, 3), 1, DType.FLOAT16),), memoryview(np.ones(3, "<f2")).cast("B")
    )
    assert device.copied_in[-1].base is device.staged[0]
    storage.apply(laid, t=1)
    read(storage)
    assert (storage.weights - before).sum() == pytest.approx(3.0, abs=1e-5)


def test_weights_are_read_by_page_locked_memory() -> None:
    device = LateDevice()
    storage = on_device(device)
    assert device.locked[0] is storage.weights


def test_a_kernel_is_compiled_before_the_first_push() -> None:
    device, called = LateDevice(), []
    optimizer = Optimizer(Adam(), device.kernels)
    kernel = optimizer._kernel
    optimizer._kernel = lambda *given, **more: called.append(kernel(*given, **more))
    warm_up(device, optimizer)
    assert called == [None, None]  # of whole vectors, and of some of their elements
    assert not device.asked


@pytest.mark.parametrize(
    ("slices", "error"),
    [
        ((Slice(Partition("none", 0, 1), 1),), UnknownVariable),
        ((Slice(Partition("still", 0, 2), 2),), UnknownVariable),
        ((Slice(Partition("bias", 0, 3), 2),), ShapeMismatch),
    ],
)
def test_slices_are_checked_as_on_the_host(slices: tuple[Slice, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        on_device(LateDevice()).check_slices(slices)


# --- the mirror ---


def test_weights_come_to_the_host_when_they_are_asked_for_and_once() -> None:
    device = LateDevice()
    storage = on_device(device)
    first = storage.weights.copy()
    for t in (1, 2):
        apply(storage, t)
    assert device.copied_out == []
    assert storage.weights.tobytes() == first.tobytes()
    read(storage, 0, 4)  # the first partition's first element
    assert [host.size for host in device.copied_out] == [OFFSETS[1]]
    read(storage)
    assert [host.size for host in device.copied_out[1:]] == [ELEMENTS - OFFSETS[1]]  # the frozen one lies between
    read(storage)
    assert len(device.copied_out) == 2


def test_what_has_not_moved_is_not_copied_where_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_storage, "GAP_BYTES_MAX", 0)
    device = LateDevice()
    storage = on_device(device)
    apply(storage, 1)
    read(storage)
    assert [host.size for host in device.copied_out] == [OFFSETS[STILL], ELEMENTS - OFFSETS[STILL + 1]]


def test_versions_tell_what_is_being_copied() -> None:
    device = LateDevice()
    storage = on_device(device)
    storage.begin_at(4)
    seen: list[tuple[list[int], list[int]]] = []
    device.while_copying_out = lambda: seen.append((storage.memory.begun.tolist(), storage.memory.done.tolist()))
    apply(storage, 5)
    apply(storage, 6)
    assert storage.memory.begun.tolist() == storage.memory.done.tolist() == [4] * (len(OFFSETS) - 1)
    read(storage)
    expected = [4 if index == STILL else 6 for index in range(len(OFFSETS) - 1)]
    assert seen == [(expected, [4] * (len(OFFSETS) - 1))]
    assert storage.memory.begun.tolist() == storage.memory.done.tolist() == expected


def test_a_long_copy_closes_a_few_partitions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_storage, "MIRROR_BYTES_MAX", 4 * OFFSETS[2])
    device = LateDevice()
    storage = on_device(device)
    closed: list[list[int]] = []
    device.while_copying_out = lambda: closed.append(
        np.flatnonzero(storage.memory.begun != storage.memory.done).tolist()
    )
    apply(storage, 1)
    expected = on_host()
    apply(expected, 1)
    assert read(storage) == read(expected)
    assert closed[0] == [0, 1], "others may be read meanwhile"
    assert [index for piece in closed for index in piece if index != STILL] == [
        index for index in range(len(OFFSETS) - 1) if index != STILL
    ]
    assert len(closed) > 2


@pytest.mark.skipif(not can_share(), reason="this machine cannot share memory")
def test_lock_free_readers_never_see_half_a_partition() -> None:
    device, memory = LateDevice(), SharedWeights(OFFSETS)
    storage = on_device(device, memory=memory)
    reader = WeightsReader.mapped(memory.read_descriptor, ELEMENTS, len(OFFSETS) - 1)

    def by_reader(known: int | None, version: int, *, exact: bool = False) -> tuple[int, bytes]:
        into = np.zeros(ELEMENTS, np.float32)
        stop = reader.read(0, BYTES, Buffers([into]), known=known, version=version, exact=exact)
        return stop, into.tobytes()

    apply(storage, 1)
    read(storage)  # as the shard does before it answers that it is at version 1
    old = storage.weights.tobytes()
    assert by_reader(None, 1) == (BYTES, old)
    apply(storage, 2)
    assert by_reader(None, 1, exact=True) == (BYTES, old)  # P11: version 2 was not requested yet
    stops: list[int] = []
    device.while_copying_out = lambda: stops.append(by_reader(None, 1)[0])
    read(storage)
    assert stops == [0]  # up to the first partition that is being copied
    assert by_reader(None, 2) == (BYTES, storage.weights.tobytes())
    with pytest.raises(StaleRound):
        by_reader(None, 1, exact=True)


# --- how many copies, launches and waits ---


def layers(count: int) -> dict[str, Variable]:
    """Return variables of convolutions with batch normalisation, in an order that mixes what moves differently."""
    return variables_of(
        *(
            Variable(f"{layer:03}.{name}", shape, **more)
            for layer in range(count)
            for name, shape, more in (
                ("batches", (1, 8), {"state": "counter"}),
                ("bias", (3,), {"decay": False}),
                ("frozen", (2,), {"frozen": True}),
                ("mean", (3,), {"state": "average:0.1"}),
                ("sum", (2,), {"state": "sum"}),
                ("weight", (4, 3), {}),
            )
        )
    )


@pytest.mark.parametrize(
    ("spec", "launches"),
    [
        (SGD(learning_rate=0.1), 4),
        (AdamW(learning_rate=0.1), 5),
        (Momentum(learning_rate=0.1, decoupled_weight_decay=True, weight_decay=0.1), 6),
    ],
)
@pytest.mark.parametrize("count", [1, 30])
def test_no_number_of_copies_launches_or_waits_is_that_of_the_variables(
    spec: OptimizerSpec, launches: int, count: int
) -> None:
    plan = plan_of(layers(count))
    device = LateDevice()
    host = Storage(plan, 0, Optimizer(spec), drawn_from(SEED))
    gpu = CudaStorage(plan, 0, Optimizer(spec, device.kernels), drawn_from(SEED), device=device)
    for t in (1, 2, 3):
        pushed = np.random.default_rng(t).integers(-8, 8, host.elements).astype(np.float32)
        device.counted.clear()
        there = gpu.received(pushed)
        assert gpu.is_finite(there)
        gpu.apply(there, t=t)
        size = pushed.nbytes
        assert device.counted == {"in": 1, "in bytes": size, "launches": 1 + launches, "waits": 2}
        device.counted.clear()
        (found,) = gpu.changed_runs(0, size, None)
        assert (device.counted["out"], device.counted["waits"]) == (1, 1)
        assert set(device.counted) == {"out", "out bytes", "waits"}
        host.apply(pushed, t=t)
        assert bytes(found.values) == host.weights.tobytes()
        assert slots_of(gpu) == slots_of(host)


@pytest.mark.parametrize("count", [1, 30])
def test_no_push_waits_for_a_snapshot_if_the_gpu_has_room_for_it(count: int) -> None:
    plan, device = plan_of(layers(count)), LateDevice()
    gpu = CudaStorage(plan, 0, Optimizer(Adam(), device.kernels), drawn_from(SEED), device=device)
    before = gpu.weights.copy()
    snapshot = gpu.snapshot()
    assert device.counted["kept"] == 3
    device.counted.clear()
    gpu.apply(gpu.zeros(), t=1)
    assert len(snapshot.missing) == len(gpu.layout)
    assert (device.counted["out"], device.counted["waits"], gpu.copies_forced) == (0, 1, 0)
    snapshot.save(*snapshot.missing)
    assert (device.counted["fetched"], device.counted["waits"]) == (3, 1)
    assert snapshot.weights.tobytes() == before.tobytes()
    assert not snapshot._pairs, "the copies on the GPU are dropped before files are written"


@pytest.mark.parametrize("count", [1, 30])
def test_without_room_a_push_takes_a_copy_of_each_vector(count: int) -> None:
    plan, device = plan_of(layers(count)), LateDevice()
    device.is_full = True
    gpu = CudaStorage(plan, 0, Optimizer(Adam(), device.kernels), drawn_from(SEED), device=device)
    snapshot = gpu.snapshot()
    device.counted.clear()
    gpu.apply(gpu.zeros(), t=1)
    assert not snapshot.missing
    assert (device.counted["out"], device.counted["waits"]) == (3, 2)


def test_more_kinds_than_a_byte_has_move_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_storage, "KINDS_MAX", 1)
    device = LateDevice()
    host, gpu = on_host(), on_device(device)
    for storage in (host, gpu):
        apply(storage, 1)
    assert read(gpu) == read(host)
