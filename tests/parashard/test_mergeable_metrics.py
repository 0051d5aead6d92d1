"""Metrics: the states' algebra, figures against exact references, and what does not fit in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from parashard import metrics as m
from parashard.errors import ConfigurationError, WrongModel
from parashard.metrics import Metric, Sums
from parashard.models.evaluation import Totals, metric_states, metrics_by_name

RNG = np.random.default_rng(3)
CLASSES = RNG.normal(size=(40, 6)).round(1)  # with ties
NUMBERS = RNG.integers(0, 6, 40)
SCORES = RNG.random(40).round(2)
BITS = RNG.integers(0, 2, 40)
VALUES = RNG.normal(size=(40, 3)), RNG.normal(size=(40, 3))

CASES: dict[str, tuple[Metric, Any, Any]] = {
    "accuracy": (m.Accuracy(), CLASSES, NUMBERS),
    "top_k": (m.TopK(2), CLASSES, NUMBERS),
    "binary_accuracy": (m.BinaryAccuracy(0.5), SCORES, BITS),
    "mae": (m.MeanAbsoluteError(), *VALUES),
    "mse": (m.MeanSquaredError(), *VALUES),
    "auc": (m.AUC(), SCORES, BITS),
    "function": (m.Mean(lambda outputs, targets: outputs[:, 0] * targets, "product"), CLASSES, NUMBERS),
}
EXACT = {
    "accuracy": np.mean(CLASSES.argmax(1) == NUMBERS),
    "top_k": np.mean([(row > row[own]).sum() < 2 for row, own in zip(CLASSES, NUMBERS, strict=True)]),
    "binary_accuracy": np.mean((SCORES > 0.5) == BITS),
    "mae": np.mean(np.abs(VALUES[0] - VALUES[1])),
    "mse": np.mean((VALUES[0] - VALUES[1]) ** 2),
    "function": np.mean(CLASSES[:, 0] * NUMBERS),
}


def exact_auc(scores: Any, bits: Any) -> float:
    """The statistic of Mann and Whitney: how often a 1 is before a 0, ties as half."""
    apart = scores[bits == 1][:, None] - scores[bits == 0][None, :]
    return float(np.mean((apart > 0) + 0.5 * (apart == 0)))


@pytest.mark.parametrize("case", EXACT)
def test_a_figure_is_that_of_all_examples(case: str) -> None:
    metric, outputs, targets = CASES[case]
    assert float(metric.of(outputs, targets)) == pytest.approx(EXACT[case], rel=1e-12)


@pytest.mark.parametrize("case", CASES)
@given(order=st.permutations(range(40)), cuts=st.sets(st.integers(1, 39), max_size=6), whole_first=st.booleans())
def test_states_of_pieces_in_any_order_and_grouping_are_that_of_the_whole(
    case: str, order: list[int], cuts: set[int], whole_first: bool
) -> None:
    metric, outputs, targets = CASES[case]
    pieces = [metric.of(outputs[part], targets[part]) for part in np.split(np.array(order), sorted(cuts))]
    left, right = pieces[0], pieces[-1]
    for piece in pieces[1:]:
        left = left + piece
    for piece in reversed(pieces[:-1]):
        right = piece + right if whole_first else right + piece
    whole = metric.of(outputs, targets)
    for merged in (left, right):
        assert merged.values.shape == (metric.length,)
        np.testing.assert_allclose(merged.values, whole.values, rtol=1e-12)
        assert float(merged) == pytest.approx(float(whole), rel=1e-12)
    if case in ("accuracy", "top_k", "binary_accuracy", "auc"):  # counts: to the bit
        assert left.values.tobytes() == right.values.tobytes() == whole.values.tobytes()


@given(
    scores=arrays.arrays(np.float32, 30, elements=st.floats(0, 1, width=32)),
    thresholds=st.integers(2, 300),
    logits=st.booleans(),
)
def test_auc_is_the_rank_statistic_but_for_pairs_within_a_bin(scores: Any, thresholds: int, logits: bool) -> None:
    bits = np.arange(30) % 3 == 0
    metric = m.AUC(thresholds, from_logits=logits)
    state = metric.of(20 * scores - 10 if logits else scores, bits)
    exact = exact_auc(20 * scores - 10 if logits else scores, bits)
    ones, zeros = np.split(state.values, 2)
    within = (ones * zeros).sum() / (ones.sum() * zeros.sum())
    assert abs(float(state) - exact) <= within / 2 + 1e-12


def test_auc_is_exact_where_outputs_are_apart() -> None:
    scores, bits = (np.arange(10) + 0.5) / 10, np.array([0, 1, 0, 0, 1, 0, 1, 1, 0, 1])
    assert float(m.AUC().of(scores, bits)) == pytest.approx(exact_auc(scores, bits), rel=1e-15)
    assert float(m.AUC(from_logits=True).of(np.array([-800.0, 800.0]), np.array([0, 1]))) == 1


def test_a_figure_of_nothing_is_nan() -> None:
    assert np.isnan(float(m.AUC().of(np.array([0.5, 0.7]), np.array([1, 1]))))
    assert np.isnan(float(m.MeanAbsoluteError().of(np.zeros(0), np.zeros(0))))
    assert np.isnan(float(m.TopK(1).of(np.zeros((0, 3)), np.zeros(0, np.int64))))


def test_targets_may_have_an_axis_of_one_or_one_number_a_class() -> None:
    one_hot = np.eye(6)[NUMBERS]
    for metric in (m.Accuracy(), m.TopK(2)):
        due = metric.of(CLASSES, NUMBERS).values.tolist()
        assert metric.of(CLASSES, NUMBERS[:, None]).values.tolist() == due
        assert metric.of(CLASSES, one_hot).values.tolist() == due
    assert float(m.MeanAbsoluteError().of(np.ones((4, 1)), np.zeros(4))) == 1


def test_where_an_output_is_nan_no_class_is_among_the_greatest() -> None:
    assert m.TopK(1).of(np.array([[np.nan, 1.0], [0.0, 1.0]]), np.array([1, 1])).values.tolist() == [1, 2]


def test_a_name_makes_a_metric_of_that_name_and_a_function_has_its_own() -> None:
    def largest(outputs: Any, targets: Any) -> Any:
        return outputs.max(1)

    known = metrics_by_name([*m.NAMED, m.TopK(3, name="top_3_accuracy"), largest])
    assert list(known) == [*m.NAMED, "top_3_accuracy", "largest"]
    assert all(metric.name == name for name, metric in known.items())


def test_batches_of_unequal_size_are_put_together_and_numbers_are_means() -> None:
    def first(outputs: Any, targets: Any) -> Any:
        return outputs[:, 0].mean()

    metrics = metrics_by_name(["accuracy", first])
    totals = Totals()
    for rows in (slice(0, 1), slice(1, 30), slice(30, 40)):
        of_batch = metric_states(metrics, CLASSES[rows], NUMBERS[rows], len(NUMBERS[rows]), lambda value: value)
        totals.add({"own": NUMBERS[rows].mean(), **of_batch}, len(NUMBERS[rows]))
    assert totals.figures() == pytest.approx(
        {"own": NUMBERS.mean(), "accuracy": EXACT["accuracy"], "first": CLASSES[:, 0].mean()}, rel=1e-12
    )


class Short(Metric):
    name = "short"

    def sums(self, outputs: Any, targets: Any) -> Any:
        return [1.0]


def of_function(result: Any) -> Callable[[], Any]:
    metrics = metrics_by_name([lambda outputs, targets: result])
    return lambda: metric_states(metrics, CLASSES, NUMBERS, 40, lambda value: value)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown name": (lambda: metrics_by_name(["acc"]), "metric 'acc' is unknown; allowed: accuracy, binary_acc"),
    "a number": (lambda: metrics_by_name([3]), "metric 3 is unknown; allowed: accuracy"),  # type: ignore[list-item]
    "a class": (lambda: metrics_by_name([m.AUC]), "metric AUC is a class: give a metric, such as AUC()"),
    "twice": (lambda: metrics_by_name(["auc", m.AUC()]), "two metrics are named 'auc'"),
    "no text": (lambda: metrics_by_name("auc"), "metrics is a list of names and functions"),
    "k": (lambda: m.TopK(0), "TopK: k must be a whole number of at least 1, found 0"),
    "thresholds": (lambda: m.AUC(1), "AUC: num_thresholds must be a whole number from 2 to 100000, found 1"),
    "auc of classes": (
        lambda: m.AUC().of(CLASSES, NUMBERS),
        "metric 'auc' is of one output an example for two classes, found outputs of shape (40, 6) for targets of shape",
    ),
    "auc of logits": (lambda: m.AUC().of(np.array([0.5, 3.0]), np.array([0, 1])), "metric 'auc': an output is 3; due"),
    "auc of NaN": (lambda: m.AUC().of(np.array([np.nan]), np.array([0])), "metric 'auc': an output is nan; due are"),
    "auc's targets": (lambda: m.AUC().of(np.array([0.5]), np.array([-1])), "metric 'auc': targets are 0 or 1"),
    "k of few classes": (lambda: m.TopK(7).of(CLASSES, NUMBERS), "k is 7, and the model has 6 classes"),
    "a class that is none": (lambda: m.TopK(2).of(CLASSES, NUMBERS + 1), "targets are classes from 0 to 5"),
    "accuracy of values": (
        lambda: m.Accuracy().of(VALUES[0], NUMBERS[:3]),
        "one output a class on the last axis, found",
    ),
    "accuracy of one": (lambda: m.Accuracy().of(CLASSES[:, :1], NUMBERS), "found one: take 'binary_accuracy'"),
    "mae of classes": (lambda: m.MeanAbsoluteError().of(CLASSES, NUMBERS), "is of one output a target, found outputs"),
    "several outputs": (
        lambda: m.Accuracy().of({"a": CLASSES}, NUMBERS),
        "one array of outputs and one of targets, fou",
    ),
    "a function's shape": (of_function(np.zeros((40, 6))), "or one an example; found shape (40, 6) for 40 examples"),
    "a function's text": (of_function("good"), "the mean over the examples, or one an example; found a str"),
    "a state's length": (
        lambda: Short().of(CLASSES, NUMBERS),
        "the state is 2 real numbers, found float64 of shape (1,)",
    ),
    "two metrics": (
        lambda: m.AUC(9).of(SCORES, BITS) + m.AUC().of(SCORES, BITS),
        "states of AUC with 16 numbers and of",
    ),
    "no method": (lambda: Metric().of(SCORES, BITS), "Metric has no method sums"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(mistake: str) -> None:
    make, says = MISTAKES[mistake]
    with pytest.raises((ConfigurationError, WrongModel)) as refused:
        make()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_state_that_is_not_finite_makes_the_figure_so() -> None:
    assert np.isnan(float(Sums(m.MeanAbsoluteError(), [np.nan, 3]) + Sums(m.MeanAbsoluteError(), [1, 3])))
