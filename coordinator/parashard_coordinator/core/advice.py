"""Advice: what to change in a job whose loss does not fall, or whose transfers take long, by its policy. Pure."""

from __future__ import annotations

from typing import NamedTuple

from parashard.figures import percent
from parashard.job.policy import Policy

HIDEABLE_MIN = 0.1  # of a step: less is not worth a pipeline


class Advice(NamedTuple):
    """What to change where a loss rises, and where it stands still."""

    against_rise: str = "lower optimizer.learning_rate or set optimizer.clip_norm"
    against_standstill: str = "try a lower and a higher optimizer.learning_rate, and check labels, inputs and loss"


def advice_for(policy: Policy, *, pipeline_depth: int, workers: int, clips: bool) -> Advice:
    """Return the advice: first against staleness, where there may be any, then about the learning rate.

    Parameters
    ----------
    policy : Policy
        The job's consistency.
    pipeline_depth, workers : int
        As the job begins.
    clips : bool
        Whether it has a `clip_norm`.
    """
    clipping = "lower" if clips else "set"
    rises = f"lower optimizer.learning_rate or {clipping} optimizer.clip_norm"
    stands = Advice().against_standstill
    fresher = _fresher(policy, pipeline_depth, workers)
    return Advice(f"{fresher}{rises}", f"{fresher}{stands}")


def pipeline_advice(policy: Policy, pipeline_depth: int, hideable_share: float) -> str:
    """Return what a pipeline would hide of a step, and what it costs; "" where it is little, or there is a pipeline."""
    if policy.kind not in ("async", "ssp") or pipeline_depth or hideable_share <= HIDEABLE_MIN:
        return ""
    hides = percent(hideable_share)
    return f"cluster.pipeline_depth = 1 would hide up to {hides} of a step, and make each gradient a step staler"


def _fresher(policy: Policy, pipeline_depth: int, workers: int) -> str:
    """Return how gradients become less stale, for the beginning of a sentence."""
    if policy.kind not in ("async", "ssp"):
        return ""
    if pipeline_depth:
        return "first set cluster.pipeline_depth = 0; then "
    if workers < 2:
        return ""
    smaller = " or a smaller K" if policy.kind == "ssp" and policy.bound else ""
    return f'use consistency.policy = "auto"{smaller}, or '
