"""What models of clicks are judged by, against scikit-learn: AUC by 16,001 thresholds, and normalized entropy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError, WrongModel
from parashard.metrics import AUC, NAMED, NormalizedEntropy
from parashard.models.clicks import THRESHOLDS

sklearn_metrics: Any = pytest.importorskip("sklearn.metrics")

EXAMPLES = 4000


def clicks(scale: float, bias: float, seed: int = 0) -> tuple[Any, Any]:
    """Return logits of a model that is right about its uncertainty, and clicks drawn from them."""
    rng = np.random.default_rng(seed)
    logits = bias + scale * rng.normal(size=EXAMPLES)
    return logits, (rng.random(EXAMPLES) < 1 / (1 + np.exp(-logits))).astype(np.int64)


@pytest.mark.parametrize(
    ("scale", "bias"), [*itertools.product([0.05, 0.5, 1.5, 6.0], [-3.0, 0.0]), (0.3, -6), (1, -7)]
)
def test_16001_thresholds_are_close_to_the_exact_auc(scale: float, bias: float) -> None:
    """Also where no more than 1 in 600 is a click."""
    logits, clicked = clicks(scale, bias)
    metric = AUC(THRESHOLDS, from_logits=True, spacing="both")
    found = float(metric.of(logits.astype(np.float32)[:, None], clicked))
    assert abs(found - sklearn_metrics.roc_auc_score(clicked, logits)) < 1e-3


def test_where_clicks_are_rare_thresholds_by_probability_would_not_be() -> None:
    logits, clicked = clicks(0.3, -7.0)
    exact = sklearn_metrics.roc_auc_score(clicked, logits)
    metrics = [AUC(THRESHOLDS, from_logits=True, spacing=spacing) for spacing in ("probability", "both")]
    errors = [abs(float(metric.of(logits, clicked)) - exact) for metric in metrics]
    assert errors[0] > 3e-3
    assert errors[1] < 1e-3


def test_another_spacing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="spacing='log'"):
        AUC(spacing="log")  # type: ignore[arg-type]


@given(scale=st.floats(0.01, 5), bias=st.floats(-4, 4), cut=st.integers(1, EXAMPLES - 1), seed=st.integers(0, 9))
def test_normalized_entropy_is_the_log_loss_by_that_of_the_share_of_clicks(
    scale: float, bias: float, cut: int, seed: int
) -> None:
    logits, clicked = clicks(scale, bias, seed)
    metric = NormalizedEntropy(from_logits=True)
    found = metric.of(logits[:cut], clicked[:cut]) + metric.of(logits[cut:], clicked[cut:])
    base = np.full(EXAMPLES, clicked.mean())
    due = sklearn_metrics.log_loss(clicked, 1 / (1 + np.exp(-logits))) / sklearn_metrics.log_loss(clicked, base)
    assert float(found) == pytest.approx(due, rel=1e-9)


def test_who_knows_the_share_alone_has_1_and_who_knows_everything_0() -> None:
    _, clicked = clicks(1.0, -1.0)
    share = np.full((EXAMPLES, 1), clicked.mean())
    assert float(NormalizedEntropy().of(share, clicked)) == pytest.approx(1.0)
    assert float(NormalizedEntropy(from_logits=True).of(np.where(clicked, 99.0, -99.0), clicked)) < 1e-12


def test_probabilities_and_logits_are_judged_alike_and_certainty_is_finite() -> None:
    logits, clicked = clicks(1.0, -1.0)
    shares = 1 / (1 + np.exp(-logits))
    of_logits = float(NormalizedEntropy(from_logits=True).of(logits, clicked))
    assert float(NormalizedEntropy().of(shares, clicked)) == pytest.approx(of_logits)
    certain = float(NormalizedEntropy().of(np.array([0.0, 1.0]), np.array([1, 0])))
    assert certain == pytest.approx(-math.log(1e-15) / math.log(2), rel=1e-2)


@pytest.mark.parametrize("one", [0, 1])
def test_of_one_class_there_is_no_normalized_entropy(one: int) -> None:
    assert math.isnan(float(NormalizedEntropy().of(np.array([0.3, 0.4]), np.array([one, one]))))
    assert math.isnan(float(NormalizedEntropy().of(np.empty(0), np.empty(0, np.int64))))


def test_it_has_a_name_for_lists_of_metrics() -> None:
    metric = NAMED["normalized_entropy"]("normalized_entropy")
    assert (metric.name, metric.length) == ("normalized_entropy", 3)
    with pytest.raises(WrongModel, match="one output a target, found outputs of shape"):
        metric.of(np.ones((3, 2)), np.ones(3))
