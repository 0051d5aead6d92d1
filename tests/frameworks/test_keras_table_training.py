"""Keras models with tables under a trainer: the same bits for one worker and for three, and what comes after a fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.errors import WrongModel

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="NO TEST OF ps.keras: it is not installed; `make test-frameworks` has it")
layers = keras.layers
BACKEND = keras.config.backend()

RNG = np.random.default_rng(0)
USERS, ITEMS = ps.Table("users", 8, scale=0.1), ps.Table("items", 4, optimizer=ps.Momentum(0.1), scale=0.1)
X = {"user": RNG.integers(0, 50, 400), "items": RNG.integers(-(10**15), 10**15, 30)[RNG.integers(0, 30, (400, 3))]}
Y = (RNG.normal(size=50)[X["user"]] > 0).astype(np.float32)


def net() -> Any:
    user, items = keras.Input((), dtype="int64", name="user"), keras.Input((3,), dtype="int64", name="items")
    found = [ps.keras.Embedding(USERS)(user), ps.keras.Embedding(ITEMS, "mean")(items)]
    made = keras.Model(
        {"user": user, "items": items}, layers.Dense(1)(layers.Dropout(0.2)(layers.Concatenate()(found)))
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    made.compile(loss=loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
    return made


ONE, THREE = ps.MirroredStrategy(2, threads=1), ps.ParameterServerStrategy(2, 3, "sync:2", workers_as="threads")


def trained(strategy: Any, epochs: int = 2) -> tuple[Any, Any]:
    trainer = ps.Trainer(ps.keras.Model(net), ps.Adam(0.01), strategy)
    return trainer, trainer.fit((X, Y), epochs=epochs, batch_size=16, validation_split=0.2, verbose=0)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rows_have_the_same_bits_for_one_worker_and_three() -> None:
    said = []
    for strategy in (ONE, THREE):
        trainer, history = trained(strategy)
        found = [part.tobytes() for name in ("users", "items") for part in trainer.table(name)]
        report = history.report
        said.append((report["weights_sha256"], report["rows_digest"], report["rows"], history.history, found))
    assert said[0] == said[1]
    assert said[0][2] == {"items": 30, "users": 50}


def test_after_a_fit_rows_are_evaluated_predicted_given_back_and_saved() -> None:
    trainer, history = trained(ONE, epochs=8)
    judged, outputs = trainer.evaluate((X, Y)), trainer.predict(X)
    assert judged["auc"] > 0.9
    assert history.history["val_auc"][-1] > 0.9
    own = trainer.model()
    own.save("clicks.keras")
    for there in (own, keras.models.load_model("clicks.keras")):
        if BACKEND == "jax":  # whose ids have 32 bits
            with pytest.raises(WrongModel, match="keys of more than 32 bits, and the ids are int32"):
                there.predict(X, verbose=0)
        else:
            assert there.predict(X, verbose=0) == pytest.approx(outputs, abs=1e-5)
            assert there.evaluate(X, Y, verbose=0, return_dict=True)["auc"] == pytest.approx(judged["auc"], abs=1e-3)
