"""What encodings and clipping do to a push on a GPU has the bits of the host, and is counted; on a GPU that is late."""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import PullBuffers
from parashard.data.base import Batch
from parashard.encodings.feedback import EncodedParts
from parashard.encodings.gpu import TransferLayout
from parashard.errors import NonFiniteGradient, Unreachable
from parashard.plan.embedding import EmbeddingTable
from parashard.plan.flat import FlatLayout
from parashard.plan.optimizers import SGD
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable, global_norm
from parashard.protocol.messages import PullRun, Push
from parashard_worker.computing import Task, clip_and_weight
from parashard_worker.device import Cpu, Device, Gpu
from parashard_worker.gpu_copies import PendingGradients
from parashard_worker.loop import StepLoop
from support import encoding_reference as reference
from support.compiled_cupy import CompiledCupy
from support.encoding_cases import drawn
from support.in_process import Cluster, plan_of, variables_of
from support.late_cuda import LateCuda
from support.loop_cases import Numbered, ScriptedLeasing

WARM, STEPS = 2, 6
CODES = {"bfloat16": reference.to_bfloat16, "float16": reference.to_float16}


def of_encoding(*encodings: str) -> dict[str, Variable]:
    """Return variables, some of which have each encoding in turn, state among them."""
    shapes = [(7, 3), (65,), (40, 9), (1,), (128, 2), (5, 31)]
    made = [Variable(f"v{i}", shape, encoding=encodings[i % len(encodings)]) for i, shape in enumerate(shapes)]
    still = Variable("still", (70,), frozen=True, encoding=encodings[0])
    return variables_of(*made, still, Variable("seen", (3,), state="sum"))


class Drawn:
    """A model whose gradients are drawn by the step and scaled by the weights; on the host or on a GPU that is late."""

    def __init__(self, variables: Mapping[str, Variable]) -> None:
        self.variables = variables
        self.spoil = np.float32(0.0)
        self.nothing: set[str] = set()

    def initial_variables(self) -> Mapping[str, Variable]:
        return self.variables

    def gradient(self, name: str, step: int, weights: np.ndarray) -> np.ndarray:
        seed = 100 * step + sorted(self.variables).index(name)
        return drawn(seed, weights.size).reshape(weights.shape) + np.float32(0.01) * weights + self.spoil

    def loss_and_gradients(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> tuple[Any, Mapping[str, Any]]:
        due = [name for name, v in self.variables.items() if not v.frozen and name not in self.nothing]
        none = dict.fromkeys(self.nothing)
        if xp is np:
            return 0.5, {name: self.gradient(name, batch.step, variables[name]) for name in due} | none
        if not isinstance(xp, LateCuda):
            return 0.5, {n: xp.asarray(self.gradient(n, batch.step, variables[n].get())) for n in due} | none
        return 0.5, {
            name: xp.computed(lambda name=name: self.gradient(name, batch.step, variables[name].values)) for name in due
        } | none

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        return {}


def task_on(device: Device, variables: dict[str, Variable], **more: Any) -> Task:
    plan = plan_of(variables, shards=2, partitioner=fixed_shards(2))
    task = Task(Drawn(variables), Numbered(), StepPlan(20, 4, epochs=2, seed=1), plan, device, None, None)
    return task._replace(**more)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, compiled_cupy: CompiledCupy) -> tuple[Gpu, LateCuda]:
    cupy = LateCuda(at_random=random.Random(1), compiled=compiled_cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return Gpu(0), cupy


@pytest.fixture(params=["late", pytest.param("xp_gpu", id="real", marks=pytest.mark.gpu)])
def any_gpu(request: pytest.FixtureRequest) -> Gpu:
    """Return a GPU that is late, and a real one."""
    found = request.getfixturevalue(request.param)
    return found[0] if request.param == "late" else Gpu(0)


class Steps:
    """Steps of a task on a GPU, and what the host makes of their gradients."""

    def __init__(self, gpu: Gpu, task: Task) -> None:
        self.gpu, self.task, self.model = gpu, task, task.model
        self.buffers = PullBuffers(task.plan, gpu.host_memory)

    def computed(self, step: int, share: float = 1.0) -> tuple[PendingGradients, dict[str, np.ndarray]]:
        """Return a step's gradients as a GPU has them, and as the host would push them."""
        weights = self.buffers.take((1, 1))
        for number, array in enumerate(weights.variables.values()):
            array[...] = drawn(7 * step + number, array.size).reshape(array.shape)
        batch = self.task.batch_of(step)
        batch = Batch(batch.step, batch.epoch, batch.indices, batch.inputs, batch.targets, share=share)
        plain = {
            name: self.model.gradient(name, step, weights.variables[name])
            for name, variable in self.task.plan.variables.items()
            if not variable.frozen and name not in self.model.nothing
        }
        clips = self.task.clip_norm, self.task.variable_clip_norm
        expected = clip_and_weight(step, 0.5, plain, clips, self.task.plan.variables, share)
        _, _, pending = self.task.gradients(batch, self.gpu.arrived(weights.variables))
        assert isinstance(pending, PendingGradients)
        self.buffers.give_back(weights)
        return pending, expected


def assert_same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].view(np.uint32), array.view(np.uint32), err_msg=name)


@pytest.mark.parametrize("kind", CODES)
def test_codes_leave_in_one_copy_of_half_the_bytes(late: tuple[Gpu, LateCuda], kind: str) -> None:
    gpu, cupy = late
    steps = Steps(gpu, task_on(gpu, of_encoding(kind)))
    run_bytes = 4 * FlatLayout.of(steps.task.plan.variables).elements
    for step in range(STEPS):
        before = Counter(cupy.counts)
        pending, expected = steps.computed(step)
        waited = cupy.counts["waits"] - before["waits"]
        sent = pending.wait()
        found = cupy.counts - before
        for name, gradient in expected.items():
            if name == "seen":
                assert sent[name].dtype == np.float32, "state leaves as it is"
                continue
            codes = np.empty(gradient.size, np.uint16)
            CODES[kind](gradient.reshape(-1), codes)
            np.testing.assert_array_equal(sent[name].reshape(-1), codes)
        del pending, sent
        if step < WARM:
            continue
        assert waited == 1, "for the loss, and whether the gradients are finite"
        assert found["waits"] == 2
        assert found["copies out"] == 2, "what is told, and all gradients"
        assert found["bytes out"] - 16 < 0.55 * run_bytes
        assert found["allocations"] == found["events made"] == 0
        assert found["events"] == 7, "as of gradients in float32"


@pytest.mark.parametrize(("kind", "most", "kernels"), [("int8", 0.27, 2), ("topk:0.05", 0.11, 13)])
@pytest.mark.parametrize("count", [1, 20])
def test_what_has_residues_leaves_in_one_copy_of_few_bytes(
    late: tuple[Gpu, LateCuda], kind: str, most: float, kernels: int, count: int
) -> None:
    gpu, cupy = late
    many = {f"w{i:02}": Variable(f"w{i:02}", (400, 40), encoding=kind) for i in range(count)}
    steps = Steps(gpu, task_on(gpu, {"b": Variable("b", (3,)), **many}))
    for step in range(STEPS):
        before = Counter(cupy.counts)
        pending, expected = steps.computed(step)
        sent = pending.wait()
        found = cupy.counts - before
        np.testing.assert_array_equal(sent["b"], expected["b"])
        for shard in (0, 1):
            sent["w00"].settle(shard, step % 2 == 0)
        after = cupy.counts - before
        del pending, sent
        if step >= WARM:
            assert found["copies out"] == 2, "what is told, and all gradients"
            assert found["bytes out"] - 16 < most * 4 * 400 * 40 * count + 4 * 64
            computing = 2 * (count + 1) + 2  # two for each variable, one clears the flags, one checks all
            assert found["kernels"] == computing + 1 + kernels, "how many does not depend on the variables"
            assert (found["waits"], after["waits"]) == (2, 2), "nothing waits for what becomes of residues"
            assert found["allocations"] == found["events made"] == 0
            assert (found["events"], after["copies out"], after["copies in"]) == (7, 2, found["copies in"])


def test_the_gradients_themselves_are_there_beside_their_codes(late: tuple[Gpu, LateCuda]) -> None:
    gpu, _ = late
    steps = Steps(gpu, task_on(gpu, of_encoding("float16", "float32", "topk:0.1")))
    for step in range(STEPS):
        pending, expected = steps.computed(step)
        assert_same_bits(pending.values(), expected)
        assert pending.wait()["v0"].dtype == np.uint16
        assert isinstance(pending.wait()["v2"], EncodedParts)


@pytest.mark.parametrize("kind", ["int8", "topk:0.1"])
def test_in_a_job_with_tables_the_host_encodes_each_step(
    late: tuple[Gpu, LateCuda], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gpu, _ = late
    users = EmbeddingTable("users", 2, SGD(0.1))
    steps = Steps(gpu, task_on(gpu, of_encoding(kind), tables={users.name: users}))
    monkeypatch.setattr(steps.model, "keys", lambda batch: {}, raising=False)
    pending, expected = steps.computed(0)
    assert_same_bits(pending.wait(), expected)  # in float32, though no row of a table is in this step


CLIPS = [(None, 3.0), (2.0, None), (2.0, 3.0), (1e9, 3.0), (1e9, 1e9)]


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize("tells_norm", [False, True])
@pytest.mark.parametrize(("together", "each"), [*CLIPS, (None, None)])
def test_what_is_clipped_on_a_gpu_has_the_bits_of_the_host(
    late: tuple[Gpu, LateCuda], together: float | None, each: float | None, tells_norm: bool, encoding: str
) -> None:
    gpu, cupy = late
    task = task_on(gpu, of_encoding(encoding), clip_norm=together, variable_clip_norm=each, tells_norm=tells_norm)
    steps = Steps(gpu, task)
    for step in range(STEPS):
        before = Counter(cupy.counts)
        steps.model.nothing = {"v2"} if step % 2 else set()
        pending, expected = steps.computed(step, share=(1.0, 0.3)[step % 2])
        found = cupy.counts - before
        assert_same_bits(pending.values(), expected)
        if tells_norm:
            norm = global_norm({name: gradient for name, gradient in expected.items() if name != "seen"})
            assert pending.norm == norm
        else:
            assert pending.norm is None
        if step >= WARM:
            clips = (together, each) != (None, None)
            asked = (clips or tells_norm) + (together is not None and each == 3.0) + (clips and tells_norm)
            assert found["waits"] == max(1, asked)
            assert found["copies out"] == 2 + asked, "what is told, squares each time, and all gradients"
            assert found["allocations"] == found["events made"] == 0


def test_denormals_are_clipped_and_weighed_as_on_the_host(late: tuple[Gpu, LateCuda]) -> None:
    gpu, _ = late
    steps = Steps(gpu, task_on(gpu, of_encoding("float32"), clip_norm=1e-3))
    pending, expected = steps.computed(0, share=1e-38)
    assert_same_bits(pending.values(), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_named_before_it_is_clipped_or_encoded(late: tuple[Gpu, LateCuda], bad: float) -> None:
    gpu, _ = late
    steps = Steps(gpu, task_on(gpu, of_encoding("float16"), clip_norm=1.0))
    for step in range(STEPS):
        steps.model.spoil = np.float32(bad if step == 3 else 0.0)
        if step != 3:
            pending, expected = steps.computed(step)
            assert_same_bits(pending.values(), expected)
            continue
        weights = steps.buffers.take((1, 1))
        with pytest.raises(NonFiniteGradient, match="the gradient of 'seen' became"):
            steps.task.gradients(steps.task.batch_of(step), weights.variables)
        steps.buffers.give_back(weights)


ENCODINGS = [
    ("bfloat16",),
    ("float16",),
    ("int8",),
    ("topk:0.1",),
    ("float16", "int8", "float32", "topk:0.05", "bfloat16"),
]


def sent(device: Device, memory: Any, encodings: tuple[str, ...], depth: int, **more: Any) -> list[tuple[Any, ...]]:
    """Return what each push of a loop carried, of which some fail, and of which one is a duplicate."""
    task = task_on(device, of_encoding(*encodings), **more)
    cluster = Cluster(task.plan)
    asked = 0

    def before(address: str, request: Push | PullRun) -> None:
        nonlocal asked
        if isinstance(request, Push):
            asked += 1
            if asked in (5, 8, 9):
                raise Unreachable("dead", peer=address)

    cluster.before = before
    leasing: Any = ScriptedLeasing(deque(pb.Grant(step=step) for step in (0, 1, 2, 3, 2, 4, 4, 5)))
    client = cluster.client(memory=memory, retry_budget_s=0.0, sends_norms=task.tells_norm)
    StepLoop(task, client, leasing, depth=depth).run(lambda: False)
    assert asked > 9
    assert leasing.drops
    assert not leasing.failures, leasing.failures
    return [(push.step, push.slices, push.norm, bytes(push.payload.whole())) for push in cluster.pushes]


@pytest.mark.parametrize("encodings", ENCODINGS, ids="+".join)
@pytest.mark.parametrize("clips", [{}, {"clip_norm": 1.0}, {"tells_norm": True}], ids=str)
def test_pushes_from_a_gpu_have_the_bytes_of_those_from_the_host_whatever_becomes_of_them(
    any_gpu: Gpu, encodings: tuple[str, ...], clips: dict[str, Any]
) -> None:
    gpu = any_gpu
    assert sent(gpu, gpu.host_memory, encodings, 0, **clips) == sent(Cpu(), Cpu.host_memory, encodings, 0, **clips)


@pytest.mark.parametrize("depth", [1, 3])
def test_pushes_that_overlap_settle_what_they_have_taken(any_gpu: Gpu, depth: int) -> None:  # P17
    gpu = any_gpu
    sent(gpu, gpu.host_memory, ("int8", "float16"), depth)
    assert gpu._gradients is not None
    taken = [memory.taken for memory in gpu._gradients._leaving]
    assert len(taken) <= depth + 2
    assert all(one is not None and not one.open for one in taken)


def never_pushed(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    pending, _ = steps.computed(1)
    pending.wait()


def not_copied(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    write = TransferLayout.write

    def encoded_and_no_more(*given: Any) -> None:
        write(*given)
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patched:
        patched.setattr(TransferLayout, "write", encoded_and_no_more)
        with suppress(RuntimeError):
            steps.computed(1)


@pytest.mark.parametrize("left", [never_pushed, not_copied])
def test_a_step_that_is_computed_and_never_pushed_leaves_residues_as_they_were(
    late: tuple[Gpu, LateCuda], monkeypatch: pytest.MonkeyPatch, left: Callable[[Steps, pytest.MonkeyPatch], None]
) -> None:
    gpu, cupy = late
    steps = Steps(gpu, task_on(gpu, of_encoding("int8")))
    pending, _ = steps.computed(0)
    for shard in (0, 1):
        pending.wait()["v0"].settle(shard, True)
    assert gpu._gradients is not None
    words = gpu._gradients._words
    assert words is not None
    assert words._feedback is not None
    before = cupy.value_of(words._feedback._residue).copy()
    left(steps, monkeypatch)
    gpu._gradients._stream.synchronize()
    assert before.any()
    np.testing.assert_array_equal(cupy.value_of(words._feedback._residue), before)
    assert cupy.value_of(words._feedback._present).all()
    assert not any(memory.taken is not None and memory.taken.open for memory in gpu._gradients._leaving[1:])
