"""The optimizer's state as PyTorch loads it, and optimizers of PyTorch that have taken steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NO TEST OF PyTorch's OPTIMIZERS: it is not installed")

import parashard as ps  # noqa: E402
from parashard.api.jobs import checked_optimizer  # noqa: E402
from parashard.errors import ConfigurationError  # noqa: E402

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)
ARGUMENTS: dict[str, Any] = {"batch_size": 40, "verbose": 0}
Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, weight_decay=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.05, betas=(0.8, 0.9), weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.05),
    "RMSprop, momentum": lambda p: torch.optim.RMSprop(p, 0.05, momentum=0.8),
    "RMSprop, all": lambda p: torch.optim.RMSprop(p, 0.05, momentum=0.8, centered=True, eps=1e-3),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, 0.05, centered=True, eps=1e-3),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def trainer(net: Any, optimizer: Any) -> ps.Trainer:
    return ps.Trainer(ps.torch.Model(net, torch.nn.functional.mse_loss), optimizer, ps.OneDeviceStrategy())


def stepped(net: Any, optimizer: Any, steps: int) -> Any:
    net.train()
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
    return net


def same(a: Any, b: Any) -> None:
    for name, tensor in a.state_dict().items():
        np.testing.assert_allclose(tensor.numpy(), b.state_dict()[name].numpy(), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pytorch_goes_on_with_the_state_of_the_shards(name: str) -> None:
    net = network()
    ours = trainer(net, OPTIMIZERS[name](net.parameters()))
    ours.fit((X, Y), epochs=5, **ARGUMENTS)
    own = ours.model()
    optimizer = OPTIMIZERS[name](own.parameters())
    optimizer.load_state_dict(ours.optimizer_state_dict())
    stepped(own, optimizer, 2)
    ours.fit((X, Y), epochs=2, **ARGUMENTS)
    same(own, ours.model())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trainer_goes_on_with_an_optimizer_that_has_taken_steps(name: str) -> None:
    net = network()
    optimizer = OPTIMIZERS[name](net.parameters())
    stepped(net, optimizer, 5)
    ours = trainer(net, optimizer)
    ours.fit((X, Y), epochs=2, **ARGUMENTS)
    own = copy.deepcopy(net)
    again = OPTIMIZERS[name](own.parameters())
    again.load_state_dict(optimizer.state_dict())
    same(stepped(own, again, 2), ours.model())


def test_an_optimizer_of_ours_and_one_with_groups_are_exported_too() -> None:
    ours = trainer(network, ps.Adam(0.05, beta1=0.8))
    ours.fit((X, Y), epochs=3, **ARGUMENTS)
    own = ours.model()
    optimizer = torch.optim.Adam(own.parameters(), 0.05, betas=(0.8, 0.999))
    optimizer.load_state_dict(ours.optimizer_state_dict())
    assert all(float(entry["step"]) == 3 for entry in optimizer.state.values())

    def grouped(net: Any) -> Any:
        return torch.optim.AdamW(
            [{"params": net[2].parameters(), "lr": 0.01}, {"params": net[0].parameters(), "weight_decay": 0.0}], 0.05
        )

    net = network()
    ours = trainer(net, grouped(net))
    ours.fit((X, Y), epochs=3, **ARGUMENTS)
    own = ours.model()
    again = grouped(own)
    again.load_state_dict(ours.optimizer_state_dict())
    stepped(own, again, 2)
    ours.fit((X, Y), epochs=2, **ARGUMENTS)
    same(own, ours.model())


def test_what_has_no_state_or_no_equal_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the optimizer has taken no steps"):
        trainer(network, torch.optim.Adam).optimizer_state_dict()
    ours = trainer(network, ps.FTRL(0.1))
    ours.fit((X, Y), **ARGUMENTS)
    with pytest.raises(ConfigurationError, match=r"no optimizer that computes ps\.FTRL"):
        ours.optimizer_state_dict()
    net, other = network(), network()
    optimizer = torch.optim.Adam(other.parameters())
    stepped(other, optimizer, 1)
    with pytest.raises(ConfigurationError, match="has taken steps with parameters that are not those of the model"):
        trainer(net, optimizer)


def test_a_coordinator_refuses_an_optimizer_that_has_taken_steps() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    assert checked_optimizer(optimizer).kind == "adam"
    stepped(net, optimizer, 1)
    with pytest.raises(ConfigurationError, match=r"only a ps\.Trainer goes on with it"):
        checked_optimizer(optimizer)


def test_an_optimizer_with_groups_may_be_clipped_and_scheduled() -> None:
    def grouped(net: Any) -> Any:
        return torch.optim.AdamW([{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters()}], 0.05)

    net = network()
    model = ps.torch.Model(net, torch.nn.functional.mse_loss)
    halved = {"kind": "step", "every_steps": 2, "factor": 0.5}
    ours = ps.Trainer(model, grouped(net), ps.OneDeviceStrategy(), clip_norm=0.5, schedule=halved)
    ours.fit((X, Y), epochs=5, **ARGUMENTS)
    theirs = network()
    optimizer = grouped(theirs)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(theirs(torch.tensor(X)), torch.tensor(Y)).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    same(theirs, ours.model())
    for given, says in (
        ({"optimizer": optimizer}, "has a learning-rate scheduler, which the shards do not run"),
        ({"optimizer": grouped(net), "schedule": scheduler}, 'found StepLR: {"kind": "step", "every_steps"'),
    ):
        with pytest.raises(ConfigurationError, match=says):
            ps.Trainer(model, strategy=ps.OneDeviceStrategy(), **given)
