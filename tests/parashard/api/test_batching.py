"""How many examples a step has, and its gradient in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parashard.api.jobs import epochs_of_a_job, examples_of_a_step
from parashard.api.splitting import Accumulated
from parashard.data.base import Batch
from parashard.errors import ConfigurationError
from parashard.plan.state import counter_rows, counter_values
from parashard.plan.variables import Variable


@pytest.mark.parametrize(
    ("consistency", "given", "due"),
    [
        ("async", {}, 32),
        ("async", {"own": 16}, 16),
        ("sync:4", {"batch_size": 8}, 8),
        ("sync:4", {"global_batch_size": 64}, 16),
        ("async", {"global_batch_size": 64}, 64),
        ("ssp:3", {"global_batch_size": 64}, 64),
        ("async", {"batch_size": 8, "gradient_accumulation": 4}, 32),
        ("sync:2", {"global_batch_size": 64, "gradient_accumulation": 4}, 32),
        ("async", {"batched": True, "own": 1}, 1),
        ("async", {"batched": True, "own": 1, "gradient_accumulation": 4}, 1),
        ("async", {"batch_size": 16, "own": 16}, 16),
    ],
)
def test_a_step_has_its_share_of_a_round(consistency: str, given: Any, due: int) -> None:
    assert size(consistency, **given) == due


def size(
    consistency: str = "async",
    batch_size: Any = None,
    global_batch_size: Any = None,
    gradient_accumulation: Any = 1,
    own: int | None = None,
    batched: bool = False,
) -> int:
    return examples_of_a_step(consistency, batch_size, global_batch_size, gradient_accumulation, own, batched=batched)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": 8, "global_batch_size": 8}, "batch_size and global_batch_size: allowed is one of the two"),
        (
            {"consistency": "sync:3", "global_batch_size": 64},
            "global_batch_size is 64, which 3 steps of a round do not",
        ),
        (
            {"consistency": "sync:4", "global_batch_size": 8, "gradient_accumulation": 4},
            "4 steps of a round in 4 pieces",
        ),
        ({"batch_size": 8, "batched": True, "own": 1}, "the items of these data are batches already"),
        ({"batch_size": 8, "own": 16}, "batch_size is 8, and the DataLoader's is 16: say it once"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, found 0"),
        ({"gradient_accumulation": 2.0}, "gradient_accumulation must be a whole number of at least 1, found 2.0"),
        ({"global_batch_size": True}, "global_batch_size must be a whole number of at least 1, found True"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        size(**given)
    assert says in refused.value.message


def test_a_job_has_the_epochs_that_are_left() -> None:
    assert epochs_of_a_job(5, 0) == {"epochs": 5}
    assert epochs_of_a_job(5, 3) == {"epochs": 2, "first_epoch": 3}
    for initial, says in (
        (5, "is 5 and epochs is 5: there is none to train"),
        (-1, "at least 0, found -1"),
        (1.5, "1.5"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            epochs_of_a_job(5, initial)  # type: ignore[arg-type]


class Mean:
    """The loss is the mean of the inputs, times the weight; `still` has no gradient in a piece without example 0."""

    def __init__(self) -> None:
        self.pieces: list[Batch] = []

    def initial_variables(self) -> Any:
        return {"w": np.ones(2, np.float32)}

    def loss_and_gradients(self, variables: Any, batch: Batch, xp: Any) -> Any:
        self.pieces.append(batch)
        mean = batch.inputs["x"].mean(axis=0)
        still = np.ones(1, np.float32) if 0 in batch.indices else None
        return float((mean * variables["w"]).sum()), {"w": mean.astype(np.float32), "still": still}

    def evaluate(self, variables: Any, batch: Batch, xp: Any) -> Any:
        return {"loss": 1.0}


@pytest.mark.parametrize(("examples", "sizes"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (2, [1, 1])])
def test_a_gradient_in_pieces_is_the_mean_over_all_examples(examples: int, sizes: list[int]) -> None:
    x = np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)
    batch = Batch(3, 1, np.arange(examples), {"x": x}, np.arange(examples), np.arange(examples, dtype=np.float32))
    variables = {"w": np.array([1, 2], np.float32)}
    alone, model = Mean(), Mean()
    due, gradients = alone.loss_and_gradients(variables, batch, np)
    loss, found = Accumulated(model, 4).loss_and_gradients(variables, batch, np)
    assert [len(piece.targets) for piece in model.pieces] == sizes
    assert [(piece.step, piece.epoch, piece.part) for piece in model.pieces] == [(3, 1, i) for i in range(len(sizes))]
    assert np.concatenate([piece.indices for piece in model.pieces]).tolist() == batch.indices.tolist()
    assert np.concatenate([piece.weights for piece in model.pieces]).tolist() == list(range(examples))
    assert loss == pytest.approx(due, rel=1e-5)
    np.testing.assert_allclose(found["w"], gradients["w"], rtol=1e-5)
    assert found["still"] == pytest.approx(sizes[0] / examples)


class Stateful(Mean):
    """A model that counts examples, and pushes a piece's own value for its average and what is added to its sum."""

    def initial_variables(self) -> Any:
        counter = Variable("seen", (1, 8), state="counter"), np.zeros((1, 8), np.float32)
        average = Variable("mean", (2,), state="average:0.1"), np.zeros(2, np.float32)
        added = Variable("added", (1,), state="sum"), np.zeros(1, np.float32)
        return {"w": np.ones(2, np.float32), "seen": counter, "mean": average, "added": added}

    def loss_and_gradients(self, variables: Any, batch: Batch, xp: Any) -> Any:
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        total = np.array([batch.inputs["x"].sum()], np.float32)
        counted = counter_rows(np.array([200 * len(batch.targets)]))
        return loss, {"w": gradients["w"], "seen": counted, "mean": gradients["w"], "added": total}


@pytest.mark.parametrize("examples", [8, 7])
def test_state_in_pieces_counters_and_sums_are_added_and_averages_averaged(examples: int) -> None:
    x = np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)
    batch = Batch(3, 1, np.arange(examples), {"x": x}, np.arange(examples))
    found = Accumulated(Stateful(), 4).loss_and_gradients({"w": np.array([1, 2], np.float32)}, batch, np)[1]
    assert counter_values(found["seen"]).tolist() == [200 * examples]  # past a byte: carries are exact, too
    np.testing.assert_allclose(found["mean"], x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found["added"], [x.sum()], rtol=1e-5)


def test_it_begins_and_is_judged_as_the_model() -> None:
    model = Accumulated(Mean(), 4)
    assert model.initial_variables()["w"].tolist() == [1, 1]
    assert model.evaluate({}, None, np) == {"loss": 1.0}


@pytest.mark.parametrize("epochs", [0, "3", 1.5, True])
def test_epochs_are_named_as_in_fit(epochs: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^epochs must be a whole number of at least 1, found"):
        epochs_of_a_job(epochs, 0)
