"""A mistake with a model of a framework is one sentence, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.errors import ConfigurationError, JobFailed

torch = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
jax = pytest.importorskip("jax", reason="NO TEST OF ps.jax: JAX is not installed; `make test-frameworks` has it")
os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="NO TEST OF ps.keras: Keras is not installed")
pytestmark = pytest.mark.xdist_group("frameworks")

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
mse = torch.nn.functional.mse_loss


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, width)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def network() -> Any:
    found = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    found.compile(loss="mse")
    return found


def trainer(model: Any) -> ps.Trainer:
    return ps.Trainer(model, ps.SGD(0.1), ps.OneDeviceStrategy())


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a Keras model for PyTorch": (
        lambda: ps.torch.Model(network()),
        "ps.torch.Model was given a Keras model: ps.keras.Model(model) takes it",
    ),
    "a Keras model for JAX": (
        lambda: ps.jax.Model(network(), mse),
        "ps.jax.Model was given a Keras model: ps.keras.Model(model) takes it",
    ),
    "a module for JAX": (
        lambda: ps.jax.Model(Net(1), mse),
        "ps.jax.Model was given a PyTorch module: ps.torch.Model(net, loss) takes it",
    ),
    "a module's class for Keras": (
        lambda: ps.keras.Model(Net),
        "ps.keras.Model was given a PyTorch module: ps.torch.Model(net, loss) takes it",
    ),
    "no loss": (lambda: ps.torch.Model(Net(1)), "loss is a function of outputs and targets, or an object such as"),
    "no loss for JAX": (
        lambda: ps.jax.Model(lambda key: {}),
        "loss is a function of parameters, inputs, targets and key, found NoneType",
    ),
    "a class that needs arguments": (
        lambda: trainer(ps.torch.Model(Net, mse)).fit((X, Y), verbose=0),
        "module() raised TypeError: Net.__init__() missing 1 required positional argument: 'width'; what needs "
        "arguments is given as a function that gives them, such as lambda: Net(10)",
    ),
    "an init without a key": (
        lambda: trainer(ps.jax.Model(lambda: {}, lambda p, x, y, key: 0.0)).fit((X, Y), verbose=0),
        "init(key) raised TypeError: ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_model_of_another_kind_is_refused(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, says = MISTAKES[mistake]
    with pytest.raises(ConfigurationError) as refused:
        call()
    assert refused.value.message.startswith(says)
    assert not list(tmp_path.iterdir())


def test_one_example_without_the_axis_of_examples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = trainer(ps.torch.Model(lambda: Net(1), mse))
    with pytest.raises(ConfigurationError, match=r"^predict: outputs has 1 rows of 3 examples; .* x\[None\] is one"):
        ours.predict(X[0])
    ours.fit((X, Y), verbose=0)
    with pytest.raises(ConfigurationError, match=r"^predict: each example has inputs \(\) float32, and inputs \(3\) "):
        ours.predict(X[0])
    assert ours.predict(X[:1]).shape == (1, 1)


def test_a_loss_without_a_gradient_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ps.torch.Model(lambda: Net(1), lambda outputs, targets: mse(outputs.detach(), targets))
    with pytest.raises(JobFailed, match="the loss depends on no parameter: it is computed without them"):
        trainer(model).fit((X, Y), verbose=0)
