"""Training on a real GPU against the same on the CPU: a worker's step, and fits of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fits
from parashard.api import trainer as trainer_module
from parashard.api.script import Script
from parashard.data.base import Batch
from parashard.layers import Dense, ReLU
from parashard.plan.flat import FlatLayout
from parashard.plan.variables import Variable, initial_rows
from parashard_worker.computing import Task
from parashard_worker.device import Cpu, Device, Gpu
from support.in_process import plan_of

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


def computed(device: Device, clip_norm: float | None) -> list[tuple[float | None, dict[str, np.ndarray]]]:
    """Return losses and gradients of a few steps, whose weights lie in the same memory each time."""
    trained = model()
    declared = {name: v for name, v in trained.initial_variables().items() if isinstance(v, Variable)}
    no_data, steps = SimpleNamespace(), SimpleNamespace(steps_before=0)  # the batches are made here
    task = Task(trained, no_data, steps, plan_of(declared), device, clip_norm, None)  # type: ignore[arg-type]
    layout = FlatLayout.of(declared)
    values = layout.over(np.zeros(layout.elements, np.float32))
    found = []
    for step in range(5):
        for name, variable in declared.items():
            values[name][...] = initial_rows(variable, step, 0, variable.rows).reshape(variable.shape)
        some = slice(64 * step, 64 * step + 64)
        loss, _, gradients = task.gradients(Batch(step, 0, np.arange(64), X[some], Y[some]), values)
        assert gradients is not None
        found.append((loss, {name: np.array(gradient) for name, gradient in gradients.items()}))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_step_on_a_gpu_has_the_gradients_of_one_on_the_cpu(xp_gpu: Any, clip_norm: float | None) -> None:
    there, here = computed(Gpu(0), clip_norm), computed(Cpu(), clip_norm)
    for (loss, gradients), (due_loss, due) in zip(there, here, strict=True):
        assert loss == pytest.approx(due_loss, rel=1e-4)
        assert {name: g.dtype for name, g in gradients.items()} == dict.fromkeys(due, np.dtype(np.float32))
        for name, gradient in due.items():
            np.testing.assert_allclose(gradients[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


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
