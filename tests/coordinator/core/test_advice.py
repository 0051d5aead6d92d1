"""What a job is advised to change where its loss rises or does not fall."""

from __future__ import annotations

import pytest

from parashard.job.policy import Policy
from parashard_coordinator.core.advice import Advice, advice_for

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
