"""A fit that goes on from epochs before it: its schedule, its optimizer's state and rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fit_here, fits
from parashard.api import trainer as module
from parashard.api.script import Script

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
    for user in (module, fits, fit_here):
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
