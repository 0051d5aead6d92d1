"""Metrics of an epoch's own batches, in History, in callbacks' logs, in the report and on every screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fits
from parashard.api import trainer as module
from parashard.api.script import Script
from parashard.errors import ConfigurationError

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


class Recall(ps.metrics.Metric):
    """A metric whose figure only it has."""

    name, length = "recall", 3

    def sums(self, outputs: Any, targets: Any) -> Any:
        found = outputs.argmax(-1)
        return [((found == 1) & (targets == 1)).sum(), (targets == 1).sum(), 0.0]

    def figure(self, values: Any) -> float:
        return float(values[0] / values[1]) if values[1] else float("nan")


METRICS = ("accuracy", Recall())


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """No script: pytest is none, as a notebook."""
    monkeypatch.chdir(tmp_path)
    script = Script(None)
    for user in (module, fits):
        monkeypatch.setattr(user, "SCRIPT", script)
    return script


def fitted(strategy: Any, rate: float = 0.0, metrics: Any = METRICS, **arguments: Any) -> ps.History:
    layers = [ps.layers.Dense(2)]
    model = ps.Sequential(layers, input_shape=(3,), loss="softmax_cross_entropy", metrics=list(metrics))
    trainer = ps.Trainer(model, ps.SGD(rate or 1e-30), strategy, seed=3)
    return trainer.fit((X, Y), **{"epochs": 2, "batch_size": 8, "verbose": 0, **arguments})


@pytest.mark.parametrize("strategy", [ps.OneDeviceStrategy(), ps.MirroredStrategy(2)], ids=["one", "mirrored"])
def test_of_weights_that_do_not_move_an_epoch_s_metrics_are_those_of_an_evaluation(strategy: Any) -> None:
    history = fitted(strategy, validation_data=(X, Y))
    for name in ("accuracy", "recall"):
        assert history.history[name] == history.history[f"val_{name}"], name
    assert [one["accuracy"] for one in history.report["epochs"]] == history.history["accuracy"]
    assert [one["epoch"] for one in history.report["epochs"]] == [0, 1]
    last = json.loads((history.run_dir / "history.jsonl").read_text().splitlines()[-1])
    assert last["training"] == {"accuracy": history.history["accuracy"][-1]}


class Logs(ps.callbacks.Callback):
    decides = False

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.batches.append(logs)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.epochs.append(dict(logs))


def test_callbacks_get_them_with_each_batch_and_epoch() -> None:
    logs = Logs()
    history = fitted(ps.OneDeviceStrategy(), callbacks=[logs])
    assert [one["accuracy"] for one in logs.epochs] == history.history["accuracy"]
    of_batches = [one["accuracy"] for one in logs.batches[:5]]
    assert sum(of_batches) / 5 == pytest.approx(history.history["accuracy"][0])


@pytest.mark.parametrize("monitor", ["accuracy", "recall"])
def test_they_can_be_monitored_without_validation_data(monitor: str) -> None:
    stop = ps.callbacks.EarlyStopping(monitor, patience=1)
    assert len(fitted(ps.OneDeviceStrategy(), epochs=9, callbacks=[stop]).history["loss"]) == 2
    plateau = ps.callbacks.ReduceLROnPlateau(monitor, factor=0.5, patience=1)
    assert fitted(ps.OneDeviceStrategy(), epochs=4, callbacks=[plateau]).report["callbacks"]["learning_rates"]


def test_a_monitor_that_is_no_metric_is_refused_by_name() -> None:
    stop = ps.callbacks.EarlyStopping("precision", patience=1)
    with pytest.raises(
        ConfigurationError, match="monitor 'precision' is not among the figures: accuracy, loss, recall"
    ):
        fitted(ps.OneDeviceStrategy(), callbacks=[stop])


def test_the_pieces_of_a_step_are_in_its_metrics() -> None:
    whole, pieces = (fitted(ps.OneDeviceStrategy(), gradient_accumulation=k, batch_size=8 // k) for k in (1, 2))
    assert whole.history["accuracy"] == pieces.history["accuracy"]
    assert whole.history["recall"] == pieces.history["recall"]


def test_without_metrics_there_are_none() -> None:
    assert list(fitted(ps.OneDeviceStrategy(), metrics=()).history) == ["loss"]


def test_every_epoch_has_each_figure_though_several_end_with_one_round() -> None:
    history = fitted(ps.MirroredStrategy(4), epochs=5, batch_size=20, validation_data=(X, Y)).history
    assert {len(values) for values in history.values()} == {5}
