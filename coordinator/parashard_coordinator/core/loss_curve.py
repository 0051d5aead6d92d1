"""Whether a model learns, judged by its training losses: a curve of bounded size, and decisions over it. Pure.

Levels are medians of parts of the curve, and differences of levels are compared with the noise between neighbouring
blocks, so noise alone does not make a falling curve count as stuck. A loss near its floor from the start is mostly
noise, or continues an earlier fit: it is not judged to be stuck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from parashard.figures import metric
from parashard_coordinator.core.progress import median

BLOCKS_MAX = 64
FIRST_STEPS = 8  # losses kept individually: a quick model has learned much before the first quarter ends
JUDGED_FROM = 200  # steps; the noise of fewer is too large
LOSS_MAX = 1e30  # sums of greater losses may not be finite
BEST_BLOCKS = 4
FRESH_STEPS_MIN = 50  # fewest steps without staleness that give a reference level
FRESH_MANY = 4  # the curve must have this many times the steps of the reference
MEDIAN_ERROR = 1.25  # standard error of a median, relative to that of a mean
CERTAIN = 4.5  # standard errors between two levels that certainly differ
FALLS = 0.05  # of the level: a fall by more counts, even if it may be noise
LEAPS = 8  # the largest 1/LEAPS of the differences between neighbours are leaps, not noise
NOISE_SHARE = 0.3  # of the level: a loss with more noise is near its floor
FELL = 0.1  # of the level: a loss that fell by more has learned something
REGAINED = 0.5  # a rise is at least this share of the loss's earlier fall
RISE_MIN = 0.01  # of the level
RISE_NOISE = 2.0  # minimum rise of a loss that had not fallen, in standard deviations of single steps
SLOWER = 0.1  # of the fall: excess over the level reached without staleness that counts as slower
GUESS_MARGIN, HARD_MARGIN = 0.15, 0.01  # below the loss of a guess: among several classes, among two
ABOVE_MARGIN = 0.06  # above the loss of a guess: a large rate keeps a loss there
STILL = 0.02  # of the loss of a guess: a loss that stays there falls by less from one quarter to the next


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
        """The number of steps in the blocks."""
        return len(self.blocks) * self.stride

    def add(self, loss: float) -> bool:
        """Add a finite loss; return whether it completes a block."""
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
        """Record the level reached without staleness; only the first call counts."""
        if not self._is_stale and self.steps >= FRESH_STEPS_MIN:
            self.fresh = Fresh(self.steps, median(_last_quarter(self.blocks)))
        self._is_stale = True

    def saved(self) -> tuple[tuple[float, ...], ...]:
        """Return the curve for a later coordinator: the first losses, and the stride followed by the blocks."""
        return (tuple(self.first), (float(self.stride), *self.blocks)) if self.first else ()

    def resume(self, saved: Sequence[Sequence[float]]) -> None:
        """Restore an earlier coordinator's curve; an incomplete block is lost."""
        if len(saved) == 2:
            self.first, (stride, *self.blocks) = list(saved[0]), saved[1]
            self.stride = int(stride)
            self._is_stale = True  # the level reached without staleness is not known


class Fresh(NamedTuple):
    """The first steps, each computed on the newest weights: their number, and the loss level they reached."""

    steps: int
    level: float


class LossProblem(NamedTuple):
    """A problem of the loss; `rose`: it got worse, else it stands still."""

    text: str
    rose: bool


def finding(curve: Curve, *, classes: int = 0, continued: bool = False) -> LossProblem | None:
    """Return the problem of a training loss, or None if it falls or its curve is inconclusive."""
    if curve.steps < JUDGED_FROM or len(curve.first) < FIRST_STEPS:
        return None
    levels = _levels_of(curve)
    if _rose(levels, continued=continued):
        return LossProblem(f"rose: {metric(levels.best)} at its best, {levels.now} steps", rose=True)
    fresh = curve.fresh
    if fresh is not None and curve.steps >= FRESH_MANY * fresh.steps and _is_slower(levels, fresh):
        reached = f"{metric(fresh.level)} after the first {fresh.steps:,} steps, without staleness"
        return LossProblem(f"falls more slowly than its first steps promised: {reached}; {levels.now} steps", rose=True)
    is_calm = abs(levels.late) > 0 and levels.step_noise <= NOISE_SHARE * abs(levels.late)
    if is_calm and not continued and not _falls(levels):
        first = f"{metric(levels.first)} in the first {FIRST_STEPS} steps"
        return LossProblem(f"has not fallen: {first}, {levels.now} steps", rose=levels.is_above)
    if is_calm and classes > 1 and _guesses(levels, classes):
        guess = f"ln {classes:,} = {metric(math.log(classes))}"
        return LossProblem(f"stays near that of a guess, {guess}: {levels.now} steps", rose=False)
    return None


class _Levels(NamedTuple):
    """Levels of a curve, and their standard errors."""

    first: float  # of the first steps; the next three: of the first, the third and the last quarter
    early: float
    third: float
    late: float
    best: float  # of the best few blocks
    error: float  # standard error of a quarter's level; `first_error`: of the first steps'
    first_error: float
    rough: float  # standard deviation of a block, larger if some neighbours differ by much
    step_noise: float  # standard deviation of a step, from the median difference; `rough_step`: from `rough`
    rough_step: float
    now: str  # the level of the last quarter, in words

    @property
    def is_above(self) -> bool:
        """The last quarter is above the first steps."""
        return self.late - self.first > max(CERTAIN * self.first_error, RISE_MIN * abs(self.late))


def _levels_of(curve: Curve) -> _Levels:
    blocks, quarter = curve.blocks, len(curve.blocks) // 4
    changes = sorted(abs(one - other) for one, other in pairwise(blocks))
    quiet = median(changes) * 1.05  # 1.48 / sqrt(2): each change is a difference of two blocks
    kept = changes[: -(len(changes) // LEAPS)]
    rough = sum(kept) / len(kept) * 1.1  # sqrt(pi) / 2, raised to correct for the omitted leaps
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
    """Tell whether a loss has regained half of its fall, or, if it had not fallen, is far above its best."""
    rise, fall = levels.late - levels.best, levels.first - levels.best
    level = max(abs(levels.first), abs(levels.best))
    near_nothing = level < CERTAIN * levels.first_error  # a share of a level within the noise is meaningless
    has_fallen = not continued and not near_nothing and fall > FELL * level
    certain = CERTAIN * MEDIAN_ERROR * levels.rough / math.sqrt(BEST_BLOCKS)
    noise = certain if has_fallen else RISE_NOISE * levels.rough_step
    return rise > max(noise, REGAINED * fall, RISE_MIN * abs(levels.late))


def _is_slower(levels: _Levels, fresh: Fresh) -> bool:
    """Tell whether a loss is clearly above the level reached without staleness."""
    return levels.late - fresh.level > max(RISE_NOISE * levels.step_noise, SLOWER * (levels.first - fresh.level))


def _falls(levels: _Levels) -> bool:
    """Tell whether the last quarter is below the first quarter, or below the first steps of a quick model."""
    fall = levels.early - levels.late
    trend = fall > CERTAIN * math.sqrt(2) * levels.error or fall > FALLS * abs(levels.late)
    at_first = levels.first - levels.late > CERTAIN * math.hypot(levels.error, levels.first_error)
    return (trend and not levels.is_above) or at_first


def _guesses(levels: _Levels, classes: int) -> bool:
    """Tell whether a loss stays near that of a guess among the classes; of two classes a loss just below is normal."""
    guess = math.log(classes)
    below = HARD_MARGIN if classes == 2 else GUESS_MARGIN
    is_near = (1 - below) * guess < levels.late < (1 + ABOVE_MARGIN) * guess
    return is_near and levels.third - levels.late < min(CERTAIN * math.sqrt(2) * levels.error, STILL * guess)


def _last_quarter(blocks: Sequence[float]) -> Sequence[float]:
    return blocks[-max(1, len(blocks) // 4) :]
