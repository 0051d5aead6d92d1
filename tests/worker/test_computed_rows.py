"""Task with embedding tables: what rows a step and an evaluation need, and the gradients of rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from parashard.data.base import Batch, DataSpec
from parashard.errors import NonFiniteGradient
from parashard.models.base import StepSignal
from parashard.plan.embedding import EmbeddingTable, Keys, mixed, unmixed
from parashard.plan.optimizers import SGD
from parashard.plan.steps import StepPlan
from parashard.plan.variables import Variable
from parashard.process.run_files import short_path
from parashard_worker import computing
from parashard_worker.computing import Task, WrongResult
from parashard_worker.device import Cpu
from support.in_process import plan_of, variables_of
from support.loop_cases import BATCH_SIZE, EXAMPLES, HELD_OUT, Numbered

VARIABLES = variables_of(Variable("seen", (1, 8), state="counter"), Variable("weight", (4,)))
VALUES = {name: np.zeros(variable.shape, np.float32) for name, variable in VARIABLES.items()}
USER, ITEM = (EmbeddingTable(name, 3, SGD(0.1)) for name in ("user", "item"))


class Looking:
    """A model of users, one for four examples, and of items, of which it names none; `returned` replaces gradients."""

    def __init__(self, **returned: Any) -> None:
        self.returned = returned
        self.given: list[dict[str, Any]] = []

    def initial_variables(self) -> Mapping[str, Variable]:
        return VARIABLES

    def keys(self, batch: Batch) -> Mapping[str, Any]:
        return {"user": batch.indices[:, None] // 4}

    def loss_and_gradients(
        self, variables: Mapping[str, Any], batch: Batch, xp: Any
    ) -> tuple[float, Mapping[str, Any] | StepSignal]:
        self.given.append(dict(variables))
        gradients = {
            "seen": np.full((1, 8), 100.0),
            "weight": np.ones(4),
            "user": np.full(variables["user"].shape, 2.0),
            **self.returned,
        }
        return 0.0, {name: gradient for name, gradient in gradients.items() if gradient is not Ellipsis}

    def evaluate(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Mapping[str, float]:
        self.given.append(dict(variables))
        rows = variables["user"][batch.places["user"]]
        assert rows.shape == (len(batch.indices), 1, 3)
        return {"user": float(rows.mean())}


def task_of(model: Any, *tables: EmbeddingTable, clip_norm: float | None = None, source: Any = None) -> Task:
    steps = StepPlan(EXAMPLES, BATCH_SIZE, epochs=1, seed=1)
    by_name = {table.name: table for table in tables}
    return Task(model, source or Numbered(), steps, plan_of(VARIABLES), Cpu(), clip_norm, None, by_name)


def rows_of(keys: Keys) -> Any:
    """Return rows that say whose they are."""
    return np.repeat(unmixed(keys).astype(np.float32)[:, None], 3, axis=1)


def pushed(clip_norm: float | None = None, **returned: Any) -> dict[str, Any]:
    """Return the gradients of the first step."""
    task = task_of(Looking(**returned), USER, ITEM, clip_norm=clip_norm)
    batch = task.batch_of(0)
    gradients = task.gradients(batch, {**VALUES, "user": rows_of(batch.keys["user"])})[2]
    assert gradients is not None
    return gradients


USERS = len(task_of(Looking(), USER).batch_of(0).keys["user"])
assert 1 < USERS < BATCH_SIZE, "a user has several of the first step's examples"

# --- what a step needs ---


def test_a_batch_has_the_keys_of_its_examples() -> None:
    task = task_of(Looking(), USER, ITEM)
    for step in range(5):
        batch = task.batch_of(step)
        assert batch.keys.keys() == batch.places.keys() == {"user"}
        assert unmixed(batch.keys["user"])[batch.places["user"][:, 0]].tolist() == (batch.indices // 4).tolist()


def test_a_model_of_a_job_without_tables_is_not_asked_for_keys() -> None:
    class NoKeys(Looking):
        def keys(self, batch: Batch) -> Mapping[str, Any]:
            raise AssertionError("there are no tables")

    task = task_of(NoKeys())
    assert (task.batch_of(0).keys, task.held_out_keys()) == ({}, {})


def test_rows_are_given_to_the_model_among_the_variables() -> None:
    model = Looking()
    task = task_of(model, USER)
    batch = task.batch_of(0)
    rows = rows_of(batch.keys["user"])
    task.gradients(batch, {**VALUES, "user": rows})
    assert model.given[0].keys() == {*VALUES, "user"}
    assert model.given[0]["user"] is rows


# --- an evaluation ---


@pytest.mark.parametrize("at_once", [1, 2, 3, HELD_OUT, 1000])
def test_an_evaluation_needs_the_keys_of_all_pieces_each_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(computing, "EVALUATION_EXAMPLES", at_once)
    keys = task_of(Looking(), USER, ITEM).held_out_keys()
    assert keys.keys() == {"user"}
    assert keys["user"].tolist() == np.sort(mixed(np.arange((HELD_OUT + 3) // 4))).tolist()


@pytest.mark.parametrize("at_once", [1, 2, 3, HELD_OUT, 1000])
def test_every_piece_of_an_evaluation_finds_its_rows(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(computing, "EVALUATION_EXAMPLES", at_once)
    task = task_of(Looking(), USER)
    keys = task.held_out_keys()
    metrics = task.metrics({**VALUES, "user": rows_of(keys["user"])}, nullcontext, keys)
    assert metrics["user"] == pytest.approx(np.mean(np.arange(HELD_OUT) // 4))


def test_without_held_out_examples_no_row_is_needed() -> None:
    class NothingHeldOut(Numbered):
        spec = DataSpec(EXAMPLES, 0, (1,), 2, "00")

    assert task_of(Looking(), USER, source=NothingHeldOut()).held_out_keys() == {}


# --- gradients of rows ---


def test_gradients_of_rows_are_of_the_rows_in_their_order() -> None:
    own = np.arange(3.0 * USERS).reshape(USERS, 3)
    found = pushed(user=own)
    assert found.keys() == {*VARIABLES, "user"}
    assert found["user"].dtype == np.float32
    assert found["user"].tolist() == own.tolist()


def test_none_is_a_gradient_of_rows_that_is_not_sent() -> None:
    assert pushed(user=None).keys() == set(VARIABLES)


def test_a_step_that_moves_nothing_moves_no_row() -> None:
    class Still(Looking):
        def loss_and_gradients(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> tuple[float, StepSignal]:
            return 0.5, StepSignal.NO_PUSH

    task = task_of(Still(), USER)
    batch = task.batch_of(0)
    assert task.gradients(batch, {**VALUES, "user": rows_of(batch.keys["user"])}) == (0.5, BATCH_SIZE, None)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no gradient": ({"user": ...}, "returned no gradient for 'user'; due is one for each variable"),
    "a row too few": (
        {"user": np.ones((USERS - 1, 3))},
        rf"'user' of shape \({USERS - 1}, 3\); the variable has \({USERS}, 3\)",
    ),
    "a gradient of each use": ({"user": np.ones((BATCH_SIZE, 1, 3))}, rf"of shape \({BATCH_SIZE}, 1, 3\)"),
    "another dimension": ({"user": np.ones((USERS, 2))}, rf"of shape \({USERS}, 2\)"),
    "whole numbers": ({"user": np.ones((USERS, 3), np.int64)}, "'user' of int64; gradients are floating point"),
    "a list": ({"user": [[1.0] * 3] * USERS}, "returned a list for 'user'; due is an array"),
    "no such table": ({"artist": np.ones((1, 3))}, "'artist', which is none of its variables: seen, user, weight"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_gradient_of_the_rows_is_the_models_mistake(wrong: str) -> None:
    returned, says = WRONG[wrong]
    with pytest.raises(WrongResult, match=says) as error:
        pushed(**returned)
    place = f"{short_path(__file__)}:{Looking.loss_and_gradients.__code__.co_firstlineno}: "
    assert str(error.value).startswith(f"{place}loss_and_gradients returned ")


@pytest.mark.parametrize("returned", [{}, {"item": None}, {"item": np.ones((0, 3))}, {"item": np.ones((2, 3))}])
def test_a_table_that_the_batch_does_not_need_is_not_sent(returned: dict[str, Any]) -> None:
    assert "item" not in pushed(**returned)


@pytest.mark.parametrize("returned", [..., None, np.ones((0, 3)), np.ones((2, 3))], ids=["missing", "None", "0", "2"])
def test_neither_is_one_of_which_it_names_no_key(returned: Any) -> None:
    class Nobody(Looking):
        def keys(self, batch: Batch) -> Mapping[str, Any]:
            return {"user": batch.indices[:0]}

    task = task_of(Nobody(user=returned), USER)
    batch = task.batch_of(0)
    assert batch.keys["user"].shape == (0,)
    gradients = task.gradients(batch, {**VALUES, "user": rows_of(batch.keys["user"])})[2]
    assert gradients is not None
    assert gradients.keys() == set(VARIABLES)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_of_a_row_that_is_not_finite_is_sent_to_no_shard(bad: float) -> None:  # P6
    spoilt = np.ones((USERS, 3))
    spoilt[1, 2] = bad
    with pytest.raises(NonFiniteGradient, match=r"the gradient of 'user' became (NaN|infinite) at step 0"):
        pushed(user=spoilt)


def test_rows_are_part_of_the_norm_that_is_clipped() -> None:  # P15: and state is not
    norm = (4 * 1.0**2 + USERS * 3 * 2.0**2) ** 0.5
    found = pushed(clip_norm=norm / 4)
    assert found["weight"].tolist() == pytest.approx([0.25] * 4)
    assert found["user"].ravel().tolist() == pytest.approx([0.5] * 3 * USERS)
    assert found["seen"].tolist() == [[100.0] * 8]
    assert pushed(clip_norm=norm * 1.001)["user"].tolist() == [[2.0] * 3] * USERS


def test_an_evaluation_has_as_many_keys_as_it_needs() -> None:
    """The bound is a step's: held-out examples are judged many at once."""

    class Own(Looking):
        def keys(self, batch: Batch) -> Mapping[str, Any]:
            return {"user": batch.indices}

    task = task_of(Own(), EmbeddingTable("user", 3, SGD(0.1), keys_per_step_max=BATCH_SIZE))
    assert len(task.batch_of(0).keys["user"]) == BATCH_SIZE
    assert len(task.held_out_keys()["user"]) > BATCH_SIZE
