"""Into how many parts a script's batches are split, by its data, model and loss."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from support.played_fits import Line, Runs, played_runs  # noqa: F401  # a fixture

X, Y = np.arange(64.0).reshape(32, 2), np.arange(32.0)


class Framed(Line):
    """Has what a framework's model has, so that its loss is tried."""

    def seed(self, seed: int) -> None:
        pass

    def config_sha256(self) -> str:
        return ""

    def predict(self, values: Any, inputs: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Any:
        return {"loss": super().evaluate(variables, batch, xp)["loss"]}

    to_user_object = predict


class Root(Framed):
    """The root of a mean is no mean over examples."""

    def evaluate(self, variables: Any, batch: Any, xp: Any) -> Any:
        return {"loss": super().evaluate(variables, batch, xp)["loss"] ** 0.5}


class Whole(Framed):
    """Cannot compute fewer than 16 examples."""

    def check(self, batch: Any) -> None:
        if len(batch.targets) < 16:
            raise ValueError("16 are needed")


class Summed(Line):
    """A user's own model whose loss is a sum over examples."""

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return loss * len(batch.targets), gradients


class Large(Line):
    """A user's own model that cannot compute fewer than 16 examples."""

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        assert len(batch.targets) >= 16, "16 are needed"
        return super().loss_and_gradients(variables, batch, xp)


class Compiled(Framed):
    """A model that is compiled first, whose losses are no means, as it says itself."""

    means_losses = False

    def loss_and_gradients(self, variables: Any, batch: Any, xp: Any) -> Any:
        raise AssertionError("is not compiled to be tried")


class Batches:
    """Data of which an item is a batch of 8 examples."""

    spec = DataSpec(4, 0, (2,), 0, "00", batched=True)

    def examples(self, indices: Any) -> Any:
        return X[indices[0] * 8 :][:8], Y[indices[0] * 8 :][:8]

    def held_out(self, start: int, stop: int) -> Any:
        raise AssertionError("none is held out")


def policy(runs: Runs, model: Any, data: Any = (X, Y), consistency: str = "auto", **more: Any) -> str:
    """Return the policy that the job of a fit with 4 workers has."""
    strategy = ps.ParameterServerStrategy(2, 4, consistency)
    ps.Trainer(model, ps.SGD(0.1), strategy).fit(data, verbose=0, **more)
    return str(runs.jobs[-1].loaded.job.consistency.policy)


def test_each_worker_computes_a_part_of_at_least_four_examples(runs: Runs) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy(runs, Line(), batch_size=16) == "auto:4"
        assert policy(runs, Framed(), batch_size=16) == "auto:4"
        assert policy(runs, Line(), batch_size=8) == "auto:2"
        assert policy(runs, Line(), batch_size=3) == "auto:1"
        assert policy(runs, Line(), batch_size=16, consistency="auto:3") == "auto:3"
        assert policy(runs, Line(), batch_size=16, consistency="async") == "async"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Root(), "the loss of a batch is not the mean over its examples"),
        (Summed(), "the loss of a batch is not the mean over its examples"),
        (Compiled(), "the loss of a batch is not the mean over its examples"),
        (Large(), "a part of a batch cannot be computed by itself (.*16 are needed"),
        (Whole(), "a part of a batch cannot be computed by itself (.*16 are needed"),
    ],
)
def test_what_cannot_be_split_is_computed_by_one_worker_and_told(runs: Runs, model: Any, says: str) -> None:
    says = "each batch is computed by one worker, and the others wait for it: " + says.replace("(", r"\(")
    with pytest.warns(UserWarning, match=says) as told:
        assert policy(runs, model, batch_size=16) == "auto:1"
    assert told[0].filename == __file__


@pytest.mark.parametrize("model", [Root(), Whole()])
def test_a_number_of_parts_that_cannot_be_is_refused(runs: Runs, model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"consistency is auto:3: .*; name no number of parts"):
        policy(runs, model, batch_size=16, consistency="auto:3")
    assert not runs.jobs


def test_a_sum_that_says_so_is_shared(runs: Runs) -> None:
    model = Summed()
    model.adds_losses = True  # type: ignore[attr-defined]
    assert policy(runs, model, batch_size=16) == "auto:4"


def test_batches_of_the_data_are_split_by_their_own_size(runs: Runs) -> None:
    assert policy(runs, Line(), Batches()) == "auto:2"
    assert policy(runs, Line(), Batches(), "auto:3") == "auto:3"


def test_a_run_goes_on_with_the_parts_that_it_began_with(runs: Runs) -> None:
    def again(consistency: str, workers: int) -> str:
        runs.started_again(exit_code=1)
        strategy = ps.ParameterServerStrategy(2, workers, consistency)
        trainer = ps.Trainer(Line(), ps.SGD(0.1), strategy)
        with pytest.raises(ps.JobFailed):
            trainer.fit((X, Y), batch_size=16, resume=True, verbose=0)
        return str(runs.jobs[-1].loaded.job.consistency.policy)

    assert again("auto", 2) == "auto:2"
    assert again("auto", 4) == "auto:2"
    assert again("auto:4", 4) == "auto:4", "whoever resumes it by another number is refused by the coordinator"
    assert len({run.folder for run in runs.jobs}) == 1
