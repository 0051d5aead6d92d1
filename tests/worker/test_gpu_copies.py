"""What a step copies between host and GPU, counted on a fake; and whatever streams do first, no step spoils another."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.client.pulled import PullBuffers
from parashard.data.base import Batch, DataSpec
from parashard.errors import BadData, NonFiniteGradient
from parashard.models.base import StepSignal
from parashard.plan.flat import FlatArrays, FlatLayout, GradientRun
from parashard.plan.partition import fixed_shards
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable
from parashard_worker.computing import Task
from parashard_worker.device import Gpu
from parashard_worker.gpu_copies import ArraysIn, NotCopied, PendingGradients, Traffic, wait_for_gradients
from parashard_worker.gpu_norms import Scaling
from parashard_worker.loop import StepLoop
from parashard_worker.worker import worker_families
from support.in_process import Cluster, plan_of, variables_of
from support.late_cuda import FORMS, LateCuda
from support.loop_cases import ScriptedLeasing
from support.shown_metrics import shown_families
from support.tiers import by_tier

WARM = 2  # steps in which memory is made
STEPS = 8


def of_size(count: int) -> dict[str, Variable]:
    """Return so many variables of different sizes, the second of which is state."""
    made = {f"v{i}": Variable(f"v{i}", (i % 7 + 1, 3), state="sum" if i == 1 else "") for i in range(count)}
    return made | {"still": Variable("still", (5,), frozen=True)}


class Numbers:
    """Example i is the number i, twice."""

    spec = DataSpec(64, 3, (1,), 2, "00")

    def examples(self, indices: np.ndarray) -> tuple[Any, Any]:
        return {"x": indices.astype(np.float32)[:, None], "y": indices.astype(np.float16)}, indices % 2

    def held_out(self, start: int, stop: int) -> tuple[Any, Any]:
        return self.examples(np.arange(start, stop))


class Adding:
    """A model on the GPU whose gradient is the variable and the mean of the batch, in one of three FORMS."""

    def __init__(self, cupy: LateCuda, variables: Mapping[str, Variable], *, form: str = "arrays") -> None:
        self.cupy, self.form = cupy, form
        self.variables = variables
        self.nothing: set[str] = set()  # what has no gradient in this step
        self.spoil = 0.0
        self.looks_only = False  # steps have neither loss nor gradients
        self.looked: list[Any] = []  # by such steps
        self.given: list[Any] = []

    def initial_variables(self) -> Mapping[str, Variable]:
        return self.variables

    def loss_and_gradients(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> tuple[Any, Mapping[str, Any]]:
        assert xp is self.cupy
        self.given.append(variables)
        x, spoil, computed = batch.inputs["x"], self.spoil, self.cupy.computed
        self.x = x  # which a step's metrics read after it

        def gradient(name: str) -> np.ndarray:
            return variables[name].values + x.values.mean() + np.float32(spoil)

        if self.looks_only:
            self.looked.append(computed(lambda: variables["v0"].values.flat[0] + x.values.mean()))
            return StepSignal.NO_LOSS, StepSignal.NO_PUSH
        due = [name for name, variable in self.variables.items() if not variable.frozen]
        loss = computed(lambda: x.values.mean(dtype=np.float32))
        if self.form == "arrays":
            gradients = {name: computed(lambda name=name: gradient(name).astype(np.float64)) for name in due}
            return loss, gradients | dict.fromkeys(self.nothing)
        layout = variables.layout
        empty = np.nan if self.form == "views" else 0.0
        run = computed(lambda: np.full(layout.elements, empty, np.float32))
        views = layout.over(run)
        for name in set(due) - (self.nothing if self.form == "run" else set()):
            self.cupy.ask(lambda name=name: np.copyto(views[name].values, gradient(name)))
        if self.form == "run":
            return loss, GradientRun(layout, run, set(due) - self.nothing, due)
        return loss, FlatArrays(layout, run, {name: views[name] for name in due} | dict.fromkeys(self.nothing))

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        mean = self.cupy.value_of(self.cupy.computed(variables["v0"].values.mean))
        return {"mean": float(mean), "x": float(self.cupy.value_of(batch.inputs["x"]).mean())}


class OnGpu:
    """A task on a GPU that is late, or at random."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, at_random: random.Random | None = None, **of_model: Any
    ) -> None:
        self.cupy = LateCuda(at_random=at_random)
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        self.gpu = Gpu(0)
        self.variables = variables_of(*of_size(count).values())
        self.plan = plan_of(self.variables, shards=2, partitioner=fixed_shards(2))
        self.model = Adding(self.cupy, self.variables, **of_model)
        self.steps = StepPlan(64, 4, epochs=2, seed=1)
        self.task = Task(self.model, Numbers(), self.steps, self.plan, self.gpu, None, None)
        self.buffers = PullBuffers(self.plan, self.gpu.host_memory)
        self.shares: dict[int, float] = {}  # of steps, where it is not 1
        self.read: dict[int, Batch] = {}  # ahead of their steps

    def pulled(self, step: int) -> Any:
        """Return a set of weights of a step, as a pull leaves it."""
        weights = self.buffers.take((1, 1))
        for number, array in enumerate(weights.variables.values()):
            array[...] = 100 * step + number
        return weights

    def gradients(
        self, step: int, values: Mapping[str, Any], share: float = 1.0, ahead: int | None = None
    ) -> tuple[float, Any]:
        """Compute a step; of the one that is said to come next the batch is read meanwhile."""
        self.shares.setdefault(step, share)
        batch = self.read.pop(step, None) or self.batch_of(step)

        def meanwhile() -> Batch | None:
            if ahead is None:
                return None
            self.read[ahead] = self.batch_of(ahead)
            return self.read[ahead]

        loss, _, gradients = self.task.gradients(batch, values, meanwhile)
        return loss, gradients

    def batch_of(self, step: int) -> Batch:
        return replace(self.task.batch_of(step), share=self.shares.get(step, 1.0))

    def check(self, step: int, loss: float, gradients: Mapping[str, np.ndarray], share: float = 1.0) -> None:
        mean = np.float32(self.steps.indices(step).astype(np.float32).mean())
        assert loss == mean
        due = {name for name, variable in self.variables.items() if not variable.frozen}
        assert set(gradients) == due - self.model.nothing
        for number, (name, variable) in enumerate(self.variables.items()):
            if name in gradients:
                weight = np.float32(1.0 if variable.state else share)
                plain = np.full(variable.shape, 100 * step + number, np.float32) + mean
                np.testing.assert_array_equal(gradients[name], plain * weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 3, 60])
def test_a_step_copies_each_kind_once_however_many_variables(
    monkeypatch: pytest.MonkeyPatch, count: int, form: str
) -> None:
    on = OnGpu(monkeypatch, count, form=form)
    run_bytes = 4 * FlatLayout.of(on.variables).elements
    for step in range(STEPS):
        before, traffic = Counter(on.cupy.counts), copy(on.gpu.traffic)
        weights = on.pulled(step)
        loss, gradients = on.gradients(step, on.gpu.arrived(weights.variables))
        waited = on.cupy.counts["waits"] - before["waits"]
        on.check(step, loss, wait_for_gradients(gradients))
        on.buffers.give_back(weights)
        del gradients
        found = on.cupy.counts - before
        if step < WARM:
            continue
        assert waited == 1, "for the loss, and whether the gradients are finite"
        assert found["waits"] == 2, "and for the gradients, by who pushes them"
        assert (found["copies in"], found["copies out"]) == (2, 2)
        assert found["bytes out"] == run_bytes + 16
        assert run_bytes < found["bytes in"] < run_bytes + 4 * 256
        assert on.gpu.traffic.in_bytes - traffic.in_bytes == found["bytes in"]
        assert on.gpu.traffic.out_bytes - traffic.out_bytes == run_bytes
        assert on.gpu.traffic.waited_s > traffic.waited_s
        assert found["allocations"] == found["events made"] == 0
        assert found["events"] == 7


def test_the_variables_are_one_of_two_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 3)
    for step in range(STEPS):
        weights = on.pulled(step)
        on.gradients(step, weights.variables)
        on.buffers.give_back(weights)
    assert len({id(variables) for variables in on.model.given}) == 2
    assert len({id(variables.run) for variables in on.model.given}) == 2


def test_what_is_on_the_gpu_already_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 3)
    layout = FlatLayout.of(on.variables)
    there = layout.over(on.cupy.zeros(layout.elements, np.float32))
    assert on.gpu.arrived(there) is there
    assert on.gpu.variables_from_host(there) is there
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    given = on.gpu.variables_from_host(there.with_rows({"users": rows}))
    assert given.run is there.run
    np.testing.assert_array_equal(on.cupy.value_of(given["users"]), rows)


@pytest.mark.parametrize("form", FORMS)
def test_whatever_streams_do_first_steps_in_flight_spoil_nothing(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    for seed in range(by_tier(quick=30, full=250)):
        _in_flight(monkeypatch, seed, form)


def _in_flight(monkeypatch: pytest.MonkeyPatch, seed: int, form: str) -> None:
    draw = random.Random(seed)
    on = OnGpu(monkeypatch, 5, at_random=draw if seed else None, form=form)
    depth, shares = draw.choice([1, 2, 3]), (1.0, 0.25, 1.5)
    on.shares = {step: draw.choice(shares) for step in range(32)}
    waiting: list[tuple[int, Any, Any]] = []  # pulled ahead
    pushing: list[tuple[int, Any, Any, float, float, set[str]]] = []
    looked: list[int] = []
    means: list[tuple[int, Any]] = []
    for step in range(14):
        while len(waiting) < depth:
            number = step + len(waiting)
            weights = on.pulled(number)
            waiting.append((number, weights, on.gpu.arrived(weights.variables)))
        number, weights, values = waiting.pop(0)
        if draw.random() < 0.2:  # it is given back, and pulled anew into the same memory
            del values
            if draw.random() < 0.5:  # or dropped, while it is copied
                on.buffers.give_back(weights)
            del weights
            weights = on.pulled(number)
            values = on.gpu.arrived(weights.variables) if draw.random() < 0.5 else weights.variables
        if draw.random() < 0.2:
            judged = on.pulled(99)
            assert on.task.metrics(judged.variables, nullcontext)["mean"] == 9900.0
            on.buffers.give_back(judged)
        share = on.shares[number]
        on.model.nothing = set(draw.sample(["v0", "v2", "v4"], draw.randrange(3)))
        ahead = draw.choice([None, number + 1, number + 1, number + 2])  # the last is wrong
        loss, gradients = on.gradients(number, values, share, ahead)
        assert isinstance(gradients, PendingGradients)
        means.append((number, on.cupy.computed(on.model.x.values.mean)))
        if draw.random() < 0.3:  # it is computed once more, and nothing is told
            on.model.looks_only, waited_s = True, on.gpu.traffic.waited_s
            assert on.gradients(number, values) == (None, None)
            assert on.gpu.traffic.waited_s > waited_s
            on.model.looks_only = False
            looked.append(number)
        pushing.append((number, gradients, weights, loss, share, on.model.nothing))
        while len(pushing) > depth - draw.randrange(2):
            _settle(on, *pushing.pop(0))
    for left in pushing:
        _settle(on, *left)
    for number, mean in means:
        assert on.cupy.value_of(mean) == on.steps.indices(number).astype(np.float32).mean()
    for number, found in zip(looked, on.model.looked, strict=True):
        assert on.cupy.value_of(found) == 100 * number + on.steps.indices(number).astype(np.float32).mean()


def _settle(
    on: OnGpu, step: int, gradients: PendingGradients, weights: Any, loss: float, share: float, nothing: set[str]
) -> None:
    on.model.nothing = nothing
    on.check(step, loss, gradients.wait(), share)
    on.buffers.give_back(weights)


def test_the_next_batch_crosses_before_the_results_of_a_step_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on, seen = OnGpu(monkeypatch, 3, form="views"), []
    count_wait, found = on.cupy.count_wait, []
    monkeypatch.setattr(on.cupy, "count_wait", lambda: (seen.append(on.cupy.counts["copies in"]), count_wait()))
    for step, ahead in enumerate([1, 2, 9, 4, None]):  # the third is wrong
        before = on.cupy.counts["copies in"]
        seen.clear()
        weights = on.pulled(step)
        loss, gradients = on.gradients(step, weights.variables, ahead=ahead)
        found.append(seen[-1] - before)
        on.check(step, loss, gradients.wait())
        on.buffers.give_back(weights)
    assert found == [4, 2, 2, 3, 1], "weights, a batch of its own, the next one; and at first what each element is"


def test_what_is_wrong_with_the_next_batch_is_not_the_present_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 3, form="views")
    read = on.batch_of
    monkeypatch.setattr(on, "batch_of", lambda step: replace(read(step), inputs=np.float32(3)) if step else read(step))
    loss, gradients = on.gradients(0, on.pulled(0).variables, ahead=1)
    on.check(0, loss, gradients.wait())


def test_an_array_of_objects_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 1)
    before = on.task.batch_of(0)
    with pytest.raises(BadData, match="array of Python objects"):
        on.gpu.batch_from_host(replace(before, inputs={"x": np.array([object()])}))
    np.testing.assert_array_equal(on.cupy.value_of(on.gpu.batch_from_host(before).targets), before.targets)


def test_after_a_copy_without_room_the_next_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 1)
    arrays = ArraysIn(on.cupy, on.gpu.host_memory, Traffic())
    few, many = {"x": np.ones(10)}, {"x": np.arange(10_000.0)}
    for _ in range(2):
        arrays.ready(few)

    def full(*given: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(on.cupy, "empty", full)
        with pytest.raises(MemoryError):
            arrays.ready(many)
    for _ in range(4):
        np.testing.assert_array_equal(on.cupy.value_of(arrays.ready(many)["x"]), many["x"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_named_and_the_next_step_is_not_spoilt(
    monkeypatch: pytest.MonkeyPatch, form: str, bad: float
) -> None:
    on = OnGpu(monkeypatch, 3, form=form)
    for step in range(5):
        on.model.spoil = bad if step == 2 else 0.0
        on.model.nothing = {"v0"} if step == 3 else set()
        values = on.pulled(step).variables
        if step == 2:
            with pytest.raises(NonFiniteGradient, match="the gradient of 'v0' became"):
                on.gradients(step, values, 0.5)
        else:
            loss, gradients = on.gradients(step, values, 0.5)
            on.check(step, loss, wait_for_gradients(gradients), 0.5)


def test_gradients_that_were_waited_for_stay_what_they_are_while_later_steps_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = OnGpu(monkeypatch, 3)
    rows = {"users": on.cupy.computed(np.full((2, 4), 3.0))}
    found = [
        on.gpu.to_host(0.5, {"v0": on.cupy.computed(np.full((1, 3), float(step))), **rows}, on.variables).gradients
        for step in range(4)
    ]
    assert [gradients["v0"].tolist() for gradients in found] == [[[float(step)] * 3] for step in range(4)]


def test_a_weight_that_makes_a_gradient_infinite_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 1)
    on.model.spoil = 3e38
    with pytest.raises(NonFiniteGradient, match="the gradient of 'v0' became infinite"), np.errstate(over="ignore"):
        on.gradients(0, on.pulled(0).variables, 1.5)


def test_gradients_of_rows_come_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 3)
    rows, run_bytes = on.cupy.computed(np.full((2, 4), 3.0)), 4 * FlatLayout.of(on.variables).elements
    variable = on.cupy.computed(np.ones((1, 3)))
    found = on.gpu.to_host(0.5, {"v0": variable, "users": rows}, on.variables, Scaling(0.5))
    assert found.finite is None
    assert isinstance(found.gradients, dict)
    assert {name: gradient.tolist() for name, gradient in found.gradients.items()} == {
        "v0": [[1.0] * 3],
        "users": [[3.0] * 4] * 2,
    }, "neither looked at nor weighed"
    assert on.gpu.traffic.out_bytes == run_bytes + 4 * 2 * 4


def test_a_context_that_is_lost_while_gradients_leave_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    on = OnGpu(monkeypatch, 1)
    gradients = on.gradients(0, on.pulled(0).variables)[1]
    on.cupy.lost = True
    with pytest.raises(NotCopied, match="the GPU failed while gradients were copied to the host: cudaErrorAssert"):
        gradients.wait()


def test_waits_of_a_probe_are_none_of_a_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    on, leasing = OnGpu(monkeypatch, 3), ScriptedLeasing()
    leasing.work.extend(pb.Grant(step=step, probe=step == 0) for step in range(2))
    loop = StepLoop(on.task, Cluster(on.plan).client(memory=on.gpu.host_memory), leasing, depth=0)
    waited_s: list[float] = []
    compute = on.model.loss_and_gradients
    monkeypatch.setattr(
        on.model, "loss_and_gradients", lambda *step: waited_s.append(traffic.waited_s) or compute(*step)
    )
    traffic = on.gpu.traffic
    loop.run(lambda: False)
    assert len(waited_s) == 3, "two steps, and the first again, before the second"
    assert loop.gpu_wait_s == pytest.approx(traffic.waited_s - (waited_s[2] - waited_s[1]))
    assert 0 < loop.gpu_wait_s < traffic.waited_s


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_step_loop_on_a_gpu_does_what_one_on_the_host_does(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    on = OnGpu(monkeypatch, 3, at_random=random.Random(depth))
    cluster = Cluster(on.plan)
    leasing: Any = ScriptedLeasing()
    leasing.work.extend([*(pb.Grant(step=step) for step in range(6)), pb.EvaluationGrant(incarnations=(1, 1))])
    loop = StepLoop(on.task, cluster.client(memory=on.gpu.host_memory), leasing, depth=depth)
    loop.run(lambda: False)
    assert [done.step for done in leasing.completions] == list(range(6))
    assert not leasing.failures
    means = [np.float32(on.steps.indices(step).astype(np.float32).mean()) for step in range(6)]
    assert [done.loss for done in leasing.completions] == means
    assert 0 < leasing.phases()["gpu_wait"] == on.gpu.traffic.waited_s < leasing.phases()["compute"]
    *_, waited, copied = shown_families(worker_families(loop, "worker-7"))
    assert [sample.value for sample in waited.samples if sample.name.endswith("_total")] == [on.gpu.traffic.waited_s]
    shown = {sample.labels["way"]: sample.value for sample in copied.samples if sample.name.endswith("_total")}
    assert shown == {"in": on.gpu.traffic.in_bytes, "out": on.gpu.traffic.out_bytes}
    assert copied.name == "parashard_worker_gpu_copied_bytes"
    on.cupy.lost = True
    leasing.work.append(pb.Grant(step=6))
    again = StepLoop(on.task, cluster.client(memory=on.gpu.host_memory), leasing, depth=depth)
    again.run(lambda: False)
    assert "cudaErrorAssert" in leasing.failures[6]
