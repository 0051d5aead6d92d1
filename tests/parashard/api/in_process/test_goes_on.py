"""A fit that goes on from epochs before it: its schedule, its optimizer's state and rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fits
from parashard.api import trainer as module
from parashard.api.script import Script
from parashard.errors import ConfigurationError

DATA = (np.zeros((100, 1), np.float32), np.zeros(100, np.float32))
COSINE = {"kind": "cosine"}
HALVED = {"kind": "exponential", "decay_steps": 10, "rate": 0.5}


class Sum:
    """Its weight adds up the learning rates of SGD(1.0)."""

    def initial_variables(self) -> Mapping[str, Any]:
        return {"w": np.zeros((1, 1), np.float32)}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        return 0.0, {"w": -np.ones((1, 1), np.float32)}

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
        return {"loss": 0.0}


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """No script: pytest is none, as a notebook."""
    monkeypatch.chdir(tmp_path)
    script = Script(None)
    for user in (module, fits):
        monkeypatch.setattr(user, "SCRIPT", script)
    return script


def weight(trainer: ps.Trainer) -> float:
    return float(trainer._present.weights()["w"][0, 0])


@pytest.mark.parametrize(("schedule", "whole", "half"), [(COSINE, 20.5, 16.63), (HALVED, 14.0, 11.2)])
def test_a_schedule_counts_from_the_initial_epoch(schedule: dict[str, Any], whole: float, half: float) -> None:
    def fitted(**epochs: int) -> float:
        trainer = ps.Trainer(Sum(), ps.SGD(1.0, schedule=schedule), ps.OneDeviceStrategy())
        trainer.fit(DATA, batch_size=10, verbose=0, **epochs)
        return weight(trainer)

    assert fitted(epochs=4) == pytest.approx(whole, abs=0.05)
    rest = fitted(epochs=4, initial_epoch=2)
    assert rest == pytest.approx(whole - half, abs=0.05)


X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = (X @ np.array([3.0, -1.0, 2.0]) + 0.5).astype(np.float32)


class Line(Sum):
    """Least squares, with noise that is drawn for each step."""

    def initial_variables(self) -> Mapping[str, Any]:
        return {"w": np.array([[1.0], [2.0], [0.0]], np.float32), "b": np.zeros(1, np.float32)}

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        noise = np.random.default_rng(batch.step).normal(scale=0.1)
        error = batch.inputs @ variables["w"][:, 0] + variables["b"][0] - batch.targets + np.float32(noise)
        slope = 2 * batch.inputs.T @ error / np.float32(len(error))
        return float((error**2).mean()), {"w": slope[:, None], "b": np.array([2 * error.mean()], np.float32)}


def digest(history: ps.History) -> str:
    return str(history.report["weights_sha256"])


OPTIMIZERS = {
    "momentum": ps.Momentum(0.01, schedule=HALVED),
    "adagrad": ps.Adagrad(0.1),
    "rmsprop": ps.RMSProp(0.01),
    "adam": ps.Adam(0.05, schedule=HALVED),
    "ftrl": ps.FTRL(0.1),
    "lamb": ps.LAMB(0.05),
}


@pytest.mark.parametrize(("kind", "numbered"), [*((kind, True) for kind in OPTIMIZERS), ("adam", False)])
def test_six_fits_of_an_epoch_end_like_one_of_six(kind: str, numbered: bool) -> None:
    whole = ps.Trainer(Line(), OPTIMIZERS[kind], ps.OneDeviceStrategy())
    parts = ps.Trainer(Line(), OPTIMIZERS[kind], ps.OneDeviceStrategy())
    due = whole.fit((X, Y), epochs=6, batch_size=10, verbose=0)
    for epoch in range(6):
        epochs = {"epochs": epoch + 1, "initial_epoch": epoch} if numbered else {}
        last = parts.fit((X, Y), **epochs, batch_size=10, verbose=0)
    assert digest(last) == digest(due)
    assert parts._optimizer.updates == 36


def test_rounds_count_as_one_update_each() -> None:
    whole, parts = (ps.Trainer(Line(), OPTIMIZERS["adam"], ps.MirroredStrategy(2)) for _ in range(2))
    due = whole.fit((X, Y), epochs=4, global_batch_size=20, verbose=0)
    parts.fit((X, Y), epochs=3, global_batch_size=20, verbose=0)
    last = parts.fit((X, Y), epochs=4, initial_epoch=3, global_batch_size=20, verbose=0)
    assert parts._optimizer.updates == 12
    assert digest(last) == digest(due)


def test_a_rate_that_a_callback_has_set_is_kept() -> None:
    trainer = ps.Trainer(Sum(), ps.SGD(1.0), ps.OneDeviceStrategy())
    lower = ps.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 4)
    trainer.fit(DATA, batch_size=10, verbose=0, callbacks=[lower])
    assert weight(trainer) == 2.5
    trainer.fit(DATA, batch_size=10, verbose=0)
    assert weight(trainer) == 5.0


def test_a_new_trainer_begins_with_a_new_state() -> None:
    def fitted() -> str:
        trainer = ps.Trainer(Line(), OPTIMIZERS["momentum"], ps.OneDeviceStrategy())
        return digest(trainer.fit((X, Y), batch_size=10, verbose=0))

    assert fitted() == fitted()


def test_a_rate_of_zero_moves_nothing_and_is_kept() -> None:
    trainer = ps.Trainer(Line(), ps.Adam(0.0), ps.OneDeviceStrategy())
    before = trainer._present.weights()["w"].tolist()
    trainer.fit((X, Y), batch_size=10, verbose=0)
    assert trainer._present.weights()["w"].tolist() == before
    warmed = ps.Trainer(Sum(), ps.SGD(1.0), ps.OneDeviceStrategy())
    rise = ps.callbacks.LearningRateScheduler(lambda epoch: 0.5 * epoch)
    warmed.fit(DATA, epochs=3, batch_size=10, verbose=0, callbacks=[rise])
    assert weight(warmed) == 15.0
    warmed.fit(DATA, batch_size=10, verbose=0, callbacks=[rise])
    warmed.fit(DATA, batch_size=10, verbose=0)
    assert weight(warmed) == 15.0, "the last rate was 0"


def test_a_trainer_takes_clipping_and_a_schedule_beside_any_optimizer() -> None:
    def fitted(**arguments: Any) -> float:
        trainer = ps.Trainer(Sum(), ps.SGD(1.0), ps.OneDeviceStrategy(), **arguments)
        trainer.fit(DATA, batch_size=10, verbose=0)
        return weight(trainer)

    assert fitted(clip_norm=0.25) == 2.5
    assert fitted(schedule={"kind": "piecewise", "changes": [[4, 0.5], [6, 0.0]]}) == 5.0
    for arguments, says in (
        ({"clip_norm": -1.0}, "clip_norm: found -1.0; allowed: between"),
        ({"schedule": {"kind": "piecewise", "changes": [[4, 0.5], [2, 0.0]]}}, "whose updates ascend"),
        ({"schedule": {"kind": "linear"}}, 'schedule.kind: found "linear"; allowed: constant, step'),
        ({"schedule": 0.1}, "schedule is one of parashard's, whose lengths are in updates"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            fitted(**arguments)
    for optimizer in (ps.SGD(1.0, clip_norm=1.0), ps.SGD(1.0, schedule=HALVED)):
        with pytest.raises(ConfigurationError, match=r"the optimizer has a (clip_norm|schedule) already"):
            ps.Trainer(Sum(), optimizer, clip_norm=1.0, schedule=COSINE)
