"""Metrics that keep their own state, and figures that are no means over examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError, WrongModel
from parashard.metrics import AUC, Mean, Sums
from parashard.models.evaluation import Totals, figures_not_means, metric_states, metrics_by_name

RNG = np.random.default_rng(0)
OUTPUTS, TARGETS = RNG.normal(size=60), RNG.integers(0, 2, 60)


class BinaryRecall:
    """As those of torchmetrics: a ratio that is computed once, of all batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found = self.due = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.found += int(((outputs > 0) & (targets == 1)).sum())
        self.due += int((targets == 1).sum())

    def compute(self) -> Any:
        return np.array(self.found / self.due)


RECALL = ((OUTPUTS > 0) & (TARGETS == 1)).sum() / (TARGETS == 1).sum()


def figures(given: Any, *cuts: int) -> dict[str, float]:
    """Return the figures over batches between these places."""
    metrics, totals = metrics_by_name([given]), Totals()
    for start, stop in zip((0, *cuts), (*cuts, len(OUTPUTS)), strict=True):
        part = OUTPUTS[start:stop], TARGETS[start:stop]
        totals.add(metric_states(metrics, *part, stop - start, lambda array: array), stop - start)
    return totals.figures()


@given(st.sets(st.integers(1, 59)))
def test_a_metric_with_a_state_has_the_same_figure_in_whatever_batches(cuts: set[int]) -> None:
    used = BinaryRecall()
    used.found = 7  # an evaluation begins anew, and leaves the user's own alone
    assert figures(used, *sorted(cuts)) == {"binary_recall": RECALL}
    assert used.found == 7


def test_metrics_have_names_of_their_own() -> None:
    class Named(BinaryRecall):
        name = "sensitivity"

    assert list(metrics_by_name([BinaryRecall(), Named(), "accuracy"])) == ["binary_recall", "sensitivity", "accuracy"]
    with pytest.raises(
        ConfigurationError, match="two metrics are named 'binary_recall': give one of them an attribute"
    ):
        metrics_by_name([BinaryRecall(), BinaryRecall()])


class Collection(dict[str, Any]):
    """As a MetricCollection."""

    def update(self, *of: Any) -> None: ...
    def compute(self) -> Any: ...
    def reset(self) -> None: ...


class OfKeras:
    def update_state(self, targets: Any, outputs: Any) -> None: ...
    def __call__(self, targets: Any, outputs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (Collection(), "metric Collection has several figures: list its metrics one by one"),
        (OfKeras(), "metric OfKeras keeps a state between its calls"),
    ],
)
def test_what_has_no_figure_of_its_own_is_refused_by_name(metric: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        metrics_by_name([metric])


def test_a_metric_that_computes_several_numbers_is_refused() -> None:
    class Each(BinaryRecall):
        def compute(self) -> Any:
            return np.zeros(2)

    with pytest.raises(WrongModel, match=r"metric 'each': compute\(\) returned an array of shape \(2,\); due is one"):
        figures(Each())


# --- no means ---


def told(function: Callable[[Any, Any], Any]) -> list[str]:
    """Return which figures of a function are told to be no means."""
    metric = Mean(function, "figure")

    def evaluate(part: Any) -> dict[str, Any]:
        values = metric.sums_of(function(OUTPUTS[part], TARGETS[part]), len(part))
        return {"figure": Sums(metric, values), "auc": AUC(from_logits=True).of(OUTPUTS[part], TARGETS[part])}

    return list(figures_not_means(evaluate, np.argsort(TARGETS, kind="stable")))


def weighted(outputs: Any, targets: Any) -> Any:
    weights = 1 + 19 * targets
    return (weights * outputs**2).sum() / weights.sum()


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda outputs, targets: (outputs**2).mean(), False),
        (lambda outputs, targets: outputs**2, False),
        (lambda outputs, targets: np.float16((outputs**2).mean()), False),
        (lambda outputs, targets: (outputs**2).mean() + 3, False),
        (lambda outputs, targets: RNG.normal(), False),
        (lambda outputs, targets: (outputs**2).sum(), True),
        (weighted, True),
        (lambda outputs, targets: np.sqrt((outputs**2).mean()), True),
        (lambda outputs, targets: ((outputs > 0) & (targets == 1)).sum() / max(1, (targets == 1).sum()), True),
    ],
    ids=["mean", "each", "rounded", "constant", "random", "sum", "weights", "root", "recall"],
)
def test_a_figure_that_is_no_mean_is_seen(function: Any, seen: bool) -> None:
    assert told(function) == (["figure"] if seen else [])
