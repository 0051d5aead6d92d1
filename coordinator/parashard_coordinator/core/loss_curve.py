"""Whether a model learns, judged by the losses of its steps: a bounded curve, and decisions over it. Pure.

Levels are medians of parts of the curve, and each is compared with the noise between its neighbours. So a curve that
falls is never taken for one that does not, however noisy it is. A loss that is near its floor from the start is
mostly noise, or goes on from an earlier fit: it is not judged to be stuck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from parashard.figures import metric
from parashard_coordinator.core.progress import median

BLOCKS_MAX = 64
FIRST_STEPS = 8  # kept as they are: a quick model has learned much before the first quarter ends
JUDGED_FROM = 200  # steps; fewer say too little beside their noise
LOSS_MAX = 1e30  # sums of greater ones may not be finite
BEST_BLOCKS = 4
FRESH_STEPS_MIN = 50  # without staleness, for what they promise
FRESH_MANY = 4  # times as many steps must have followed
MEDIAN_ERROR = 1.25  # times the error of a mean
CERTAIN = 4.5  # standard errors between two levels that differ for certain
FALLS = 0.05  # of the level: a fall by so much counts, though noise might have made it
LEAPS = 8  # one of so many differences between neighbours, the largest, is a leap and not noise
NOISE_SHARE = 0.3  # of the level: a loss with more noise than that is near its floor
FELL = 0.1  # the same, of a loss that has learned something
REGAINED = 0.5  # a rise is at least this share of what the loss had fallen by
RISE_MIN = 0.01  # of the level
RISE_NOISE = 2.0  # and so many times the noise of single steps, of a loss that had not fallen
SLOWER = 0.1  # the same, above the level that was reached without staleness
GUESS_MARGIN, HARD_MARGIN = 0.15, 0.01  # below the loss of a guess among several classes, and among two
ABOVE_MARGIN = 0.06  # above it: a large rate keeps a loss there
STILL = 0.02  # of that loss: from one quarter to the next a loss that stays falls by less


class Curve:
    """The losses of a job's steps: the first ones, and means of blocks of `stride` steps each, at most BLOCKS_MAX."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.blocks: list[float] = []
        self.stride = 1
        self.fresh: Fresh | None = None
        self._is_stale = False
        self._sum, self._in_sum = 0.0, 0

    @property
    def steps(self) -> int:
        """How many steps the blocks are of."""
        return len(self.blocks) * self.stride

    def add(self, loss: float) -> bool:
        """Take up a finite loss; return whether that has ended a block."""
        loss = max(-LOSS_MAX, min(loss, LOSS_MAX))
        if len(self.first) < FIRST_STEPS:
            self.first.append(loss)
        self._sum += loss
        self._in_sum += 1
        if self._in_sum < self.stride:
            return False
        self.blocks.append(self._sum / self.stride)
        self._sum, self._in_sum = 0.0, 0
        if len(self.blocks) == BLOCKS_MAX:
            self.blocks = [(one + other) / 2 for one, other in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
            self.stride *= 2
        return True

    def staleness_begins(self) -> None:
        """Note the level that steps without staleness have reached; only the first call counts."""
        if not self._is_stale and self.steps >= FRESH_STEPS_MIN:
            self.fresh = Fresh(self.steps, median(_last_quarter(self.blocks)))
        self._is_stale = True

    def saved(self) -> tuple[tuple[float, ...], ...]:
        """Return the curve for a later coordinator: the first losses, and the blocks behind their stride."""
        return (tuple(self.first), (float(self.stride), *self.blocks)) if self.first else ()

    def resume(self, saved: Sequence[Sequence[float]]) -> None:
        """Go on from an earlier coordinator's curve; a block that had not ended is left out."""
        if len(saved) == 2:
            self.first, (stride, *self.blocks) = list(saved[0]), saved[1]
            self.stride = int(stride)
            self._is_stale = True  # how far it was without staleness is not known


class Fresh(NamedTuple):
    """What the first steps reached, each on the newest weights: their number, and the loss then."""

    steps: int
    level: float


class Finding(NamedTuple):
    """What a loss does that it should not, and whether it got worse; else it stands still."""

    text: str
    rose: bool


def finding(curve: Curve, *, classes: int = 0, continued: bool = False) -> Finding | None:
    """Return what is wrong with a training loss; None: it falls, or its curve does not say."""
    if curve.steps < JUDGED_FROM or len(curve.first) < FIRST_STEPS:
        return None
    levels = _levels_of(curve)
    if _rose(levels, continued=continued):
        return Finding(f"rose: {metric(levels.best)} at its best, {levels.now} steps", rose=True)
    fresh = curve.fresh
    if fresh is not None and curve.steps >= FRESH_MANY * fresh.steps and _is_slower(levels, fresh):
        reached = f"{metric(fresh.level)} after the first {fresh.steps:,} steps, without staleness"
        return Finding(f"falls more slowly than its first steps promised: {reached}; {levels.now} steps", rose=True)
    is_calm = abs(levels.late) > 0 and levels.step_noise <= NOISE_SHARE * abs(levels.late)
    if is_calm and not continued and not _falls(levels):
        first = f"{metric(levels.first)} in the first {FIRST_STEPS} steps"
        return Finding(f"has not fallen: {first}, {levels.now} steps", rose=levels.is_above)
    if is_calm and classes > 1 and _guesses(levels, classes):
        guess = f"ln {classes:,} = {metric(math.log(classes))}"
        return Finding(f"stays near that of a guess, {guess}: {levels.now} steps", rose=False)
    return None


class _Levels(NamedTuple):
    """Levels of a curve, and how exactly they are known."""

    first: float  # of the first steps; then of the first, the third and the last quarter
    early: float
    third: float
    late: float
    best: float  # of the best few blocks
    error: float  # standard error of a quarter's level; `first_error`: of the first steps'
    first_error: float
    rough: float  # standard deviation of a block, more where some neighbours differ by much
    step_noise: float  # standard deviation of a step, by quiet blocks; `rough_step`: by `rough`
    rough_step: float
    now: str  # the level of the last quarter, in words

    @property
    def is_above(self) -> bool:
        """The last quarter is above the first steps."""
        return self.late - self.first > max(CERTAIN * self.first_error, RISE_MIN * abs(self.late))


def _levels_of(curve: Curve) -> _Levels:
    blocks, quarter = curve.blocks, len(curve.blocks) // 4
    changes = sorted(abs(one - other) for one, other in pairwise(blocks))
    quiet = median(changes) * 1.05  # 1.48 / sqrt(2): each change is of two blocks
    kept = changes[: -(len(changes) // LEAPS)]
    rough = sum(kept) / len(kept) * 1.1  # sqrt(pi) / 2, and more for those left out
    step_noise, late = quiet * math.sqrt(curve.stride), median(_last_quarter(blocks))
    return _Levels(
        first=median(curve.first),
        early=median(blocks[:quarter]),
        third=median(blocks[-2 * quarter : -quarter]),
        late=late,
        best=min(median(blocks[at : at + BEST_BLOCKS]) for at in range(len(blocks) - BEST_BLOCKS + 1)),
        error=MEDIAN_ERROR * quiet / math.sqrt(quarter),
        first_error=MEDIAN_ERROR * step_noise / math.sqrt(FIRST_STEPS),
        rough=rough,
        step_noise=step_noise,
        rough_step=rough * math.sqrt(curve.stride),
        now=f"{metric(late)} in the last {quarter * curve.stride:,} of {curve.steps:,}",
    )


def _rose(levels: _Levels, *, continued: bool) -> bool:
    """Tell whether a loss that had fallen has risen again by half, or one that had not is far above its best."""
    rise, fall = levels.late - levels.best, levels.first - levels.best
    level = max(abs(levels.first), abs(levels.best))
    near_nothing = level < CERTAIN * levels.first_error  # a share of that says nothing
    has_fallen = not continued and not near_nothing and fall > FELL * level
    certain = CERTAIN * MEDIAN_ERROR * levels.rough / math.sqrt(BEST_BLOCKS)
    noise = certain if has_fallen else RISE_NOISE * levels.rough_step
    return rise > max(noise, REGAINED * fall, RISE_MIN * abs(levels.late))


def _is_slower(levels: _Levels, fresh: Fresh) -> bool:
    """Tell whether a loss is above the level that steps without staleness reached."""
    return levels.late - fresh.level > max(RISE_NOISE * levels.step_noise, SLOWER * (levels.first - fresh.level))


def _falls(levels: _Levels) -> bool:
    """Tell whether the last quarter is below the first one, or below the first steps where these were quick."""
    fall = levels.early - levels.late
    trend = fall > CERTAIN * math.sqrt(2) * levels.error or fall > FALLS * abs(levels.late)
    at_first = levels.first - levels.late > CERTAIN * math.hypot(levels.error, levels.first_error)
    return (trend and not levels.is_above) or at_first


def _guesses(levels: _Levels, classes: int) -> bool:
    """Tell whether a loss stays near that of a guess among the classes; two are often hard to tell apart."""
    guess = math.log(classes)
    below = HARD_MARGIN if classes == 2 else GUESS_MARGIN
    is_near = (1 - below) * guess < levels.late < (1 + ABOVE_MARGIN) * guess
    return is_near and levels.third - levels.late < min(CERTAIN * math.sqrt(2) * levels.error, STILL * guess)


def _last_quarter(blocks: Sequence[float]) -> Sequence[float]:
    return blocks[-max(1, len(blocks) // 4) :]
