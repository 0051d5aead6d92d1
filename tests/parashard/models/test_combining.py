"""Several keys of a cell: the vectors that models make of their rows, exact gradients, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parashard.data.tree import NO_KEY
from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.model_options import ModelOptions
from parashard.models.base import LooksUp, Model
from parashard.models.building import build_model
from parashard.models.row_places import bags_of, combined, keys_of_lists
from parashard.plan.embedding import Combiner, mixed
from support.click_cases import CLICK_MODELS, COLUMNS, DIMENSION, LISTS, click_spec, click_start, lists_batch, tables
from support.model_cases import SEED, OnBoth, finite_differences

each_model = pytest.mark.parametrize(("options", "numbers"), CLICK_MODELS.values(), ids=CLICK_MODELS.keys())
each_combiner = pytest.mark.parametrize("combiner", ["sum", "mean"])
FIRST = np.array([[5, 7, NO_KEY], [NO_KEY] * 3, [7, 7, 5]])
SECOND = np.array([[NO_KEY], [8], [NO_KEY]])


def built(options: Any, numbers: int = 3, combiner: Combiner | None = None, columns: int = COLUMNS) -> Model:
    spec = click_spec(numbers, columns=columns, lists=True)
    return build_model(validated(ModelOptions, options), spec, SEED, None, tables(combiner=combiner))


# --- the vectors ---


def test_look_ups_are_those_of_single_keys_and_then_column_by_column() -> None:
    assert keys_of_lists(np.array([[1, 2], [3, 4], [5, 6]]), [FIRST, SECOND]).tolist() == [
        *[1, 2, 3, 4, 5, 6],
        *[5, 7, 7, 7, 5],
        8,
    ]
    bags = bags_of([FIRST, SECOND], np)
    assert bags.of.tolist() == [0, 0, 4, 4, 4, 3]  # example * 2 + column
    assert bags.sizes.tolist() == [2, 0, 0, 1, 3, 0]


@pytest.mark.parametrize(
    ("combiner", "due", "by_rows"),
    [
        ("sum", [[3.0], [0.0], [0.0], [32.0], [28.0], [0.0]], [1, 1, 5, 5, 5, 4]),
        ("mean", [[1.5], [0.0], [0.0], [32.0], [28 / 3], [0.0]], [0.5, 0.5, 5 / 3, 5 / 3, 5 / 3, 4]),
    ],
)
def test_a_bag_is_the_sum_or_the_mean_of_its_rows(combiner: str, due: Any, by_rows: list[float]) -> None:
    rows = 2.0 ** np.arange(6)[:, None]  # 1 2 | 4 8 16 | 32
    vectors, pull_back = combined(rows, bags_of([FIRST, SECOND], np), combiner, np)
    np.testing.assert_allclose(vectors, due)
    np.testing.assert_allclose(pull_back(np.arange(1.0, 7)[:, None])[:, 0], by_rows)


@each_combiner
def test_a_model_gets_single_keys_and_then_lists(combiner: Combiner) -> None:
    model: Any = built({"kind": "fm"}, combiner=combiner)
    batch = lists_batch(model, 3, n=6)
    variables = click_start(model, batch, np.float64)
    vectors, _ = model.look_up(variables, batch, "deep", np)
    assert vectors.shape == (6, COLUMNS + len(LISTS), DIMENSION)
    of_key = dict(zip(batch.keys["deep"].tolist(), variables["deep"], strict=True))
    for example in range(6):
        for column, key in enumerate(batch.inputs["keys"][example]):
            np.testing.assert_array_equal(vectors[example, column], of_key[int(mixed(key)[0])])
        for place, name in enumerate(LISTS):
            keys = [key for key in batch.inputs["lists"][name][example] if key != NO_KEY]
            total = sum((of_key[int(mixed(key)[0])] for key in keys), np.zeros(DIMENSION))
            due = total / max(1, len(keys)) if combiner == "mean" else total
            np.testing.assert_allclose(vectors[example, COLUMNS + place], due, rtol=1e-12)


def test_the_default_is_the_mean() -> None:
    models = [built({"kind": "fm"}, combiner=combiner) for combiner in (None, "mean", "sum")]
    batch = lists_batch(models[0], 3)
    losses = [model.loss_and_gradients(click_start(model, batch), batch, np)[0] for model in models]
    assert losses[0] == losses[1] != losses[2]


# --- gradients ---


@each_model
@each_combiner
def test_gradients_of_rows_of_lists_are_those_of_finite_differences(
    options: Any, numbers: int, combiner: Combiner
) -> None:
    model = built(options, numbers, combiner)
    batch = lists_batch(model, numbers)
    variables = click_start(model, batch, np.float64)
    _, gradients = model.loss_and_gradients(variables, batch, np)
    assert gradients.keys() == variables.keys()
    for name, expected in finite_differences(model, variables, batch).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)


def test_a_table_may_have_nothing_but_lists() -> None:
    model = built({"kind": "fm"}, columns=0)
    batch = lists_batch(model, 3, columns=0)
    variables = click_start(model, batch, np.float64)
    _, gradients = model.loss_and_gradients(variables, batch, np)
    expected = finite_differences(model, variables, batch)
    for name in ("wide", "deep"):
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-5, atol=1e-8)


def test_examples_without_any_key_look_up_no_row() -> None:
    model = built({"kind": "deepfm"}, columns=0)
    batch = lists_batch(model, 3, n=1, columns=0)  # the first example's lists are empty
    assert isinstance(model, LooksUp)
    assert model.keys(batch)["deep"].shape == (0,)
    variables = click_start(model, batch)
    loss, gradients = model.loss_and_gradients(variables, batch, np)
    assert np.isfinite(loss)
    assert gradients["deep"].shape == (0, DIMENSION)  # type: ignore[index]


def test_an_example_s_loss_depends_on_no_other_s_lists() -> None:
    model = built({"kind": "wide_deep"})
    batch = lists_batch(model, 3, n=5)
    variables = click_start(model, batch, np.float64)
    logits: Any = model.logits(variables, batch, None, np)[0]  # type: ignore[attr-defined]
    single = len(batch.inputs["keys"]) * COLUMNS
    rows = batch.places["deep"]
    lists = batch.inputs["lists"]
    for example in range(5):
        inputs = {
            "numbers": batch.inputs["numbers"][[example]],
            "keys": batch.inputs["keys"][[example]],
            "lists": {name: keys[[example]] for name, keys in lists.items()},
        }
        kept, first = [rows[:single].reshape(5, -1)[example]], single
        for keys in lists.values():
            counts = (keys != NO_KEY).sum(axis=1)
            begin = first + counts[:example].sum()
            kept.append(rows[begin : begin + counts[example]])
            first += counts.sum()
        places = dict.fromkeys(batch.places, np.concatenate(kept))
        alone = replace(batch, inputs=inputs, targets=batch.targets[[example]], places=places)
        found = model.logits(variables, alone, None, np)[0]  # type: ignore[attr-defined]
        np.testing.assert_allclose(found[0], logits[example], rtol=1e-12)


def test_models_with_lists_use_what_both_namespaces_have() -> None:
    model = built({"kind": "deepfm"}, combiner="mean")
    batch = lists_batch(model, 3)
    variables = click_start(model, batch)
    model.loss_and_gradients(variables, batch, OnBoth())
    model.evaluate(variables, batch, OnBoth())


@pytest.mark.gpu
@each_combiner
def test_a_gpu_combines_as_numpy_does(combiner: Combiner, xp_gpu: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((6, DIMENSION)).astype(np.float32)
    due, due_back = combined(rows, bags_of([FIRST, SECOND], np), combiner, np)
    lists = [xp_gpu.asarray(FIRST), xp_gpu.asarray(SECOND)]
    found, back = combined(xp_gpu.asarray(rows), bags_of(lists, xp_gpu), combiner, xp_gpu)
    np.testing.assert_allclose(found.get(), due, rtol=1e-6)
    np.testing.assert_allclose(back(xp_gpu.asarray(due)).get(), due_back(due), rtol=1e-6)


# --- what is refused ---


def test_a_combiner_without_lists_is_refused() -> None:
    options = validated(ModelOptions, {"kind": "fm"})
    said = "tables.deep.combiner: found 'sum', and no column has several keys in a cell; allowed: unset, or data.list_"
    with pytest.raises(ConfigurationError, match=said):
        build_model(options, click_spec(), SEED, None, tables(combiner="sum"))


@pytest.mark.parametrize("kind", ["wide_deep", "fm", "deepfm", "dlrm"])
def test_a_table_that_no_model_of_clicks_uses_is_refused(kind: str) -> None:
    options = validated(ModelOptions, {"kind": kind})
    with pytest.raises(
        ConfigurationError, match=rf"^tables\.\"a b\": model kind '{kind}' does not use it; allowed: tab"
    ):
        build_model(options, click_spec(), SEED, None, tables(wide=1, deep=3, **{"a b": 2}))
