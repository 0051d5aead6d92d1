"""Training on a real GPU against the same on the CPU: a worker's step, and fits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fits
from parashard.api import trainer as trainer_module
from parashard.api.script import Script
from parashard.layers import Dense, ReLU
from parashard.plan.variables import Variable, initial_rows
from parashard_worker.device import Cpu, Gpu
from support.gpu_steps import assert_alike, steps_of

X = np.random.default_rng(0).standard_normal((512, 16), np.float32)
Y = X[:, :4].argmax(1)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No script: pytest is none, as a notebook."""
    monkeypatch.chdir(tmp_path)
    for user in (trainer_module, fits):
        monkeypatch.setattr(user, "SCRIPT", Script(None))


def model() -> Any:
    layers = [Dense(64, initializer="he_normal"), ReLU(), Dense(4)]
    return ps.Sequential(layers, input_shape=(16,), loss="softmax_cross_entropy", metrics=["accuracy"])


def declared() -> Any:
    """Return the model with the first values of its variables, which a shard would draw."""
    trained = model()
    first = {
        name: initial_rows(v, 3, 0, v.rows).reshape(v.shape)
        for name, v in trained.initial_variables().items()
        if isinstance(v, Variable)
    }
    trained.initial_variables = lambda: first  # type: ignore[method-assign]
    return trained


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_step_on_a_gpu_has_the_gradients_of_one_on_the_cpu(xp_gpu: Any, clip_norm: float | None) -> None:
    found, due = (steps_of(declared(), device, (X, Y), clip_norm=clip_norm) for device in (Gpu(0), Cpu()))
    assert_alike(found, due)


def fitted(strategy: Any) -> Any:
    trainer = ps.Trainer(model(), ps.Momentum(0.05, momentum=0.9), strategy, seed=3)
    history = trainer.fit((X, Y), epochs=3, batch_size=32, validation_split=0.25, verbose=0)
    return history.report, trainer._present.weights()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [ps.OneDeviceStrategy, lambda d: ps.MirroredStrategy([d, d])])
def test_a_fit_on_a_gpu_ends_near_one_on_the_cpu(xp_gpu: Any, strategy: Any) -> None:
    (report, weights), (due_report, due) = (fitted(strategy(device)) for device in ("cuda:0", "cpu"))
    assert report["steps_applied"] == due_report["steps_applied"]
    assert report["held_out"]["loss"] == pytest.approx(due_report["held_out"]["loss"], rel=1e-2)
    for name, values in due.items():
        np.testing.assert_allclose(weights[name], values, rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.mark.gpu
def test_one_device_learns_handwritten_digits_on_a_gpu(xp_gpu: Any) -> None:
    digits = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed").load_digits()
    layers = [Dense(64, initializer="he_normal"), ReLU(), Dense(10)]
    net = ps.Sequential(layers, input_shape=(64,), loss="softmax_cross_entropy", metrics=["accuracy"])
    trainer = ps.Trainer(net, ps.Adam(0.003), ps.OneDeviceStrategy("cuda:0"))
    data = digits.data.astype(np.float32) / 16, digits.target
    history = trainer.fit(data, epochs=10, batch_size=32, validation_split=0.2, verbose=0)
    assert history.report["held_out"]["accuracy"] >= 0.9
