"""PyTorch models: the gradients of PyTorch alone, in whatever types its parameters have, or a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError, WrongModel
from parashard.models.declaration import parts_of
from parashard.models.framework import (
    step_seed,
)
from parashard_server.state.storage import move
from support.model_cases import check_metrics_of_batches, first_output

torch = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
functional = torch.nn.functional

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


def batch(step: int = 0) -> Batch:
    return Batch(step, 0, np.arange(8), X, Y)


def net() -> Any:
    layers = torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(5, 3)
    return torch.nn.Sequential(*layers)


def model(module: Any = net, loss: Any = functional.cross_entropy, **arguments: Any) -> Any:
    found = ps.torch.Model(module, loss, **arguments)
    found.seed(3)
    return found


def declared(ours: Any) -> dict[str, Any]:
    return {name: parts_of(name, initial) for name, initial in ours.initial_variables().items()}


def values_of(ours: Any) -> dict[str, Any]:
    return {name: values for name, (_, values) in declared(ours).items()}


def locked(values: dict[str, Any]) -> dict[str, Any]:
    for value in values.values():
        value.flags.writeable = False
    return values


def test_gradients_are_those_of_pytorch_alone() -> None:
    ours = model()
    values = ours.initial_variables()
    loss, gradients = ours.loss_and_gradients(values, batch(5), np)
    torch.manual_seed(3)
    alone = net()
    assert {name: p.detach().numpy().tolist() for name, p in alone.named_parameters()} == {
        name: value.tolist() for name, value in values.items()
    }
    torch.manual_seed(step_seed("torch", 3, 5))
    due = functional.cross_entropy(alone(torch.from_numpy(X)), torch.from_numpy(Y))
    due.backward()
    assert loss == due.item()
    for name, parameter in alone.named_parameters():
        assert gradients[name].tobytes() == parameter.grad.numpy().tobytes(), name


def test_a_step_computed_again_has_the_same_gradient_and_another_step_has_another() -> None:
    ours = model()
    values = ours.initial_variables()
    first, _, again = (ours.loss_and_gradients(values, batch(step), np)[1] for step in (1, 2, 1))
    other = ours.loss_and_gradients(values, batch(2), np)[1]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


def test_a_step_trains_every_layer_whatever_an_evaluation_or_the_user_has_left() -> None:
    ours = model()
    values = ours.initial_variables()
    first = ours.loss_and_gradients(values, batch(), np)[1]
    ours.evaluate(values, batch(), np)
    after_evaluation = ours.loss_and_gradients(values, batch(), np)[1]
    dropout = next(layer for layer in ours._ready() if isinstance(layer, torch.nn.Dropout))
    dropout.eval()
    after_user = ours.loss_and_gradients(values, batch(), np)[1]
    assert all(np.array_equal(first[name], after_evaluation[name]) for name in first)
    assert all(np.array_equal(first[name], after_user[name]) for name in first)


def test_pulled_arrays_are_neither_written_nor_needed_writable() -> None:
    ours = model()
    values = locked({name: value.copy() for name, value in ours.initial_variables().items()})
    before = {name: value.copy() for name, value in values.items()}
    ours.loss_and_gradients(values, batch(), np)
    ours.evaluate(values, batch(), np)
    ours.to_user_object(values)
    assert all(np.array_equal(before[name], values[name]) for name in values)


def test_a_factory_is_called_under_the_seed_and_an_instance_keeps_its_weights() -> None:
    first, same = model(), model()
    assert first.initial_variables()["0.weight"].tobytes() == same.initial_variables()["0.weight"].tobytes()
    instance = net()
    assert model(instance).initial_variables()["0.weight"].tolist() == instance[0].weight.tolist()


class Odd(torch.nn.Module):
    """Tied, frozen, scalar, unused and half-precision parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.rough = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.fixed = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.register_buffer("counter", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        return self.tied(self.first(x)) * self.scale * self.rough.float() * self.fixed + self.shift


def test_parameters_of_every_kind_are_variables() -> None:
    ours = model(Odd)
    values = values_of(ours)
    assert {name: value.shape for name, value in values.items()} == {
        "first.weight": (4, 4),
        "first.bias": (4,),
        "tied.bias": (4,),
        "scale": (1,),
        "rough": (4,),
        "unused": (2,),
        "fixed": (4,),
        "shift": (4,),
    }
    assert {value.dtype for value in values.values()} == {np.dtype(np.float32)}
    frozen = {n for n, (variable, _) in declared(ours).items() if variable.frozen}
    assert frozen == {"fixed", "shift"}
    _, gradients = ours.loss_and_gradients(values, batch(), np)
    assert gradients["unused"] is None
    assert sorted(gradients) == ["first.bias", "first.weight", "rough", "scale", "tied.bias", "unused"]
    assert all(gradients[name].shape == values[name].shape for name in gradients if gradients[name] is not None)
    owned = ours.to_user_object({**values, "scale": np.full(1, 7, np.float32)})
    assert (owned.scale.item(), owned.rough.dtype, owned.tied.weight is owned.first.weight) == (7, torch.bfloat16, True)


def test_metrics_are_means_over_the_batch() -> None:
    def largest(outputs: Any, targets: Any) -> Any:
        return outputs.max()

    ours = model(metrics=["accuracy", largest])
    values = ours.initial_variables()
    metrics = ours.evaluate(values, batch(), np)
    outputs = ours.predict(values, X)
    assert sorted(metrics) == ["accuracy", "largest", "loss"]
    assert float(metrics["accuracy"]) == np.mean(outputs.argmax(1) == Y)
    assert float(metrics["largest"]) == outputs.max()


class Normed(torch.nn.Sequential):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3, momentum=momentum))


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("drift", torch.ones(2))

    def forward(self, x: Any) -> Any:
        self.calls += len(x)
        self.drift = self.drift * 0.5 + 2.0
        return self.layer(x)


class Writing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.weight.clamp_(0.0, 0.5)
        return x @ self.weight


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))


def lazy() -> Any:
    return torch.nn.Sequential(torch.nn.LazyLinear(3))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "writes a parameter": (lambda: model(Writing), "parameter 'weight' is written in place while a step is computed"),
    "writes a buffer": (lambda: model(Counting), "'calls', 'drift': written while a step is computed"),
    "reassigns a float buffer": (
        lambda: model(Counting, state={"calls": "counter"}),
        "'drift': written while a step is computed",
    ),
    "no such buffer": (
        lambda: model(Counting, state={"call": "counter"}),
        "state: 'call' is none of the buffers: calls",
    ),
    "a counter of floats": (
        lambda: model(Counting, state={"drift": "counter"}),
        "state: 'drift' of float32 is 'counter'; allowed: counter for whole numbers",
    ),
    "an average of whole numbers": (lambda: model(Counting, state={"calls": "average:0.1"}), "state: 'calls' of int32"),
    "an unknown kind": (
        lambda: model(Counting, state={"calls": "count"}),
        "state: 'calls' is 'count'; allowed: average:M",
    ),
    "an average of all batches": (
        lambda: model(lambda: Normed(momentum=None)),
        "1.momentum is None: an average over all batches",
    ),
    "a lazy layer": (lambda: model(lazy), "'0.weight' of a lazy layer has no shape yet: call the module once"),
    "an unknown precision": (lambda: model(autocast="int8"), "autocast is bfloat16 or float16, found 'int8'"),
    "a complex parameter": (
        lambda: model(Complex),
        "parameter 'weight' is torch.complex64; allowed: real",
    ),
    "a loss of several numbers": (
        lambda: model(loss=lambda outputs, targets: outputs),
        "the loss must be a tensor of one number, the mean over a batch; found a tensor of shape (8, 3)",
    ),
    "a loss that is a float": (lambda: model(loss=lambda outputs, targets: 0.5), "found float"),
    "no module": (lambda: model(lambda: 3), "module() returned int; due is a torch.nn.Module"),
    "not callable": (lambda: model(3), "module is a torch.nn.Module, its class or a factory, found int"),
    "nothing to train": (lambda: model(torch.nn.ReLU), "ReLU has no parameter that needs a gradient"),
    "a class of losses": (
        lambda: model(loss=torch.nn.MSELoss),
        "such as torch.nn.CrossEntropyLoss(), found the class MSE",
    ),
    "one metric": (
        lambda: model(metrics="accuracy"),
        "metrics is a list of names and functions, such as ['accuracy'], ",
    ),
    "an unknown metric": (lambda: model(metrics=["acc"]), "metric 'acc' is unknown; allowed: accuracy, "),
}


def computed_by(make: Callable[[], Any]) -> None:
    made = make()
    made.loss_and_gradients(values_of(made), batch(), np)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        computed_by(make)
    assert says in str(refused.value)


def test_a_second_trainer_begins_with_the_first_values_and_the_users_own_is_a_copy() -> None:
    ours = model()
    first = ours.initial_variables()
    owned = ours.to_user_object({name: value + 1 for name, value in first.items()})
    assert all(np.array_equal(first[name], value) for name, value in ours.initial_variables().items())
    assert ours.to_user_object(first) is not owned
    ours.seed(4)
    assert not np.array_equal(first["0.weight"], ours.initial_variables()["0.weight"])


def test_making_a_module_leaves_the_user_s_generator_alone() -> None:
    torch.manual_seed(1)
    due = torch.rand(3).tolist()
    torch.manual_seed(1)
    model()
    assert torch.rand(3).tolist() == due


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_have_the_type_of_the_module(dtype: Any) -> None:
    ours = model(lambda: net().to(dtype))
    values = ours.initial_variables()
    loss, gradients = ours.loss_and_gradients(values, batch(), np)
    assert np.isfinite(loss)
    assert gradients["0.weight"].dtype == np.float32
    assert ours.predict(values, X).dtype == (np.float64 if dtype == torch.float64 else np.float32)


def test_buffers_that_are_no_variables_are_told_apart() -> None:
    class Permuted(torch.nn.Module):
        def __init__(self, order: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("order", order)

    one, same, other = (model(Permuted(torch.tensor(order))) for order in ([0, 1], [0, 1], [1, 0]))
    assert one.config_sha256() == same.config_sha256() != other.config_sha256()


def moved(ours: Any, values: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    """Return the state after one push, as a shard moves it."""
    after = {name: value.copy() for name, value in values.items()}
    for name, (variable, _) in declared(ours).items():
        if variable.state:
            move(after[name].reshape(-1), gradients[name].reshape(-1), variable.state, 1)
    return after


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.01])
def test_running_statistics_move_as_in_pytorch_alone(momentum: float) -> None:
    ours = model(lambda: Normed(momentum))
    values = values_of(ours)
    torch.manual_seed(3)
    alone = Normed(momentum)
    for step in range(3):
        values = moved(ours, values, dict(ours.loss_and_gradients(values, batch(step), np)[1]))
        alone(torch.from_numpy(X))
    owned = ours.to_user_object(values)
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(getattr(owned[1], name), getattr(alone[1], name), rtol=1e-5)
    assert owned[1].num_batches_tracked.item() == alone[1].num_batches_tracked.item() == 3
    assert ours.predict(values, X) == pytest.approx(alone.eval()(torch.from_numpy(X)).detach().numpy(), rel=1e-4)


def test_layers_with_nothing_to_average_are_frozen() -> None:
    kinds = {n: v.state or v.frozen for n, (v, _) in declared(model(lambda: Normed(0.0))).items() if "running" in n}
    assert kinds == {"1.running_mean": True, "1.running_var": True}


def test_a_module_says_how_its_own_buffers_change() -> None:
    ours = model(Counting, state={"calls": "counter", "drift": "sum"})
    values = values_of(ours)
    for step in range(2):
        values = moved(ours, values, dict(ours.loss_and_gradients(values, batch(step), np)[1]))
    owned = ours.to_user_object(values)
    assert (owned.calls.item(), owned.calls.dtype, owned.drift.tolist()) == (16, torch.int32, [3.25, 3.25])
    averaged = model(Counting, state={"calls": "counter", "drift": "average:0.5"})
    pushed = averaged.loss_and_gradients(values_of(averaged), batch(), np)[1]["drift"]
    assert pushed.tolist() == [4, 4], "the drift is an average of fours, with a factor of one half"


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_autocast_computes_as_pytorch_s(autocast: str) -> None:
    ours = model(autocast=autocast)
    values = ours.initial_variables()
    loss, gradients = ours.loss_and_gradients(values, batch(5), np)
    torch.manual_seed(3)
    alone = net()
    torch.manual_seed(step_seed("torch", 3, 5))
    with torch.autocast("cpu", getattr(torch, autocast)):
        due = functional.cross_entropy(alone(torch.from_numpy(X)), torch.from_numpy(Y))
    scale = 2.0**15 if autocast == "float16" else 1.0
    (due * scale).backward()
    assert loss == due.item()
    assert loss != model().loss_and_gradients(values, batch(5), np)[0]
    for name, parameter in alone.named_parameters():
        assert gradients[name].tobytes() == (parameter.grad / scale).numpy().tobytes(), name
    metrics = ours.evaluate(values, batch(), np)
    outputs = torch.from_numpy(ours.predict(values, X))
    assert float(metrics["loss"]) == pytest.approx(
        functional.cross_entropy(outputs, torch.from_numpy(Y)).item(), rel=1e-3
    )


class Steep(torch.nn.Module):
    """Its gradient of float16 is `slope` for each example."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
        self.slope = slope
        self.scales: list[float] = []

    def forward(self, x: Any) -> Any:
        outputs = self.weight * self.slope
        outputs.register_hook(lambda gradient: self.scales.append(gradient.item()))
        return outputs


def total(outputs: Any, targets: Any) -> Any:
    return outputs.sum()


@pytest.mark.parametrize(("slope", "last"), [(0.5, 2.0**15), (1e-6, 2.0**15), (1000.0, 2.0**6)])
def test_a_loss_of_float16_is_scaled_and_again_by_half_where_it_overflows(slope: float, last: float) -> None:
    module = Steep(slope)
    ours = model(module, total)
    values = ours.initial_variables()
    for _ in range(2):  # each step begins with the same scale, so that it has the same bits wherever it is computed
        module.scales.clear()
        _, gradients = ours.loss_and_gradients(values, batch(), np)
        assert module.scales == [2.0**power for power in range(15, int(np.log2(last)) - 1, -1)]
        assert gradients["weight"] == pytest.approx(slope, rel=1e-3)


def test_a_gradient_that_no_scale_makes_finite_is_told() -> None:
    ours = model(Steep(float("inf")), total)
    _, gradients = ours.loss_and_gradients(ours.initial_variables(), batch(), np)
    assert not np.isfinite(gradients["weight"]).any()


def test_a_compiled_module_has_the_names_of_the_original() -> None:
    def compiled() -> Any:
        return torch.compile(net(), backend="eager")

    def partly() -> Any:
        return torch.nn.Sequential(torch.compile(net(), backend="eager"))

    plain = model()
    values = plain.initial_variables()
    ours, nested = model(compiled), model(partly)
    assert list(ours.initial_variables()) == list(values)
    assert list(nested.initial_variables()) == [f"0.{name}" for name in values]
    _, due = plain.loss_and_gradients(values, batch(5), np)
    _, gradients = ours.loss_and_gradients(values, batch(5), np)
    assert all(gradients[name].tobytes() == due[name].tobytes() for name in due)
    assert np.array_equal(ours.predict(values, X), plain.predict(values, X))
    owned = ours.to_user_object({name: value + 1 for name, value in values.items()})
    assert torch.equal(dict(owned.named_parameters())["_orig_mod.0.weight"], torch.from_numpy(values["0.weight"] + 1))


def test_metrics_of_batches_are_those_of_all_examples() -> None:
    ours = model(metrics=["accuracy", ps.metrics.TopK(2), first_output])
    check_metrics_of_batches(ours, values_of(ours), X, Y)
