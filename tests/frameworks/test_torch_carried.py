"""What PyTorch lets a user do to a module: each row of docs/carried.md trains as in PyTorch alone, or is refused."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import Batch
from parashard.errors import ConfigurationError, WrongModel
from support.script_run import ScriptRun

torch: Any = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
nn, utils = torch.nn, torch.nn.utils
parametrizations = torch.nn.utils.parametrizations
prune: Any = pytest.importorskip("torch.nn.utils.prune")
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


def net() -> Any:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def model(module: Any, **others: Any) -> Any:
    return ps.torch.Model(module, nn.functional.cross_entropy, **others)


def batch(step: int = 0) -> Batch:
    return Batch(step, 0, np.arange(8), X, Y)


def values_of(ours: Any) -> dict[str, Any]:
    return {name: value[1] if isinstance(value, tuple) else value for name, value in ours.initial_variables().items()}


def step(ours: Any) -> dict[str, Any]:
    found: dict[str, Any] = ours.loss_and_gradients(values_of(ours), batch(), np)[1]
    return found


def changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return what makes the module, changed in place or to what is returned."""

    def make() -> Any:
        made = net()
        returned = change(made)
        return returned if isinstance(returned, nn.Module) else made

    return make


def scaled(module: Any, given: Any) -> Any:
    return (2 * given[0],)


def tripled(module: Any, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if gradient is None else 3 * gradient for gradient in of_inputs)


class Square(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return 3 * context.saved_tensors[0] * gradient  # a gradient of the user's own


class Around(nn.Module):  # type: ignore[misc]
    """Computes a module in a way of its own."""

    def __init__(self, within: Any, how: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.within, self.how = within, how

    def forward(self, x: Any) -> Any:
        return self.how(self.within, x)


def around(how: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    return changed(lambda module: Around(module, how))


def partly_without_gradient(module: Any, x: Any) -> Any:
    with torch.no_grad():
        first = module[0](x)
    return module[2](module[1](first))


def with_penalty(module: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    outputs = module(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs + slope.norm()


def with_hook(module: Any, x: Any) -> Any:
    outputs = module(x)
    outputs.register_hook(lambda gradient: 2 * gradient)
    return outputs


def in_bfloat16(module: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x).float()


def transposed(module: Any) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach().t().contiguous().t())


def tied(module: Any) -> Any:
    return nn.Sequential(module[0], nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), module[0], nn.Linear(6, 3))


CARRIED: dict[str, Callable[[], Any]] = {
    "forward hook": changed(lambda m: m[0].register_forward_hook(lambda module, given, found: found * 2) and None),
    "forward pre-hook": changed(lambda m: m[0].register_forward_pre_hook(scaled) and None),
    "full backward hook": changed(
        lambda m: m[2].register_full_backward_hook(lambda module, of_inputs, of_outputs: (3 * of_inputs[0],)) and None
    ),
    "full backward pre-hook": changed(
        lambda m: m[0].register_full_backward_pre_hook(lambda module, of_outputs: (3 * of_outputs[0],)) and None
    ),
    "hook of a parameter": changed(lambda m: m[0].weight.register_hook(lambda gradient: gradient * 3) and None),
    "hook of a tensor": around(with_hook),
    "backward hook, the old one": changed(lambda m: m[2].register_backward_hook(tripled) and None),
    "torch.jit.script": changed(torch.jit.script),
    "torch.jit.trace": changed(lambda m: torch.jit.trace(m, torch.from_numpy(X))),
    "torch.fx": changed(torch.fx.symbolic_trace),
    "weight_norm": changed(lambda m: parametrizations.weight_norm(m[0]) and None),
    "weight_norm, the old one": changed(lambda m: utils.weight_norm(m[0]) and None),
    "orthogonal": changed(lambda m: parametrizations.orthogonal(m[0]) and None),
    "parametrization": changed(
        lambda m: utils.parametrize.register_parametrization(m[0], "weight", nn.Tanh()) and None
    ),
    "prune": changed(lambda m: prune.l1_unstructured(m[0], "weight", amount=0.5) and None),
    "tied parameters": changed(tied),
    "parameter that is not contiguous": changed(transposed),
    "sparse gradient": changed(
        lambda m: Around(nn.Embedding(3, 3, sparse=True), lambda within, x: within((x[:, 0] > 0).long()))
    ),
    "autocast in forward": around(in_bfloat16),
    "no_grad in forward": around(partly_without_gradient),
    "custom autograd function": around(lambda m, x: Square.apply(m(x))),
    "double backward": around(with_penalty),
    "checkpointing": around(lambda m, x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)),
    "torch.func": around(lambda m, x: torch.func.vmap(m)(x)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_has_the_gradients_of_pytorch(name: str) -> None:
    make = CARRIED[name]
    ours, alone = model(make()), make()
    gradients = step(ours)
    nn.functional.cross_entropy(alone(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
    for parameter, own in alone.named_parameters():
        due = np.zeros(own.shape) if own.grad is None else own.grad.to_dense().numpy()
        found = gradients[parameter]
        np.testing.assert_allclose(np.zeros(own.shape) if found is None else found, due, rtol=1e-4, atol=1e-6)
    thread = step(ours.for_thread())
    for parameter, found in gradients.items():
        if found is not None:
            np.testing.assert_allclose(thread[parameter], found, rtol=1e-5, atol=1e-7)
    given_back = ours.to_user_object(values_of(ours))
    np.testing.assert_allclose(given_back(torch.from_numpy(X)).detach(), make().eval()(torch.from_numpy(X)).detach())


def to_meta(module: Any) -> None:
    module.to("meta")


def with_sparse(module: Any) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach().to_sparse())


def with_generator(module: Any) -> None:
    module.draws = torch.Generator().manual_seed(3)


def writes_data(module: Any, x: Any) -> Any:
    module[0].weight.data.clamp_(-0.1, 0.1)
    return module(x)


def freezes(module: Any, x: Any) -> Any:
    module[0].weight.requires_grad_(False)
    return module(x)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "post-accumulate-grad hook": (
        changed(lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda parameter: None) and None),
        "parameter '0.weight' has a hook of register_post_accumulate_grad_hook",
    ),
    "spectral_norm": (
        changed(lambda m: parametrizations.spectral_norm(m[0]) and None),
        "'0.parametrizations.weight.0._u', '0.parametrizations.weight.0._v': written while a step is computed",
    ),
    "buffers that forward writes": (
        changed(lambda m: m.register_buffer("a", torch.zeros(1)) or Around(m, lambda w, x: (w.a.add_(1), w(x))[1])),
        "'within.a': written while a step is computed, and without a gradient to push; say how: state={'within.a':",
    ),
    "lazy parameter": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        "'0.weight' of a lazy layer has no shape yet: call the module once",
    ),
    "complex parameter": (
        changed(lambda m: m.register_parameter("c", nn.Parameter(torch.ones(1, dtype=torch.complex64)))),
        "parameter 'c' is torch.complex64; allowed: real floating point",
    ),
    "sparse parameter": (changed(with_sparse), "parameter '0.weight' is torch.sparse_coo; allowed: dense"),
    "meta device": (changed(to_meta), "'0.weight' is on the meta device and has no values"),
    "DataParallel": (changed(nn.DataParallel), "DataParallel computes a module in several places"),
    "generator": (changed(with_generator), "draws is a generator of the module's own"),
    "write in place": (
        around(lambda m, x: (torch.no_grad()(m[0].weight.clamp_)(-0.1, 0.1), m(x))[1]),
        "parameter 'within.0.weight' is written in place while a step is computed",
    ),
    "write through .data": (around(writes_data), "parameter 'within.0.weight' is written in place while a step is"),
    "requires_grad in forward": (around(freezes), "requires_grad of 'within.0.weight' is changed while a step is"),
    "inference_mode": (
        around(lambda m, x: torch.inference_mode()(m)(x)),
        "the loss depends on no parameter",
    ),
    "no gradient at all": (
        around(lambda m, x: torch.no_grad()(m)(x)),
        "the loss depends on no parameter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_by_name(name: str) -> None:
    make, says = REFUSED[name]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        step(model(make()))
    assert str(refused.value).startswith(says)


def test_spectral_norm_trains_once_its_buffers_are_said() -> None:
    kinds = {f"0.parametrizations.weight.0.{name}": "average:1" for name in ("_u", "_v")}
    gradients = step(model(CHANGED_BY_SPECTRAL_NORM(), state=kinds))
    assert set(kinds) < set(gradients)


CHANGED_BY_SPECTRAL_NORM = changed(lambda m: parametrizations.spectral_norm(m[0]) and None)


def trainer_of(module: Any) -> Any:
    return ps.Trainer(model(module), ps.SGD(0.1), ps.OneDeviceStrategy())


def test_freezing_is_read_as_a_fit_begins(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = net()
    own[0].requires_grad_(False)
    trainer = trainer_of(own)
    found = [copy.deepcopy(own)]
    for frozen in (True, False, True):
        own[0].requires_grad_(not frozen)
        trainer.fit((X, Y), batch_size=8, verbose=0)
        found.append(trainer.model())
        assert torch.equal(found[-1][0].weight, found[-2][0].weight) == frozen
        assert not torch.equal(found[-1][2].weight, found[-2][2].weight)
    with torch.no_grad():
        own[2].bias.add_(1)
    with pytest.raises(
        ConfigurationError, match=r"'2\.bias' of the model was changed after a fit, and the trainer goes"
    ):
        trainer.fit((X, Y), verbose=0)


def test_groups_and_rates_of_an_optimizer_are_read_as_a_fit_begins(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = net()
    optimizer = torch.optim.SGD(own[2].parameters(), lr=0.1)
    trainer = ps.Trainer(model(own), optimizer, ps.OneDeviceStrategy())

    def moved() -> list[bool]:
        before = trainer.model()
        trainer.fit((X, Y), batch_size=8, verbose=0)
        return [not torch.equal(before[layer].weight, trainer.model()[layer].weight) for layer in (0, 2)]

    assert moved() == [False, True]
    optimizer.add_param_group({"params": own[0].parameters()})
    assert moved() == [True, True]
    for group in optimizer.param_groups:
        group["lr"] = 1e-20
    assert moved() == [False, False]


def test_a_layer_that_is_replaced_after_a_fit_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = net()
    trainer = trainer_of(own)
    trainer.fit((X, Y), batch_size=8, verbose=0)
    own[2] = nn.Linear(6, 5)
    with pytest.raises(ConfigurationError, match=r"'2\.bias' of the model was changed after a fit"):
        trainer.fit((X, Y), verbose=0)


def test_a_layer_within_that_evaluates_goes_on_evaluating() -> None:
    own = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.9))
    own[2].eval()
    for ours in (model(own), model(own).for_thread()):
        ours.predict(values_of(ours), X)  # sets all to evaluation
        first, again = (ours.loss_and_gradients(values_of(ours), batch(number), np) for number in (0, 1))
        assert first[0] == again[0], "no dropout"
        assert first[1]["1.running_mean"].any(), "and batch normalisation trains"
        assert [layer.training for layer in ours._ready()] == [True, True, False]


def test_python_and_numpy_draw_by_the_step() -> None:
    drawn: list[list[float]] = []

    def draws(module: Any, x: Any) -> Any:
        drawn.append([random.random(), np.random.random()])
        return module(x) * drawn[-1][0]

    ours = model(around(draws))
    for number in (3, 4, 3):
        ours.loss_and_gradients(values_of(ours), batch(number), np)
    assert drawn[0] == drawn[2]
    assert not {*drawn[0]} & {*drawn[1]}


def test_a_number_that_forward_changes_is_warned_of_once() -> None:
    def counts(module: Any, x: Any) -> Any:
        module[0].calls = getattr(module[0], "calls", 0) + 1
        return module(x)

    own = around(counts)()
    own.within[0].calls = 0
    ours = model(own)
    with pytest.warns(UserWarning, match=r"forward changes 'within\.0\.calls' of the module, which is no buffer"):
        step(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(ours)


def test_a_hook_of_all_modules_is_called() -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, found: found * 2 if isinstance(module, nn.Tanh) else None
    )
    try:
        twice = step(model(net()))
    finally:
        handle.remove()
    assert not np.array_equal(twice["2.weight"], step(model(net()))["2.weight"])


def test_hooks_of_state_dicts_are_the_users_own() -> None:
    own = net()
    own.register_state_dict_post_hook(lambda module, found, prefix, metadata: found.update(version=torch.ones(1)))
    ours = model(own)
    assert sorted(values_of(ours)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert "version" in ours.to_user_object(values_of(ours)).state_dict()


def test_a_buffer_that_is_not_saved_is_kept() -> None:
    class Shifted(nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("shift", torch.ones(3), persistent=False)

    ours = model(Shifted())
    assert values_of(ours)["shift"].tolist() == [1, 1, 1]
    assert "shift" not in ours.to_user_object(values_of(ours)).state_dict()


def test_a_pruned_module_is_given_back_with_its_weights_and_mask() -> None:
    own = CARRIED["prune"]()
    own(torch.from_numpy(X))  # computes a weight that PyTorch cannot copy
    ours = model(own)
    values = values_of(ours)
    found = ours.to_user_object({**values, "0.weight_orig": 2 * values["0.weight_orig"]})
    assert torch.equal(found[0].weight, 2 * found[0].weight_mask * own[0].weight_orig)
    assert torch.equal(copy.deepcopy(found)[0].weight, found[0].weight), "it can be copied"


SCRIPT = """
import json
import safetensors.torch, torch
import parashard as ps

torch.manual_seed(0)
x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()
net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
net.register_buffer("numbers", torch.arange(3))
net[0].requires_grad_(False)
net[2].weight.register_hook(lambda gradient: gradient * torch.tensor([[0.0], [1.0]]))
strategy = ps.ParameterServerStrategy(shards=1, workers=2)
trainer = ps.Trainer(ps.torch.Model(net, torch.nn.functional.cross_entropy), ps.SGD(0.1), strategy)
models, loaded = [trainer.model()], torch.nn.Sequential(*(type(layer)() if not list(layer.parameters()) else
    torch.nn.Linear(layer.in_features, layer.out_features) for layer in net))
loaded.register_buffer("numbers", torch.zeros(3, dtype=torch.int64))
for frozen in (True, False):
    net[0].requires_grad_(not frozen)
    history = trainer.fit((x, y), batch_size=8, verbose=0)
    models.append(trainer.model())
loaded.load_state_dict(safetensors.torch.load_file(history.run_dir / "weights.safetensors"))
same = lambda one, other: bool(torch.equal(one, other))
print(json.dumps([
    [same(a[0].weight, b[0].weight) for a, b in zip(models, models[1:])],
    [[same(a[2].weight[row], b[2].weight[row]) for row in (0, 1)] for a, b in zip(models, models[1:])],
    same(loaded(x), models[-1](x)),
]))
"""


def test_workers_freeze_hook_and_go_on_as_the_script_does(start: Callable[..., ScriptRun]) -> None:
    run = start(SCRIPT)
    assert run.wait() == 0, run.complaint()
    frozen, rows, loaded = json.loads(run.output().splitlines()[-1])
    assert (frozen, rows, loaded) == ([True, False], [[True, False]] * 2, True)
