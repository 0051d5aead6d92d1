"""Rows of tables in a script's own process: trained, judged, read and refused as on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api import fits
from parashard.api import trainer as module
from parashard.api.in_process.state import LocalClient
from parashard.api.script import Script
from parashard.client.pulled_rows import TableSet
from parashard.errors import ConfigurationError, JobFailed
from parashard.job.load import load_job
from parashard.plan.embedding import mixed
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.steps import StepPlan
from support.looking_model import KEYS, TABLE, TARGETS, Looking

DATA = KEYS, TARGETS


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No script: pytest is none, as a notebook."""
    monkeypatch.chdir(tmp_path)
    own = Script(None)
    for user in (module, fits):
        monkeypatch.setattr(user, "SCRIPT", own)


def trainer(strategy: Any = None, model: Any = None, optimizer: OptimizerSpec | None = None, **settings: Any) -> Any:
    return ps.Trainer(
        model or Looking(), optimizer or ps.SGD(0.05), strategy or ps.OneDeviceStrategy(), seed=3, settings=settings
    )


def fit(trainer: Any, **arguments: Any) -> Any:
    return trainer.fit(DATA, **{"epochs": 4, "batch_size": 8, "verbose": 0, **arguments})


def by_hand(epochs: int, batch_size: int) -> tuple[dict[int, float], float]:
    """Return each key's number and the bias, trained by arithmetic of one number at a time."""
    steps = StepPlan(len(KEYS), batch_size, epochs, 3)
    drawn = TableSet((TABLE,), 3).first_rows("weight", mixed(np.unique(KEYS)))[:, 0]
    rows, velocity, bias = dict(zip(np.unique(KEYS).tolist(), drawn, strict=True)), {}, np.float32(0)
    for step in range(steps.total):
        indices, gradient, of_bias = steps.indices(step), {}, np.float32(0)
        error = np.array([rows[a] + rows[b] for a, b in KEYS[indices].tolist()], np.float32) + bias - TARGETS[indices]
        for keys, one in zip(KEYS[indices].tolist(), error, strict=True):
            for key in keys:
                gradient[key] = gradient.get(key, np.float32(0)) + 2 * one / np.float32(len(indices))
        of_bias = 2 * error.mean()
        bias -= np.float32(0.05) * of_bias
        for key, of_key in gradient.items():
            velocity[key] = np.float32(0.9) * velocity.get(key, np.float32(0)) + of_key
            rows[key] -= np.float32(0.02) * velocity[key]
    return rows, float(bias)


def test_rows_are_those_of_arithmetic_by_hand() -> None:
    ours = trainer()
    history = fit(ours)
    keys, rows = ours.table("weight")
    due, bias = by_hand(4, 8)
    found = dict(zip(keys.view(np.int64).tolist(), rows[:, 0].tolist(), strict=True))
    assert found == pytest.approx(due, abs=1e-5)
    assert ours._present.weights()["bias"][0] == pytest.approx(bias, abs=1e-5)
    assert history.report["rows"] == {"weight": len(due)}
    assert (keys[:-1] < keys[1:]).all()
    assert rows.shape == (len(due), 1)


def test_a_round_of_short_steps_moves_rows_and_variables_as_one_step_of_its_examples() -> None:
    mirrored, one = trainer(ps.MirroredStrategy(4)), trainer()
    for ours, batch_size in ((mirrored, 8), (one, 32)):  # the last round has 8, 8, 8 and 2 examples
        fit(ours, epochs=2, batch_size=batch_size)
    assert mirrored.table("weight")[1] == pytest.approx(one.table("weight")[1], abs=1e-6)
    assert mirrored._present.weights()["bias"] == pytest.approx(one._present.weights()["bias"], abs=1e-6)


@pytest.mark.parametrize("rule", [ps.Momentum(0.02), ps.FTRL(0.1), ps.Adam(0.02), ps.RowwiseAdagrad(0.1)])
def test_a_second_training_goes_on_from_the_rows_and_their_optimizers_state(rule: OptimizerSpec) -> None:
    class Moved(Looking):
        tables = (ps.Table("weight", 1, optimizer=rule),)

    whole, parts = trainer(model=Moved()), trainer(model=Moved())
    due = fit(whole, epochs=3)
    fit(parts, epochs=2)
    last = fit(parts, epochs=3, initial_epoch=2)
    for found, expected in zip(parts.table("weight"), whole.table("weight"), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert last.report["weights_sha256"] == due.report["weights_sha256"]


def test_rates_of_rows_stay_lowered_like_the_rate_that_a_callback_has_set() -> None:
    lower = ps.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    whole, parts = trainer(), trainer()
    fit(whole, epochs=3, callbacks=[lower])
    fit(parts, epochs=2, callbacks=[lower])
    fit(parts, epochs=3, initial_epoch=2, callbacks=[lower])
    np.testing.assert_array_equal(parts.table("weight")[1], whole.table("weight")[1])


def test_a_second_training_that_was_interrupted_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for stop_at in (None, 0, 5):
        ours = trainer(ps.MirroredStrategy(2))
        fit(ours, epochs=1)
        pushed = LocalClient.push

        def stopping(
            client: Any, step: int, *rest: Any, stop_at: int | None = stop_at, pushed: Any = pushed, **about: Any
        ) -> Any:
            if step == stop_at:
                raise KeyboardInterrupt
            return pushed(client, step, *rest, **about)

        monkeypatch.setattr(LocalClient, "push", stopping)
        if stop_at is not None:
            with pytest.raises(KeyboardInterrupt):
                fit(ours, epochs=2)
        monkeypatch.setattr(LocalClient, "push", pushed)
        reports.append(fit(ours, epochs=2, resume=stop_at is not None).report)
    assert len({(report["weights_sha256"], str(report["rows_digest"])) for report in reports}) == 1


def test_an_evaluation_reads_the_rows_of_the_run_and_one_before_it_first_values() -> None:
    ours = trainer()
    before = ours.evaluate(DATA, batch_size=7)["loss"]
    rows = TableSet((TABLE,), 3).first_rows("weight", mixed(KEYS))[:, 0].reshape(KEYS.shape)
    assert before == pytest.approx(float(((rows.sum(1) - TARGETS) ** 2).mean()), rel=1e-5)
    assert ours.table("weight")[1].shape == (0, 1)
    history = fit(ours, validation_data=DATA)
    after = ours.evaluate(DATA)["loss"]
    assert after == pytest.approx(history.history["val_loss"][-1], rel=1e-6)
    assert after < 0.6 * before


def test_pieces_of_a_step_have_the_gradient_of_the_whole() -> None:
    whole, pieces = trainer(), trainer()
    fit(whole)
    fit(pieces, batch_size=4, gradient_accumulation=2)
    for of_whole, of_pieces in zip(whole.table("weight"), pieces.table("weight"), strict=True):
        assert of_pieces == pytest.approx(of_whole, abs=1e-5)


def test_a_training_goes_on_from_its_checkpoint_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = trainer(ps.MirroredStrategy(3))
    due = fit(undisturbed).report
    pushed = LocalClient.push

    def stopping(client: Any, step: int, *rest: Any, **about: Any) -> Any:
        if step == 20:
            raise KeyboardInterrupt
        return pushed(client, step, *rest, **about)

    ours = trainer(ps.MirroredStrategy(3))
    monkeypatch.setattr(LocalClient, "push", stopping)
    with pytest.raises(KeyboardInterrupt):
        fit(ours)
    monkeypatch.setattr(LocalClient, "push", pushed)
    again = fit(ours, resume=True).report
    assert (again["weights_sha256"], again["rows_digest"]) == (due["weights_sha256"], due["rows_digest"])


class Wrong(Looking):
    def __init__(self, named: Any) -> None:
        self.named = named

    def keys(self, batch: Any) -> Any:
        return self.named


class Without(Looking):
    tables = ()


class Nameless(Looking):
    tables = None  # type: ignore[assignment]


class Keyless:
    tables = (TABLE,)
    initial_variables = Looking.initial_variables
    loss_and_gradients = Looking.loss_and_gradients
    evaluate = Looking.evaluate


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Nameless(), 'has a method keys, and names no tables: tables = \\[ps.Table\\("users", 16\\)\\]'),
        (Keyless(), "has tables \\(weight\\) and no method keys"),
        (Wrong({"user": KEYS}), "keys named the table 'user'; the job has: weight"),
        (Wrong({"weight": TARGETS}), "keys returned for table 'weight' are not ids: keys are whole numbers"),
        (Wrong([3]), "keys returned a list"),
    ],
)
def test_a_model_that_says_one_thing_of_two_is_refused_before_there_is_a_run(model: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        fit(trainer(model=model))
    assert not list(Path().glob("runs/*"))


def test_tables_that_are_named_and_empty_are_none() -> None:
    with pytest.raises(JobFailed, match="weight"):  # the model looks for rows that nothing has looked up
        fit(trainer(model=Without()))
    with pytest.raises(ConfigurationError, match="table 'weight': the model has no embedding tables"):
        trainer(model=Without()).table("weight")


@pytest.mark.parametrize(
    "callback",
    [ps.callbacks.ModelCheckpoint("best.safetensors"), ps.callbacks.EarlyStopping(restore_best_weights=True)],
)
def test_a_callback_that_keeps_weights_is_refused(callback: Any) -> None:
    with pytest.raises(ConfigurationError, match="keeps the weights of an evaluation, and rows of tables"):
        fit(trainer(), validation_data=DATA, callbacks=[callback])
    assert not list(Path().glob("runs/*"))


class Asking(ps.callbacks.Callback):
    def __init__(self) -> None:
        self.refused: list[str] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for ask in (lambda: self.trainer.evaluate(DATA), lambda: self.trainer.table("weight")):
            try:
                ask()
            except ConfigurationError as error:
                self.refused.append(str(error))


def test_callbacks_have_no_rows() -> None:
    asking = Asking()
    fit(trainer(), epochs=1, callbacks=[asking], validation_data=DATA)
    assert len(asking.refused) == 2
    assert all("are not at hand while fit runs" in sentence for sentence in asking.refused)


def test_another_table_is_none_of_the_models() -> None:
    with pytest.raises(ConfigurationError, match="table 'users' is none of the model's: weight"):
        trainer().table("users")


def test_settings_say_nothing_of_tables() -> None:
    with pytest.raises(ConfigurationError, match=r"settings: 'tables.weight' is of a table: ps.Table\(...\)"):
        fit(trainer(**{"tables.weight": {"dimension": 2}}))


def test_a_sidecar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="SidecarEvaluator judges files of weights: the model looks up rows"):
        ps.SidecarEvaluator(Looking(), DATA, tmp_path)


def test_a_job_file_has_the_tables(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "from support.looking_model import Looking\ndef build(spec):\n    return Looking()\n"
    )
    np.savez(tmp_path / "data.npz", inputs=KEYS % 1000, targets=TARGETS)
    trainer().to_job_file(
        tmp_path / "job.toml",
        model="other:build",
        data={"source": "npz", "path": str(tmp_path / "data.npz")},
        epochs=1,
        batch_size=8,
    )
    written = load_job(tmp_path / "job.toml", environ={}).job.tables["weight"]
    assert (written.scale, written.dimension, written.optimizer) == (0.5, 1, ps.Momentum(0.02))
