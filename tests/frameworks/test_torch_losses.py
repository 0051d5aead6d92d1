"""Losses of PyTorch that are no means over examples: figures and gradients that do not depend on the batch size."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.examples.source import source_of
from parashard.errors import ConfigurationError
from parashard.models.declaration import parts_of
from parashard.plan.steps import StepPlan
from parashard_worker.computing import read_step

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 3)).astype(np.float32)
Y = (RNG.random(64) < 0.2).astype(np.int64)
TOKENS = np.where(np.arange(5) < RNG.integers(1, 6, (64, 1)), RNG.integers(0, 4, (64, 5)), -100)
WEIGHT = torch.tensor([1.0, 20.0])
functional = torch.nn.functional
LOSSES = {
    "weight": torch.nn.CrossEntropyLoss(weight=WEIGHT),
    "partial": functools.partial(functional.cross_entropy, weight=WEIGHT, label_smoothing=0.1),
    "ignored": torch.nn.CrossEntropyLoss(ignore_index=1),
    "sum": torch.nn.CrossEntropyLoss(reduction="sum"),
    "likelihood": lambda outputs, targets: functional.nll_loss(outputs.log_softmax(1), targets, weight=WEIGHT),
    "mean": functional.cross_entropy,
}
KNOWN = sorted(LOSSES.keys() - {"likelihood"})


class Net(torch.nn.Sequential):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__(torch.nn.Linear(3, outputs))


class Tagger(torch.nn.Sequential):
    """Five words of four classes."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 20), torch.nn.Unflatten(1, (4, 5)))


class Normalised(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(loss: Any, module: Any = Net, strategy: Any = None, **more: Any) -> ps.Trainer:
    return ps.Trainer(ps.torch.Model(module, loss, **more), ps.SGD(0.01), strategy or ps.OneDeviceStrategy(), name="it")


def fit(trainer: ps.Trainer, targets: Any = Y, **more: Any) -> Any:
    return trainer.fit((X, targets), verbose=0, **more)


@pytest.mark.parametrize("name", KNOWN)
def test_an_evaluation_is_that_of_all_examples_at_once(name: str) -> None:
    ours = trainer(LOSSES[name])
    due = LOSSES[name](ours.model()(torch.tensor(X)), torch.tensor(Y)).item()
    assert [ours.evaluate((X, Y), batch_size=size)["loss"] for size in (64, 7, 1)] == pytest.approx([due] * 3, rel=1e-5)


@pytest.mark.parametrize("name", KNOWN)
def test_pieces_have_the_gradient_of_the_whole(name: str) -> None:
    whole, pieces = trainer(LOSSES[name]), trainer(LOSSES[name])
    fit(whole, batch_size=12)
    fit(pieces, batch_size=4, gradient_accumulation=3)
    for one, other in zip(whole.model().parameters(), pieces.model().parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_words_that_are_ignored_count_nowhere() -> None:
    loss = torch.nn.CrossEntropyLoss()
    whole, pieces = trainer(loss, Tagger), trainer(loss, Tagger)
    due = loss(whole.model()(torch.tensor(X)), torch.tensor(TOKENS)).item()
    assert whole.evaluate((X, TOKENS), batch_size=5)["loss"] == pytest.approx(due, rel=1e-5)
    fit(whole, TOKENS, batch_size=8)
    fit(pieces, TOKENS, batch_size=2, gradient_accumulation=4)
    for one, other in zip(whole.model().parameters(), pieces.model().parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_piece_in_which_nothing_counts_adds_nothing() -> None:
    targets = np.where(np.arange(64) % 4 < 2, -100, Y)  # in pieces of two
    whole, pieces = (trainer(torch.nn.CrossEntropyLoss()) for _ in range(2))
    due = fit(whole, targets, batch_size=8, shuffle=False)
    found = fit(pieces, targets, batch_size=2, gradient_accumulation=4, shuffle=False)
    assert found.history["loss"] == pytest.approx(due.history["loss"], rel=1e-5)
    for one, other in zip(whole.model().parameters(), pieces.model().parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_statistics_of_pieces_are_averaged_whatever_the_loss_adds() -> None:
    whole, pieces = (
        ps.Trainer(ps.torch.Model(Normalised, LOSSES["sum"]), ps.SGD(1e-9), ps.OneDeviceStrategy(), name="it")
        for _ in range(2)
    )
    fit(whole, batch_size=16)
    fit(pieces, batch_size=4, gradient_accumulation=4)
    due = whole.model()[1].running_mean
    assert due.abs().max() > 0.01
    assert torch.allclose(pieces.model()[1].running_mean, due, atol=1e-5)


def test_a_sum_in_a_round_weighs_each_example_the_same() -> None:
    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(5))

        def forward(self, x: Any) -> Any:
            return x @ self.w

    for given in (functools.partial(functional.l1_loss, reduction="sum"), torch.nn.L1Loss(reduction="sum")):
        ours = ps.Trainer(ps.torch.Model(Weights, given), ps.SGD(1.0), ps.MirroredStrategy(2), name="it")
        ours.fit((np.eye(5, dtype=np.float32), -np.ones(5, np.float32)), batch_size=3, verbose=0)
        assert ours.model().w.tolist() == [-0.5] * 5


@pytest.mark.parametrize(
    ("name", "strategy", "more", "says"),
    [
        ("weight", 2, {}, r"it divides by the weights of the classes\): the gradient of a round of 2 steps"),
        ("ignored", 2, {}, r"it divides by the targets that are not ignored\): the gradient of a round of 2 steps"),
        ("likelihood", 2, {}, "the gradient of a round of 2 steps is the mean of theirs"),
        ("likelihood", 1, {"gradient_accumulation": 2}, "the gradient of a step in pieces"),
        ("likelihood", 1, {"validation_split": 0.5}, "the loss of an evaluation depends on the size of its batches"),
        ("likelihood", 1, {}, ""),
        ("weight", 1, {"gradient_accumulation": 2, "validation_split": 0.5}, ""),
        ("mean", 2, {"gradient_accumulation": 2, "validation_split": 0.5}, ""),
    ],
)
def test_what_depends_on_the_size_of_batches_is_told(name: str, strategy: int, more: Any, says: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trainer(LOSSES[name], strategy=ps.MirroredStrategy(strategy)), **more)
    ours = [warning for warning in caught if "no mean over examples" in str(warning.message)]
    assert len(ours) == bool(says)
    if says:
        assert ours[0].filename == __file__
        assert re.search(says, str(ours[0].message))


def test_a_ratio_is_refused_by_name_before_the_start() -> None:
    def recall(outputs: Any, targets: Any) -> Any:
        return ((outputs.argmax(1) == 1) & (targets == 1)).sum() / (targets == 1).sum()

    with pytest.raises(ConfigurationError, match="metric 'recall' is no mean over examples: of 32 examples it is"):
        fit(trainer(LOSSES["mean"], metrics=[recall]))
    assert not Path("runs").exists()


# --- batches of one, where a module normalises ---


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"batch_size": 21}, "the last step of a pass has 1 example, where others have 21"),
        ({"batch_size": 7, "gradient_accumulation": 3}, "a piece of a step has 1 example, where others have 7"),
    ],
)
def test_a_batch_of_one_is_refused_where_it_cannot_be_normalised(sizes: Any, what: str) -> None:
    says = f"{what}, and the model cannot compute it: ValueError: Expected more than 1 value.*allowed: drop_last=True"
    with pytest.raises(ConfigurationError, match=says):
        fit(trainer(LOSSES["mean"], Normalised), **sizes)
    assert not Path("runs").exists()
    history = fit(trainer(LOSSES["mean"], Normalised), **sizes, drop_last=True, epochs=2)
    assert (history.report["steps_applied"], history.report["dropped_examples"]) == ([6], 1)
    fit(trainer(LOSSES["mean"]), **sizes)


def test_a_picture_alone_can_be_normalised() -> None:
    class Pictures(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                torch.nn.Unflatten(1, (1, 1, 3)), torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2)
            )

    drawn = torch.get_rng_state()
    assert fit(trainer(LOSSES["mean"], Pictures), batch_size=21).report["steps_applied"] == [4]
    assert torch.equal(drawn, torch.get_rng_state())


# --- rows of tables ---

USERS = ps.Table("users", 4, scale=0.5)
IDS = np.arange(64) % 9


class Looking(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rest = ps.torch.Embedding(USERS), Normalised()
        self.rest[0] = torch.nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        return self.rest(self.rows(ids))


def with_rows(loss: Any, **more: Any) -> ps.Trainer:
    return trainer(loss, Looking, keys=lambda ids: {"users": ids}, **more)


def test_models_that_look_rows_up_are_tried_with_them() -> None:
    ours = with_rows(LOSSES["likelihood"])
    with pytest.warns(UserWarning, match="the loss of an evaluation depends on the size of its batches"):
        ours.fit(IDS, Y, batch_size=16, validation_data=(IDS, Y), verbose=0)
    with pytest.warns(UserWarning, match="the loss of an evaluation depends on the size of its batches"):
        ours.evaluate(IDS, Y, batch_size=16)
    with pytest.raises(ConfigurationError, match="the last step of a pass has 1 example, where others have 21"):
        ours.fit(IDS, Y, batch_size=21, verbose=0)

    def root(outputs: Any, targets: Any) -> Any:
        return ((outputs[:, 0] - targets) ** 2).mean().sqrt()

    with pytest.raises(ConfigurationError, match="metric 'root' is no mean over examples"):
        with_rows(LOSSES["mean"], metrics=[root]).fit(IDS, Y, batch_size=16, verbose=0)


# --- while it trains ---


@pytest.mark.parametrize("name", KNOWN)
def test_an_epoch_s_loss_is_that_of_all_its_examples_whatever_the_batches_and_pieces(name: str) -> None:
    """Of weights that hardly move: with a learning rate of 1e-30."""
    found = []
    for size, pieces in ((64, 1), (8, 1), (4, 2)):
        ours = ps.Trainer(ps.torch.Model(Net, LOSSES[name]), ps.SGD(1e-30), ps.OneDeviceStrategy(), name="it")
        due = ours.evaluate((X, Y))["loss"]
        found += fit(ours, batch_size=size, gradient_accumulation=pieces).history["loss"]
    assert found == pytest.approx([due] * 3, rel=1e-5)


def test_words_that_are_ignored_in_some_batches_count_in_no_epoch() -> None:
    loss = torch.nn.CrossEntropyLoss()
    some = np.where(np.arange(64)[:, None] < 32, np.abs(TOKENS) % 4, TOKENS)
    for size, pieces in ((8, 1), (2, 4)):
        ours = ps.Trainer(ps.torch.Model(Tagger, loss), ps.SGD(1e-30), ps.OneDeviceStrategy(), name="it")
        due = loss(ours.model()(torch.tensor(X)), torch.tensor(some)).item()
        assert fit(ours, some, batch_size=size, gradient_accumulation=pieces).history["loss"][0] == pytest.approx(due)


def test_metrics_are_of_the_outputs_of_training() -> None:
    calls = []

    class Told(Net):
        def forward(self, inputs: Any) -> Any:
            calls.append(len(inputs))
            return super().forward(inputs)

    found = []
    for metrics in ([], ["accuracy"]):
        model = ps.torch.Model(Told, functional.cross_entropy, metrics=metrics)
        ours = ps.Trainer(model, ps.SGD(1e-30), ps.OneDeviceStrategy(), name="it")
        due = ours.evaluate((X, Y))
        calls.clear()
        history = fit(ours, batch_size=8).history
        found.append(len(calls))
    assert history["accuracy"] == [due["accuracy"]]
    assert found[0] == found[1] >= 8, "a forward pass a step, with metrics and without"


# --- the parts of a batch that workers share ---


@pytest.mark.parametrize(
    ("loss", "module", "targets"),
    [
        *((LOSSES[name], Net, Y) for name in KNOWN),
        (torch.nn.CrossEntropyLoss(), Tagger, TOKENS),
        (torch.nn.CrossEntropyLoss(ignore_index=-1), Net, np.where(np.arange(64) % 16 < 5, -1, Y)),  # all of a part
        (torch.nn.CrossEntropyLoss(weight=WEIGHT), Net, np.eye(2, dtype=np.float32)[Y]),
    ],
    ids=[*KNOWN, "words", "some", "probabilities"],
)
def test_the_parts_of_a_batch_have_its_gradient(loss: Any, module: Any, targets: Any) -> None:
    """Also where all targets of a part are ignored."""
    source, model = source_of((X, targets)), ps.torch.Model(module, loss)
    values: Any = {name: parts_of(name, value)[1] for name, value in model.initial_variables().items()}
    whole = StepPlan(len(X), 16, 1, 0, shuffle=False)
    parts = replace(whole, parts=4)

    def of_step(steps: StepPlan, step: int) -> Any:
        batch = read_step(model, source, steps, step)
        gradients = model.loss_and_gradients(values, batch, np)[1] if len(batch.inputs) else {}
        return {name: batch.share * np.asarray(gradient) for name, gradient in gradients.items()}

    for batch in range(whole.total):
        found = [of_step(parts, step) for step in range(batch * 4, batch * 4 + 4)]
        for name, due in of_step(whole, batch).items():
            together = sum(part[name] for part in found if part)
            assert together == pytest.approx(due, abs=1e-5), (batch, name)


def test_a_part_whose_single_targets_all_are_ignored_has_no_examples() -> None:
    source, model = source_of((X, np.where(np.arange(64) < 4, -100, Y))), ps.torch.Model(Net, torch.nn.NLLLoss())
    steps = StepPlan(len(X), 16, 1, 0, shuffle=False, parts=4)
    assert [len(read_step(model, source, steps, step).inputs) for step in range(4)] == [0, 4, 4, 4]
