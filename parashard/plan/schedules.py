"""Learning-rate schedules: the multiplier of the learning rate as a function of the number of updates.

All schedules share one clock. Updates are counted from 1. The first `warmup_steps` updates rise linearly to 1; the
curve itself starts with the update after them and gives 1 to its first update, as a schedule in PyTorch or Optax does.
In the formulas n counts the updates since the warm-up, D is `decay_steps`, and f is `final_fraction`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel

UPDATES_MAX = 10**15
"""Greatest length: more than a job has, and exact as a float."""


def _steps_or_job(value: Any) -> Any:
    """Give one message for the union, where pydantic would give one per member."""
    if value == "job" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= UPDATES_MAX):
        return value
    raise ValueError(
        f'must be an integer >= 1 or "job" (to the end of the job), at most {UPDATES_MAX:g}, found {value!r}'
    )


DecaySteps = Annotated[int | Literal["job"], BeforeValidator(_steps_or_job)]
"""A length in updates, or "job": all updates of the job that follow the warm-up."""


class Schedule(FrozenModel):
    """What all schedules share."""

    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=UPDATES_MAX,
        description="Updates in which the multiplier rises linearly to 1 before the curve.",
    )

    warmup_from: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Multiplier of the warm-up's first update; unset: 1 / warmup_steps.",
    )

    def factor(self, t: int) -> float:
        """Return the multiplier of the learning rate for the t-th update, the first being 1."""
        assert t >= 1, f"updates count from 1, found {t}"
        if t <= self.warmup_steps:
            if self.warmup_from is not None:
                return self.warmup_from + (1 - self.warmup_from) * (t - 1) / self.warmup_steps
            return t / self.warmup_steps
        return self._curve(t - 1 - self.warmup_steps)

    def resolved(self, total_steps: int) -> Self:
        """Return the same schedule with the updates of the whole job (steps, or rounds) in place of "job"."""
        return self

    def _curve(self, done: int) -> float:
        """Return the multiplier after `done` >= 0 updates since the warm-up."""
        raise NotImplementedError


class _Decaying(Schedule):
    """A curve with a length D, concrete or "job"."""

    decay_steps: DecaySteps = Field(
        default="job", description='Length of the decay in updates; "job": all updates after the warm-up.'
    )

    def resolved(self, total_steps: int) -> Self:
        """Return the schedule with decay_steps = total_steps - warmup_steps where it was "job"."""
        if self.decay_steps != "job":
            return self
        if total_steps <= self.warmup_steps:
            raise ConfigurationError(
                f'schedule: with decay_steps = "job", warmup_steps must be less than the job\'s {total_steps} updates '
                f"(steps, or rounds in sync mode), found {self.warmup_steps}"
            )
        return self.replaced(decay_steps=total_steps - self.warmup_steps)

    def _length(self) -> int:
        assert self.decay_steps != "job", "resolved(total_steps) comes before factor(t)"
        return self.decay_steps


class ConstantSchedule(Schedule):
    """1 for every update after the warm-up."""

    kind: Literal["constant"] = Field(default="constant", description="Names this schedule.")

    def _curve(self, done: int) -> float:
        return 1.0


class StepSchedule(Schedule):
    """factor ** floor(n / every_steps) after n updates: a staircase."""

    kind: Literal["step"] = Field(default="step", description="Names this schedule.")
    every_steps: int = Field(ge=1, le=UPDATES_MAX, description="Updates on one tread.")
    # `factor` in job files; here that is the method of all schedules.
    ratio: float = Field(gt=0, le=1, alias="factor", description="Ratio of a tread to the one before.")

    def _curve(self, done: int) -> float:
        return float(self.ratio ** (done // self.every_steps))


class ExponentialSchedule(_Decaying):
    """rate ** (n / D) after n updates."""

    kind: Literal["exponential"] = Field(default="exponential", description="Names this schedule.")
    rate: float = Field(gt=0, le=1, description="Factor over `decay_steps` updates.")
    staircase: bool = Field(default=False, description="True: it falls once every `decay_steps` updates.")

    def _curve(self, done: int) -> float:
        length = self._length()
        return float(self.rate ** (done // length if self.staircase else done / length))


class CosineSchedule(_Decaying):
    """f + (1 - f) (1 + cos(pi n / D)) / 2 after n <= D updates, then f (Loshchilov and Hutter, ICLR 2017, eq. 5).

    One period, without the paper's restarts.
    """

    kind: Literal["cosine"] = Field(default="cosine", description="Names this schedule.")
    final_fraction: float = Field(default=0.0, ge=0, le=1, description="Multiplier at the end and afterwards.")

    def _curve(self, done: int) -> float:
        length = self._length()
        if done >= length:
            return self.final_fraction
        return self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * done / length)) / 2


class CosineRestartsSchedule(Schedule):
    """The cosine from 1 to f again and again, each time longer and lower (Loshchilov and Hutter, ICLR 2017)."""

    kind: Literal["cosine_restarts"] = Field(default="cosine_restarts", description="Names this schedule.")
    first_steps: int = Field(ge=1, le=UPDATES_MAX, description="Length of the first period, in updates.")
    length_factor: float = Field(default=2.0, ge=1, le=1e6, description="Ratio of a period's length to the one before.")
    height_factor: float = Field(default=1.0, gt=0, le=1, description="Ratio of a period's height to the one before.")
    final_fraction: float = Field(default=0.0, ge=0, le=1, description="Multiplier that each period ends with.")

    def _curve(self, done: int) -> float:
        begin, length, height = 0.0, float(self.first_steps), 1.0
        if self.length_factor == 1:
            periods = done // self.first_steps
            begin, height = float(periods * self.first_steps), self.height_factor**periods
        else:
            while done >= begin + length:
                begin, length, height = begin + length, length * self.length_factor, height * self.height_factor
        cosine = (1 + math.cos(math.pi * (done - begin) / length)) / 2
        return self.final_fraction + (1 - self.final_fraction) * height * cosine


class PolynomialSchedule(_Decaying):
    """f + (1 - f) (1 - n / D) ** power after n <= D updates, then f; with a power of 1 a straight line."""

    kind: Literal["polynomial"] = Field(default="polynomial", description="Names this schedule.")
    power: float = Field(default=1.0, gt=0, le=1000, description="Exponent of the curve; 1: a straight line.")
    final_fraction: float = Field(default=0.0, ge=0, le=1e6, description="Multiplier at the end and afterwards.")

    def _curve(self, done: int) -> float:
        left = max(0.0, 1 - done / self._length())
        return float(self.final_fraction + (1 - self.final_fraction) * left**self.power)


_Change = Annotated[tuple[int, float], Strict(False)]  # lists, too, as scripts give them


def _ascending(changes: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    steps = [step for step, _ in changes]
    if not all(0 <= step <= UPDATES_MAX for step in steps) or steps != sorted({*steps}):
        raise ValueError(f"must be pairs [updates, multiplier] whose updates ascend from 0 or more, found {changes!r}")
    if not all(0 <= factor <= 1e6 for _, factor in changes):
        raise ValueError(f"must have multipliers between 0 and 1e+06, found {changes!r}")
    return changes


class PiecewiseSchedule(Schedule):
    """1, and from each change on its multiplier."""

    kind: Literal["piecewise"] = Field(default="piecewise", description="Names this schedule.")
    changes: Annotated[tuple[_Change, ...], Strict(False), Field(min_length=1), AfterValidator(_ascending)] = Field(
        description="Updates, and the multiplier after them, such as [[1000, 0.5], [2000, 0.1]]."
    )

    def _curve(self, done: int) -> float:
        return next((factor for step, factor in reversed(self.changes) if step <= done), 1.0)


ScheduleOptions = Annotated[
    ConstantSchedule
    | StepSchedule
    | ExponentialSchedule
    | CosineSchedule
    | CosineRestartsSchedule
    | PolynomialSchedule
    | PiecewiseSchedule,
    Field(discriminator="kind"),
]
"""Any schedule, discriminated by `kind`: the `[optimizer.schedule]` table of a job file."""
