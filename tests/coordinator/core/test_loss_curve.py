"""Which training losses are told of: those of real runs, and drawn ones that fall or do not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parashard_coordinator.core.loss_curve import BLOCKS_MAX, FIRST_STEPS, JUDGED_FROM, Curve, finding

LOSSES = {
    # digits by an MLP, momentum 0.9 at a rate of 0.1, in one process
    "one_process": """
        2.24 2.25 2.11 2.02 2.05 1.8 1.65 1.47 | 16 1.45 0.54 0.637 0.343 0.304 0.246 0.175 0.171 0.221 0.207
        0.128 0.142 0.117 0.0747 0.114 0.144 0.0974 0.127 0.0875 0.104 0.0904 0.0815 0.0485 0.0938 0.0824 0.0481
        0.0722 0.0662 0.0553 0.0217 0.02 0.0489 0.0541 0.038 0.0271
    """,
    # the same by two workers, without a pipeline
    "two_workers": """
        2.24 2.19 2.1 2.12 1.87 1.79 1.57 1.42 | 16 1.45 0.571 0.598 0.47 0.343 0.313 0.26 0.286 0.148 0.161
        0.123 0.136 0.129 0.126 0.0959 0.266 0.154 0.477 0.272 0.215 0.213 0.236 0.2 0.085 0.0611 0.0667 0.0511
        0.0469 0.0455 0.0525 0.0969 0.0456 0.0524 0.0746 0.0245
    """,
    # by four workers, without a pipeline
    "four_workers": """
        2.24 2.29 2.14 2.01 1.98 1.65 1.8 1.56 | 16 1.55 0.536 0.492 0.528 0.393 0.244 0.204 0.376 8.76 6.84
        8.44 3.26 2.36 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.32 2.3 2.31 2.31 2.31
        2.31 2.31 2.31 2.31
    """,
    # by one worker with a pipeline
    "pipeline": """
        2.24 2.31 2.19 2.1 2.17 2.05 1.98 1.89 | 16 1.8 2.77 2.22 1.98 2.35 2.29 2.38 2.36 2.31 2.21 2.36 2.32
        2.32 2.31 2.32 2.32 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.32 2.31 2.31 2.3
        2.32 2.32
    """,
    # the same again
    "pipeline_late": """
        2.24 2.31 2.19 2.03 2.17 2.05 1.82 1.92 | 16 1.87 2.47 3.9 2.99 2.15 2.48 2.08 1.84 1.72 1.75 1.56 1.73
        1.51 1.49 1.83 1.9 1.52 1.5 1.42 1.41 1.21 1.47 1.5 1.61 1.5 1.6 1.49 1.84 2.12 3.48 2.32 2.19 2.1 2.05
        1.99
    """,
    # by two workers with a pipeline
    "two_workers_pipeline": """
        2.22 2.3 2.18 1.97 2.06 1.89 1.76 1.76 | 16 1.69 22.8 30.7 2.71 2.45 2.34 2.33 2.32 2.31 2.31 2.32 2.31
        2.31 2.3 2.32 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.31 2.32 2.32 2.31 2.32 2.31 2.32 2.31 2.31 2.31 2.31
        2.31 2.31
    """,
    # in one process, at a rate of 0.00001
    "rate_too_small": """
        2.24 2.31 2.22 2.3 2.33 2.32 2.4 2.25 | 16 2.33 2.38 2.37 2.35 2.33 2.38 2.36 2.33 2.37 2.38 2.3 2.37
        2.37 2.35 2.35 2.37 2.32 2.41 2.38 2.36 2.33 2.33 2.36 2.35 2.38 2.35 2.37 2.33 2.35 2.36 2.35 2.36 2.33
        2.38 2.36
    """,
    # at a rate of 0.6
    "rate_too_large": """
        2.24 2.28 2.09 1.81 1.49 1.84 1.97 1.69 | 16 2.45 73 2.44 2.37 2.36 2.37 2.37 2.35 2.34 2.36 2.35 2.34
        2.36 2.38 2.36 2.33 2.34 2.35 2.34 2.33 2.33 2.38 2.37 2.35 2.34 2.34 2.36 2.34 2.36 2.36 2.34 2.34 2.34
        2.34 2.36
    """,
    # by SGD at a rate of 0.003
    "slow": """
        2.24 2.31 2.22 2.29 2.32 2.3 2.38 2.23 | 16 2.31 2.32 2.27 2.22 2.18 2.19 2.14 2.1 2.1 2.07 2.04 2.05
        2.01 1.95 1.96 1.95 1.9 1.92 1.89 1.84 1.81 1.8 1.8 1.78 1.74 1.76 1.69 1.67 1.64 1.64 1.64 1.59 1.6
        1.54 1.54
    """,
    # with shuffled labels, which are learned by heart
    "shuffled_labels": """
        2.46 2.38 2.49 2.37 2.19 2.38 2.43 2.37 | 16 2.37 2.33 2.32 2.3 2.31 2.29 2.32 2.29 2.29 2.29 2.29 2.28
        2.28 2.29 2.27 2.28 2.27 2.27 2.25 2.26 2.27 2.27 2.25 2.26 2.26 2.25 2.25 2.26 2.24 2.23 2.25 2.26 2.23
        2.22 2.24
    """,
    # one digit against the others
    "unbalanced": """
        0.998 1.06 0.732 0.476 0.391 0.366 0.225 0.35 | 16 0.492 0.268 0.101 0.0531 0.0362 0.0298 0.0274 0.0148
        0.0176 0.0208 0.0162 0.0133 0.0142 0.0116 0.00896 0.00969 0.0141 0.0075 0.0109 0.00918 0.00747 0.00625
        0.00574 0.00523 0.00994 0.00363 0.0086 0.00849 0.00637 0.00581 0.00396 0.0057 0.00553 0.00443 0.00342
    """,
    # a regression
    "diabetes": """
        1.67 2.48 1.2 1.45 1.43 1.53 1.14 0.836 | 16 1.25 0.878 0.716 0.686 0.603 0.592 0.561 0.555 0.54 0.538
        0.547 0.487 0.538 0.507 0.515 0.491 0.51 0.486 0.517 0.47 0.504 0.486 0.491 0.476 0.498 0.462 0.488
        0.478 0.486 0.454 0.478 0.515 0.447 0.473 0.468
    """,
    # a regression of little more than noise
    "weak_signal": """
        1.29 1.54 2.01 1.44 0.815 1.74 2.3 1.15 | 16 1.47 1.42 1.27 1.24 1.31 1.14 1.16 1.15 1.14 1.13 1.05 1.09
        1.05 1.09 1.06 1.11 0.96 1.05 1.06 1.08 0.995 1.03 0.969 1.11 0.973 1.03 1.03 0.997 0.973 1.1 0.936 1.02
        0.954 1.06 0.981
    """,
}
"""Real runs of 560 to 570 steps, as `Curve.saved` has them: the first losses, the steps of a block, its means."""
NOT_FALLING = "has not fallen: "
ROSE = "rose: "
TOLD = {
    "four_workers": ROSE,
    "pipeline": ROSE,
    "pipeline_late": ROSE,
    "two_workers_pipeline": NOT_FALLING,
    "rate_too_small": NOT_FALLING,
    "rate_too_large": NOT_FALLING,
}
"""Of the runs that did not learn, what is told."""


def curve_of(losses: Iterable[float]) -> Curve:
    curve = Curve()
    for loss in losses:
        curve.add(loss)
    return curve


def noisy(steps: int, noise: float, seed: int, level: float = 2.3, drop: float = 0.0, *, quick: bool = False) -> Curve:
    """Return a curve that falls by `drop`, evenly or the more the earlier, beside noise."""
    drawn = random.Random(seed)
    done = [at / steps for at in range(steps)]
    shares = [(1 - math.exp(-5 * share)) if quick else share for share in done]
    return curve_of(level - drop * share + drawn.gauss(0.0, noise) for share in shares)


@pytest.mark.parametrize("run", LOSSES)
def test_of_real_runs_those_are_told_of_that_did_not_learn(run: str) -> None:
    curve = Curve()
    curve.resume([[float(value) for value in part.split()] for part in LOSSES[run].split("|")])
    found = finding(curve)
    assert (found.text if found else "").startswith(TOLD.get(run, "")), found
    assert (found is not None) == (run in TOLD), found


def test_a_loss_that_leapt_down_to_a_little_above_a_guess_stays_there() -> None:
    drawn = random.Random(3)
    first = [9.0, 7.0, 5.0, 4.0, 3.5, 3.0, 3.0, 2.8, *[2.6] * 60]  # at a rate of 5, ten classes
    found = finding(curve_of([*first, *(2.36 + drawn.gauss(0.0, 0.02) for _ in range(380))]), classes=10)
    assert found is not None
    assert found.text.startswith("stays near that of a guess, ln 10 = 2.30")


lengths = st.sampled_from([JUDGED_FROM, 257, 500, 1000, 5000])
seeds = st.integers(0, 2**32)


@given(lengths, st.sampled_from([0.001, 0.02, 0.1]), seeds)
def test_a_constant_loss_with_noise_has_always_not_fallen(steps: int, noise: float, seed: int) -> None:
    found = finding(noisy(steps, noise, seed))
    assert found is not None
    assert found.text.startswith((NOT_FALLING, ROSE))


@given(lengths, st.sampled_from([0.001, 0.02, 0.1, 0.3]), st.sampled_from([0.1, 0.3, 0.8, 0.95]), st.booleans(), seeds)
def test_a_loss_that_falls_is_never_told_of(steps: int, noise: float, share: float, quick: bool, seed: int) -> None:
    drop = max(2.3 * share, 3 * noise)
    assert finding(noisy(steps, noise, seed, drop=drop, quick=quick), classes=2) is None


@settings(derandomize=True)  # of ten thousand curves of noise one is told of
@example(5000, 0.5, False, 9755)  # its first steps are a little above nothing, by chance
@given(lengths, st.sampled_from([0.5, 1.0, 1.5]), st.booleans(), seeds)
def test_a_loss_near_its_floor_from_the_start_is_not_told_of(
    steps: int, spread: float, continued: bool, seed: int
) -> None:
    drawn = random.Random(seed)
    floor = curve_of(0.05 * math.exp(drawn.gauss(0.0, spread)) for _ in range(steps))
    assert finding(floor, continued=continued) is None
    around_nothing = curve_of(drawn.gauss(0.0, 0.01) for _ in range(steps))
    assert finding(around_nothing, continued=continued) is None


@given(lengths, st.sampled_from([0.001, 0.02, 0.1, 0.3]), seeds)
def test_weights_that_were_trained_before_may_be_at_their_best(steps: int, noise: float, seed: int) -> None:
    assert finding(noisy(steps, noise, seed), continued=True) is None


@given(lengths, seeds)
def test_a_loss_below_zero_that_falls_is_not_told_of(steps: int, seed: int) -> None:
    assert finding(noisy(steps, 0.5, seed, level=-100.0, drop=5.0)) is None
    assert finding(noisy(steps, 0.5, seed, level=-100.0)) is not None


@given(lengths, seeds)
def test_a_large_penalty_beside_a_loss_that_falls_hides_nothing(steps: int, seed: int) -> None:
    assert finding(noisy(steps, 0.05, seed, level=52.3, drop=2.0, quick=True)) is None


def test_where_there_is_nothing_to_minimise_nothing_is_told() -> None:
    assert finding(curve_of([0.0] * 500), classes=10) is None


@given(st.integers(0, JUDGED_FROM - 1), seeds)
def test_few_steps_are_not_judged(steps: int, seed: int) -> None:
    assert finding(noisy(steps, 0.01, seed)) is None


@pytest.mark.parametrize("steps", [400, 3000])
def test_a_loss_that_has_fallen_and_rises_by_half_is_told_of(steps: int) -> None:
    falls = [2.3 * math.exp(-at / 40) + 0.1 for at in range(steps // 2)]
    assert finding(curve_of([*falls, *[1.0] * (steps // 2)])) is None
    found = finding(curve_of([*falls, *[1.4] * (steps // 2)]))
    assert found is not None
    assert found.text.startswith("rose: 0.1")
    assert ", 1.4000 in the last " in found.text
    assert found.rose


def test_a_classifier_that_only_guesses_is_told_of() -> None:
    drawn = random.Random(1)
    losses = [5.0 * math.exp(-at / 5) + math.log(10) + drawn.gauss(0.0, 0.03) for at in range(600)]
    assert finding(curve_of(losses)) is None, "its first losses were far greater"
    found = finding(curve_of(losses), classes=10)
    assert found is not None
    assert found.text.startswith("stays near that of a guess, ln 10 = 2.3026: 2.29")
    assert finding(curve_of(losses), classes=100) is None


def test_a_hard_choice_between_two_is_learned_slowly() -> None:
    drawn = random.Random(2)
    losses = [0.66 + 0.3 * math.exp(-at / 5) + drawn.gauss(0.0, 0.01) for at in range(600)]
    assert finding(curve_of(losses), classes=2) is None
    assert finding(curve_of([loss + 0.033 for loss in losses]), classes=2) is not None


def test_a_loss_above_what_steps_without_staleness_reached_falls_more_slowly_than_promised() -> None:
    curve = curve_of([2.3 - 0.01 * at for at in range(100)])
    curve.staleness_begins()
    for _ in range(500):
        curve.add(1.6)
    found = finding(curve)
    assert found is not None
    reached = "1.4250 after the first 100 steps, without staleness"
    now = "1.6000 in the last 144 of 592 steps"
    assert found.text == f"falls more slowly than its first steps promised: {reached}; {now}"
    for _ in range(500):
        curve.add(1.3)
    assert finding(curve) is None


def test_few_steps_without_staleness_promise_nothing() -> None:
    curve = curve_of([2.3 - 0.01 * at for at in range(40)])
    curve.staleness_begins()
    for _ in range(100):
        curve.add(1.9)
    curve.staleness_begins()
    assert curve.fresh is None, "only the first steps were without staleness"


@given(st.integers(0, 3000))
def test_a_curve_is_bounded_and_keeps_the_mean(steps: int) -> None:
    curve = curve_of(float(at) for at in range(steps))
    assert len(curve.blocks) < BLOCKS_MAX
    assert steps - curve.stride < curve.steps <= steps
    assert len(curve.first) == min(steps, FIRST_STEPS)
    if curve.blocks:
        assert sum(curve.blocks) / len(curve.blocks) == pytest.approx((curve.steps - 1) / 2)


def test_losses_that_are_hardly_numbers_keep_the_curve_finite() -> None:
    curve = curve_of([1.7e308, -1.7e308, 1.7e308] * 200)
    assert all(map(math.isfinite, [*curve.first, *curve.blocks]))
    finding(curve)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_later_coordinator_goes_on_with_the_curve(before: int, after: int) -> None:
    curve, later = noisy(before, 0.1, 1), Curve()
    later.resume(curve.saved())
    assert (later.first, later.blocks, later.stride) == (curve.first, curve.blocks, curve.stride)
    for at in range(after):
        later.add(float(at))
    assert len(later.blocks) < BLOCKS_MAX
