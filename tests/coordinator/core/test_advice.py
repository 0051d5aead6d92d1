"""What a job is advised to change where its loss rises or does not fall."""

from __future__ import annotations

import pytest

from parashard.job.policy import Policy
from parashard_coordinator.core.advice import Advice, advice_for, pipeline_advice

RATE = "lower optimizer.learning_rate or set optimizer.clip_norm"
FRESHER = 'use consistency.policy = "auto"'
PIPELINE = "first set cluster.pipeline_depth = 0; then "


@pytest.mark.parametrize(
    ("policy", "depth", "workers", "first"),
    [
        ("async", 0, 1, ""),
        ("async", 0, 4, f"{FRESHER}, or "),
        ("async", 1, 1, PIPELINE),
        ("ssp:0", 0, 4, f"{FRESHER}, or "),
        ("ssp:3", 0, 4, f"{FRESHER} or a smaller K, or "),
        ("ssp:3", 1, 4, PIPELINE),
        ("sync:4", 1, 4, ""),
        ("auto:4", 0, 4, ""),
        ("auto:4", 1, 4, ""),
    ],
)
def test_staleness_is_advised_against_first_where_there_may_be_some(
    policy: str, depth: int, workers: int, first: str
) -> None:
    advice = advice_for(Policy.parse(policy), pipeline_depth=depth, workers=workers, clips=False)
    assert advice == Advice(f"{first}{RATE}", f"{first}{Advice().against_standstill}")


def test_a_norm_that_is_clipped_can_be_clipped_more() -> None:
    advice = advice_for(Policy.parse("sync:2"), pipeline_depth=0, workers=2, clips=True)
    assert advice.against_rise == "lower optimizer.learning_rate or lower optimizer.clip_norm"


@pytest.mark.parametrize(
    ("policy", "depth", "hideable", "advises"),
    [
        ("async", 0, 0.4, True),
        ("ssp:3", 0, 0.11, True),
        ("async", 0, 0.1, False),
        ("async", 1, 0.4, False),
        ("sync:4", 0, 0.4, False),
        ("auto:4", 0, 0.4, False),
    ],
)
def test_a_pipeline_is_named_where_it_would_hide_more_than_a_tenth(
    policy: str, depth: int, hideable: float, advises: bool
) -> None:
    told = pipeline_advice(Policy.parse(policy), depth, hideable)
    says = f"cluster.pipeline_depth = 1 would hide up to {hideable:.0%} of a step, and make each gradient a step staler"
    assert told == (says.replace("%", " %", 1) if advises else "")
