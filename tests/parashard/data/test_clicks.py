"""The synthetic click log: a function of the index, ids by Zipf that come and go, labels of a known logit."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from parashard.data import open_source
from parashard.data.base import any_thread, reads_ahead
from parashard.data.generated import ClicksSource, true_auc
from parashard.data.options import ClicksOptions, DataOptions
from parashard.frozen_model import validated
from parashard.metrics import AUC


def source_of(**options: Any) -> ClicksSource:
    return ClicksSource(ClicksOptions(**{"examples": 1000, "columns": 3, "numbers": 2, "vocabulary": 50, **options}))


def ids_of(source: ClicksSource, indices: Any, columns: int = 3) -> Any:
    """Return the ids of examples, each of its own column."""
    keys = source.examples(indices)[0]["keys"]
    assert (keys % columns == np.arange(columns)).all()
    return keys // columns


def test_serves_what_the_options_say() -> None:
    source = source_of(held_out=20, columns=5)
    assert (source.spec.examples, source.spec.held_out, source.spec.classes) == (1000, 20, 2)
    inputs, targets = source.examples(np.arange(100))
    assert (inputs["numbers"].shape, inputs["numbers"].dtype) == ((100, 2), np.float32)
    assert (inputs["keys"].shape, inputs["keys"].dtype) == ((100, 5), np.int64)
    assert (targets.shape, targets.dtype, set(targets.tolist())) == ((100,), np.int64, {0, 1})
    assert [str(field) for field in source.spec.fields] == [
        "inputs/numbers (2) float32",
        "inputs/keys (5) int64",
        "targets () int64",
    ]
    assert len(source.held_out(15, 30)[1]) == 5
    assert source.spec.preprocessing is None
    assert any_thread(source)
    assert reads_ahead(source)


@given(st.lists(st.integers(0, 2**40 - 1), max_size=20), st.integers(0, 2**64), st.sampled_from([0.0, 0.5, 30.0]))
def test_an_example_does_not_depend_on_its_company(indices: list[int], seed: int, drift: float) -> None:
    source = source_of(examples=2**40, seed=seed, drift=drift)
    inputs, targets = source.examples(np.array(indices, np.int64))
    for place, index in enumerate(indices):
        alone, target = source.examples(np.array([index]))
        assert alone["keys"][0].tolist() == inputs["keys"][place].tolist()
        assert alone["numbers"][0].tolist() == inputs["numbers"][place].tolist()
        assert target[0] == targets[place]


def test_held_out_examples_go_on_where_training_ends() -> None:
    source, longer = source_of(held_out=50, drift=0.0), source_of(examples=1050)
    inputs, targets = source.held_out(0, 50)
    due, due_targets = longer.examples(np.arange(1000, 1050))
    np.testing.assert_array_equal(inputs["keys"], due["keys"])
    np.testing.assert_array_equal(inputs["numbers"], due["numbers"])
    np.testing.assert_array_equal(targets, due_targets)


def test_equal_ids_of_two_columns_have_different_keys() -> None:
    keys = source_of().examples(np.arange(1000))[0]["keys"]
    assert not set(keys[:, 0]) & set(keys[:, 1])
    assert len(np.unique(keys[:, 0])) <= 50


@pytest.mark.parametrize(("zipf", "vocabulary"), [(1.2, 10_000), (1.0, 500), (0.0, 40), (2.0, 1000), (0.5, 1)])
def test_ids_are_as_frequent_as_their_ranks_say(zipf: float, vocabulary: int) -> None:
    rows, columns = 30_000, 4
    source = source_of(examples=rows, columns=columns, vocabulary=vocabulary, zipf=zipf)
    ids = ids_of(source, np.arange(rows), columns)
    assert 0 <= ids.min() <= ids.max() < vocabulary
    edges = np.arange(1, vocabulary + 2, dtype=np.float64)
    below = np.log(edges) if zipf == 1 else (edges ** (1 - zipf) - 1) / (1 - zipf)
    shares = np.diff(below) / below[-1]
    for column in range(columns):
        found = np.bincount(ids[:, column], minlength=vocabulary)[np.arange(vocabulary) * source._stride % vocabulary]
        spread = 5 * np.sqrt(shares / rows) + 5 / rows
        assert (np.abs(found / rows - shares) < spread)[: min(vocabulary, 200)].all()
        assert found[200:].sum() / rows == pytest.approx(shares[200:].sum(), abs=0.02)


def test_without_drift_ids_stay_and_with_it_each_is_replaced_once() -> None:
    rows, vocabulary = 40_000, 20
    ids = ids_of(source_of(examples=rows, vocabulary=vocabulary, zipf=0.0), np.arange(rows))
    assert len(np.unique(ids)) == vocabulary
    ids = ids_of(source_of(examples=rows, vocabulary=vocabulary, zipf=0.0, drift=1.0), np.arange(rows))
    assert len(np.unique(ids)) == 2 * vocabulary - 1, "the last one goes as training ends"
    for start in range(0, rows, 2000):  # a twentieth, in which one id goes and another comes
        first = start * vocabulary // rows
        assert set(np.unique(ids[start : start + 2000])) == set(range(first, first + vocabulary))


def test_what_is_frequent_goes_no_sooner_than_what_is_rare() -> None:
    source = source_of(examples=20_000, vocabulary=100, zipf=1.5, drift=0.5)
    ids = ids_of(source, np.arange(20_000))
    places = np.bincount(ids[:2000, 0] % 100)
    counts = [np.bincount(part[:, 0] % 100, minlength=100) for part in np.array_split(ids, 10)]
    for count in counts:  # a place is as frequent as it was, whichever id has it
        assert count.argmax() == places.argmax()


# --- labels ---


def test_clicks_are_drawn_from_the_true_logits() -> None:
    source = source_of(examples=60_000, columns=8, numbers=4)
    inputs, targets = source.examples(np.arange(60_000))
    shares = 1 / (1 + np.exp(-source.true_logits(inputs["numbers"], inputs["keys"])))
    for part in np.array_split(np.argsort(shares), 10):
        assert targets[part].mean() == pytest.approx(shares[part].mean(), abs=0.03)
    assert 0.15 < targets.mean() < 0.5


def test_a_logit_is_a_sum_over_keys_and_numbers() -> None:
    source = source_of(numbers=2)
    inputs, _ = source.examples(np.arange(200))
    keys, numbers = inputs["keys"], inputs["numbers"]
    whole = source.true_logits(numbers, keys)
    none = source.true_logits(numbers * 0, keys)
    by_number, *_ = np.linalg.lstsq(numbers.astype(np.float64), whole - none, rcond=None)
    np.testing.assert_allclose(numbers @ by_number, whole - none, atol=1e-9)
    words, places = np.unique(keys, return_inverse=True)
    uses = np.zeros((200, len(words)))
    np.add.at(uses, (np.arange(200)[:, None], places.reshape(keys.shape)), 1)
    by_key, *_ = np.linalg.lstsq(uses, none + 1.0, rcond=None)
    np.testing.assert_allclose(uses @ by_key, none + 1.0, atol=1e-9)
    assert np.std(by_key) > 0.1


@pytest.mark.parametrize("numbers", [0, 2])
def test_the_true_auc_is_that_of_the_true_logits_on_the_held_out_split(numbers: int) -> None:
    source = source_of(held_out=20_000, numbers=numbers, vocabulary=4)  # few ids: without numbers many logits are equal
    inputs, targets = source.held_out(0, 20_000)
    logits = source.true_logits(inputs["numbers"], inputs["keys"])
    noisy = logits + np.random.default_rng(0).normal(size=20_000)
    exact, found = (float(AUC(50_000, from_logits=True).of(scores, targets)) for scores in (logits, noisy))
    assert true_auc(source) == pytest.approx(exact, abs=1e-4)
    assert found < exact - 0.02
    assert 0.6 < exact < 0.9


@pytest.mark.parametrize("held_out", [0, 1])
def test_of_one_class_there_is_no_auc(held_out: int) -> None:
    assert math.isnan(true_auc(source_of(held_out=held_out)))


def test_there_may_be_no_numbers() -> None:
    inputs, targets = source_of(numbers=0).examples(np.arange(50))
    assert inputs["numbers"].shape == (50, 0)
    assert set(targets.tolist()) == {0, 1}


# --- bits and options ---


def test_the_bits_are_pinned_for_ever() -> None:
    source = ClicksSource(ClicksOptions(examples=1000, drift=0.7, vocabulary=1000, seed=5))
    inputs, targets = source.examples(np.arange(1000))
    content = inputs["numbers"].tobytes() + inputs["keys"].tobytes() + targets.tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == "db0a9f38be7d2740"


def test_the_fingerprint_follows_every_parameter() -> None:
    changed = {"examples": 9, "held_out": 9, "numbers": 9, "columns": 9, "vocabulary": 9, "zipf": 0.9, "drift": 0.9}
    changes: list[dict[str, Any]] = [{}, *({name: value} for name, value in changed.items()), {"seed": 9}]
    fingerprints = [ClicksSource(ClicksOptions(**change)).spec.fingerprint for change in changes]
    assert len(set(fingerprints)) == len(changes)
    assert fingerprints[0] == ClicksSource(ClicksOptions()).spec.fingerprint


def test_the_largest_log_has_keys_of_64_bits() -> None:
    largest = ClicksOptions(examples=2**40, columns=1024, numbers=1024, vocabulary=2**31, drift=1000.0, zipf=4.0)
    inputs, _ = ClicksSource(validated(ClicksOptions, largest.plain())).examples(np.array([0, 2**40 - 1]))
    assert (inputs["keys"] >= 0).all()
    assert (np.diff(inputs["keys"] // 1024, axis=0) > 999 * 2**31).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples": 0},
        {"numbers": -1},
        {"columns": 0},
        {"vocabulary": 0},
        {"vocabulary": 2**31 + 1},
        {"zipf": -0.1},
        {"zipf": math.inf},
        {"drift": -0.5},
        {"drift": 1.0, "examples": 1, "held_out": 2**40, "vocabulary": 2**31},
        {"features": 3},
    ],
)
def test_refuses_options_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        validated(ClicksOptions, wrong)


def test_it_is_opened_by_its_name() -> None:
    source = open_source(validated(DataOptions, {"source": "clicks", "examples": 30}))
    assert isinstance(source, ClicksSource)
    assert source.spec.examples == 30
