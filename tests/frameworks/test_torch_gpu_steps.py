"""A PyTorch step on a GPU, seen without one: the host's bits, no wait, as many operations for any number of layers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.models.declaration import parts_of
from parashard.models.framework import in_one_run, moved_by, pushed_floats
from parashard.plan.flat import GradientRun
from support.hosted_xp import HostedXp, flat_of, there

torch = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from parashard.models.torch import steps as torch_steps  # noqa: E402

functional = torch.nn.functional

X = np.random.default_rng(0).normal(size=(8, 3, 4, 4)).astype(np.float32)
Y = np.arange(8) % 3


def batch(step: int = 0, inputs: Any = X) -> Batch:
    return Batch(step, 0, np.arange(8), inputs, Y)


def model(module: Any, loss: Any = functional.cross_entropy, **arguments: Any) -> Any:
    found = ps.torch.Model(module, loss, **arguments)
    found.seed(3)
    return found


def values_of(ours: Any) -> dict[str, np.ndarray]:
    return {name: parts_of(name, initial)[1] for name, initial in ours.initial_variables().items()}


def convolutional(depth: int = 2) -> Any:
    layers = [[torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.BatchNorm2d(3, momentum=0.3)] for _ in range(depth)]
    return torch.nn.Sequential(
        *itertools.chain(*layers), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Flatten(), torch.nn.Linear(48, 3)
    )


class Odd(torch.nn.Module):
    """Tied, frozen, scalar, unused and half-precision parameters, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 48)
        self.tied = torch.nn.Linear(48, 48, bias=False)
        self.tied.weight = self.first.weight
        self.last = torch.nn.Linear(48, 3, dtype=torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.fixed = torch.nn.Parameter(torch.ones(48), requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(48)
        self.register_buffer("calls", torch.tensor([2**40, 7, -3]))
        self.register_buffer("small", torch.tensor(5, dtype=torch.int32))
        self.register_buffer("ema", torch.zeros(48, dtype=torch.float16))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("order", torch.arange(48).flip(0))

    def forward(self, inputs: Any) -> Any:
        self.calls += torch.tensor([1, 300, -1])
        self.small = self.small + 2
        found = self.norm(self.tied(self.first(inputs.flatten(1))) * self.fixed)[:, self.order] * self.scale
        self.ema.lerp_(found.detach().mean(0).half(), 0.25)
        self.seen.add_(found.detach().abs().sum().double())
        return self.last(found.bfloat16()).float()


def half() -> Any:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3).half())


def channels_last() -> Any:
    return convolutional().to(memory_format=torch.channels_last)


def compiled() -> Any:
    return torch.compile(convolutional(), backend="eager")


ODD_STATE = {"calls": "counter", "small": "counter", "ema": "average:0.25", "seen": "sum"}
STEPS: dict[str, Callable[[], Any]] = {
    "batch normalisation": lambda: model(convolutional),
    "one counter": lambda: model(lambda: convolutional(1)),  # PyTorch flattens one tensor without a copy
    "parameters and buffers of every kind": lambda: model(Odd, state=ODD_STATE),
    "bfloat16": lambda: model(convolutional, autocast="bfloat16"),
    "float16, scaled": lambda: model(half),
    "float16, scaled until it is finite": lambda: model(half, lambda outputs, y: 9 * outputs.float().mean() ** 2),
    "channels last": lambda: model(channels_last),
    "compiled": lambda: model(compiled),
    "a sum": lambda: model(convolutional, torch.nn.CrossEntropyLoss(reduction="sum")),
}


def check_alike(due: Mapping[str, Any], found: Any) -> None:
    assert isinstance(found, GradientRun)
    assert found.keys() == due.keys()
    rest = np.array(found.run)
    for name, gradient in due.items():
        place, shape = found.layout.places[name]
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            assert found[name].shape == shape == gradient.shape, name
            assert found[name].tobytes() == gradient.tobytes(), name
            assert np.shares_memory(found[name], found.run), name
            rest[place] = 0
    assert not rest.any()


@pytest.mark.parametrize("case", STEPS)
def test_a_step_has_the_host_s_bits_in_one_run(case: str) -> None:
    host, device, xp = STEPS[case](), STEPS[case](), HostedXp()
    values = values_of(host)
    flat = flat_of(values)
    for step in range(3):
        due_loss, due = host.loss_and_gradients(values, batch(step), np)
        loss, found = device.loss_and_gradients(flat, there(batch(step)), xp)
        assert (loss.shape, float(loss)) == ((), due_loss)
        check_alike(due, found)
        assert host.step_metrics().keys() == device.step_metrics().keys()
        assert xp.calls["from_dlpack"] == 2 + 2 * xp.calls["isfinite"] - 2 * (xp.calls["isfinite"] > 0)
        xp.calls.clear()
        for name in values:
            values[name] = values[name] * np.float32(1 if values[name].shape[-1] == 8 else 0.875)  # counters are bytes
            flat[name][...] = values[name]


def test_variables_that_lie_apart_are_put_in_a_run() -> None:
    host, device = model(convolutional), model(convolutional)
    values = values_of(host)
    for step in range(2):
        _, due = host.loss_and_gradients(values, batch(step), np)
        check_alike(due, device.loss_and_gradients(dict(values), batch(step), HostedXp())[1])


def test_a_hook_of_a_parameter_is_called_once_a_step_whatever_is_kept_of_a_run() -> None:
    called: list[str] = []
    module = convolutional()
    module[0].weight.register_hook(lambda gradient: called.append("hook"))
    ours = model(module)
    flat = flat_of(values_of(ours))
    for step in range(3):
        ours.loss_and_gradients(flat, batch(step), HostedXp())
        assert len(called) == step + 1


def test_evaluations_use_the_same_runs() -> None:
    ours = model(convolutional, metrics=["accuracy"])
    values = values_of(ours)
    flat, xp = flat_of(values), HostedXp()
    due = ours.evaluate(values, batch(), np)
    ours.loss_and_gradients(flat, batch(), xp)
    found = ours.evaluate(flat, batch(), xp)
    assert {name: float(value) for name, value in found.items()} == {n: float(value) for n, value in due.items()}


class Counting(TorchDispatchMode):
    """Operations that PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


NAMES = {"detach", "lift_fresh", "split", "unbind", "view"}
"""Operations that give memory another name: no kernel, copy or allocation."""


def own_operations(depth: int, **arguments: Any) -> Counter[str]:
    """Count the operations of a step at `depth` layers, less those of its forward and backward pass."""
    ours, module = model(lambda: convolutional(depth), **arguments), convolutional(depth)
    flat = flat_of(values_of(ours))
    for step in range(2):
        ours.loss_and_gradients(flat, there(batch(step)), HostedXp())
    with Counting() as counting:
        ours.loss_and_gradients(flat, there(batch(2)), HostedXp())
    inputs, targets = (torch.from_numpy(array) for array in (batch(2).inputs, batch(2).targets))
    with Counting() as plain:
        loss = torch.nn.functional.cross_entropy(module(inputs), targets)
        torch.autograd.grad(loss, list(module.parameters()))
    return counting.asked - plain.asked


def test_a_step_asks_for_as_much_whatever_the_number_of_layers_and_for_no_number() -> None:
    few, many = own_operations(2), own_operations(20)
    due = {
        "_foreach_copy_": 2,  # averages and counters
        "cat": 5,  # gradients; averages and counters, before and after
        "index_select": 1,  # counters, which become whole numbers by the next three
        "_to_copy": 2,
        "mul": 1,
        "sum": 1,
        "sub": 2,  # the change of averages and of counters
        "div": 1,
        "add": 1,
        "index_copy_": 2,  # averages and counters, written into the run
        **dict.fromkeys(("eq", "any", "_local_scalar_dense"), 1),  # is a target ignored? Asked of those on the host
    }
    for found in few, many:
        assert {name: n for name, n in found.items() if name not in NAMES} == due
    assert sum((many - few).values()) <= 18 * 17, "new names of seven variables in each layer, of most more than one"


def test_a_step_after_the_first_needs_no_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyTorch's `meta` device there are none, and whatever looks at one is an error."""

    given = batch(1)

    def on_meta(array: Any) -> Any:
        return torch.from_numpy(np.asarray(array)).to("cpu" if array is given.targets else "meta")

    ours, xp = model(Flexible), HostedXp()
    values = values_of(ours)
    ours.loss_and_gradients(values, batch(), np)
    monkeypatch.setattr(torch_steps, "tensor_of", on_meta)
    monkeypatch.setattr("parashard.torch.tensor_of", on_meta)
    monkeypatch.setattr(HostedXp, "from_dlpack", lambda self, tensor: np.zeros(tuple(tensor.shape), np.float32))
    loss, found = ours.loss_and_gradients(flat_of(values), there(given), xp)
    assert loss.shape == ()
    assert found["0.weight"].shape == (3, 3, 3, 3)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        float(torch.zeros((), device="meta"))


def Flexible() -> Any:
    module = convolutional()
    module[0].bias.requires_grad = False
    return module


def test_a_frozen_parameter_that_is_written_later_is_refused() -> None:
    class Writing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.steps = torch.nn.Linear(48, 3), 0
            self.register_buffer("kept", torch.zeros(2))

        def forward(self, inputs: Any) -> Any:
            self._step = getattr(self, "_step", 0) + 1
            if self._step == 3:
                self.kept += 1
            return self.layer(inputs.flatten(1)) + self.kept.sum()

    ours = model(Writing)
    flat = flat_of(values_of(ours))
    for step in range(2):
        ours.loss_and_gradients(flat, batch(step), HostedXp())
    with pytest.raises(ps.errors.WrongModel, match="'kept': written while a step is computed"):
        ours.loss_and_gradients(flat, batch(2), HostedXp())
    assert not flat["kept"].any()


@pytest.mark.parametrize("same", [(0, 0), (7, 7), (0, 1), (0, 2), (2, 1)])
def test_streams_that_wait_for_each_other_are_taken(same: tuple[int, int]) -> None:
    torch_steps.check_streams(*same)


@pytest.mark.parametrize("apart", [(7, 0), (0, 7), (7, 8), (2, 7)])
def test_streams_that_nothing_orders_are_refused(apart: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"train outside of torch.cuda.stream\(...\) and cupy"):
        torch_steps.check_streams(*apart)


# --- on a GPU ---


def on_gpu(one: Batch, cupy: Any) -> Batch:
    return replace(one, inputs=cupy.asarray(one.inputs), targets=cupy.asarray(one.targets), on_host=one)


@pytest.mark.gpu
def test_on_a_gpu_a_step_has_the_gradients_of_the_host_and_waits_for_nothing(
    xp_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def without_dropout() -> Any:
        return torch.nn.Sequential(*(layer for layer in convolutional() if not isinstance(layer, torch.nn.Dropout)))

    host, device = model(without_dropout), model(without_dropout)
    values = values_of(host)
    flat = in_one_run({name: xp_gpu.asarray(value) for name, value in values.items()}, values, xp_gpu)
    for step in range(4):
        due_loss, due = host.loss_and_gradients(values, batch(step), np)
        given = on_gpu(batch(step), xp_gpu)
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            loss, found = device.loss_and_gradients(flat, given, xp_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for name in values:
            flat[name] *= xp_gpu.float32(1 if values[name].shape[-1] == 8 else 0.875)  # while the step is computed
            values[name] = values[name] * np.float32(1 if values[name].shape[-1] == 8 else 0.875)
        np.testing.assert_allclose(float(loss), due_loss, rtol=1e-4)
        assert isinstance(found.run, xp_gpu.ndarray)
        for name, gradient in due.items():
            if name.endswith("num_batches_tracked"):
                assert found[name].get().tobytes() == gradient.tobytes()
            np.testing.assert_allclose(found[name].get(), gradient, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.gpu
def test_on_a_gpu_state_has_the_bits_of_the_host_s_formula(xp_gpu: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    draw = np.random.default_rng(1)
    before, after = (draw.normal(size=4096).astype(np.float32) for _ in range(2))
    factors = np.repeat(np.array([0.1, 0.3], np.float32), 1500)
    due = pushed_floats(before, after, factors)
    of_cupy = pushed_floats(*(xp_gpu.asarray(array) for array in (before, after, factors)))
    of_torch = pushed_floats(*(torch.from_numpy(array).cuda() for array in (before, after, factors)))
    assert of_cupy.get().tobytes() == due.tobytes()
    assert of_torch.cpu().numpy().tobytes() == due.tobytes()
    assert moved_by("average:0.1", xp_gpu.asarray(before), xp_gpu.asarray(after)).get().tobytes() == (
        moved_by("average:0.1", before, after).tobytes()
    )


@pytest.mark.gpu
def test_on_a_gpu_another_stream_than_that_of_the_weights_is_refused(xp_gpu: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    device = model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)))
    values = values_of(device)
    flat = in_one_run({name: xp_gpu.asarray(value) for name, value in values.items()}, values, xp_gpu)
    given = on_gpu(batch(), xp_gpu)
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(ConfigurationError, match="current CUDA stream"):
        device.loss_and_gradients(flat, given, xp_gpu)
    assert np.isfinite(float(device.loss_and_gradients(flat, given, xp_gpu)[0]))
