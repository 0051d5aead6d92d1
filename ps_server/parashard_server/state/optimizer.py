"""Optimizer: a specification bound to its kernel, for one partition's run of a shard's flat vectors.

Owns the slots of a rule and the learning rate of an update. Pure: no clock, no counter, no lock; it knows nothing of
pushes, rounds or applied sets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parashard.plan.optimizers import Adagrad, OptimizerSpec, RowwiseAdagrad
from parashard.plan.schedules import ConstantSchedule
from parashard.plan.variables import Float32s, Variable
from parashard_server.state.kernels import fused
from parashard_server.state.kernels.rules import RULES, Values


class Before(NamedTuple):
    """Number of updates before the first one of a job: of its initial slots, and of its schedule."""

    state: int = 0
    schedule: int = 0


NOTHING_BEFORE = Before()


class RowTimes(NamedTuple):
    """t for rows of a table: that of the job, and each row's number of pushes, with this one."""

    job: int
    rows: NDArray[np.uint32]


class Optimizer:
    """Apply updates of one specification, whose schedule must be resolved.

    `kernels` are `parashard_server.state.kernels.fused`, or those of a GPU; `by_row`: it updates rows of a table, each
    with its own t; `before` are the updates before the first one. `counts`: the rule itself depends on t, not only the
    schedule. `decays`: there is a penalty or weight decay. `by_element`: an element's update depends on that element
    alone, not on norms of its variable.
    """

    def __init__(
        self, spec: OptimizerSpec, kernels: ModuleType = fused, *, by_row: bool = False, before: Before = NOTHING_BEFORE
    ) -> None:
        rule = RULES[spec.rule]
        self.spec = spec
        self._before = before
        self.slots = spec.slots  # names of its state vectors, each of the weights' length; part of a checkpoint
        self.initial_values: Mapping[str, float] = {
            slot: spec.initial_accumulator if isinstance(spec, Adagrad | RowwiseAdagrad) else 0.0 for slot in self.slots
        }
        self.by_row = by_row
        self._rule, self.counts, self.by_element = rule, bool(rule.by_t), not spec.requires_unsplit_variables
        self._scheduled = not isinstance(spec.schedule, ConstantSchedule) or spec.schedule.warmup_steps > 0
        self._kernel: Callable[..., None] = partial(kernels.update, spec.rule)
        regularisers = {name: float(getattr(spec, name)) for name in rule.regularisers}
        self._decay: Callable[..., None] | None = None
        if getattr(spec, "decoupled_weight_decay", False) and spec.weight_decay:
            self._decay, regularisers["weight_decay"] = kernels.decay, 0.0
        self.decays = self._decay is not None or any(regularisers.values())
        settings: dict[str, Any] = {name: float(getattr(spec, name)) for name in rule.settings}
        settings["clip"] = math.inf if spec.clip_value is None else spec.clip_value
        self._settings = settings | regularisers
        self._settings_without_decay = settings | dict.fromkeys(regularisers, 0.0)
        self._values_of = lru_cache(maxsize=4)(self._values)  # shared by the partitions of a push, often by pushes

    def update(
        self,
        weights: Float32s,
        gradient: Float32s,
        slots: Mapping[str, Float32s],
        *,
        t: int | RowTimes,
        scale: float,
        variable: Variable,
        learning_rate: float | None = None,
        where: Any = None,
    ) -> None:
        """Apply one gradient to one partition, in place on its weights and slots.

        The learning rate is learning_rate * schedule.factor(t + before.schedule) * variable.learning_rate_factor, in
        float64. An empty push is an update with a gradient of zeros: moments and weight decay are applied. A frozen
        variable is never changed.

        Parameters
        ----------
        weights, gradient, slots
            Contiguous, of one length; a slot for each name in `self.slots`. The gradient is finite and only read.
        t : int or RowTimes
            Number of steps (in sync mode: rounds) in the applied set with this one, >= 1; `before` is added here.
            RowTimes: for rows of a table, if `counts`.
        scale : float
            Multiplies the gradient: 1/n for the mean of a sum of n.
        learning_rate : float, optional
            Replaces `spec.learning_rate`.
        where : optional
            Mask of the elements to update, for kernels of a GPU; None: all.
        """
        assert weights.shape == gradient.shape, f"{variable.name}: {weights.shape} weights, {gradient.shape} gradient"
        if variable.frozen:
            return
        job_t, t_of_rows = t if isinstance(t, RowTimes) else (t, None)
        own = self.spec.learning_rate if learning_rate is None else learning_rate
        factor = self.spec.schedule.factor(job_t + self._before.schedule) if self._scheduled else 1.0
        rate = own * factor * variable.learning_rate_factor
        more = {} if where is None else {"where": where}
        if self._decay is not None and variable.decay:
            self._decay(weights, rate * self.spec.weight_decay, **more)
        if t_of_rows is None:
            values = self._values_of(rate, scale, job_t + self._before.state if self.counts else 1, variable.decay)
        else:
            values = self._values(rate, scale, t_of_rows, variable.decay)
        self._kernel(values, weights, gradient, *(slots[name] for name in self.slots), **more)

    def _values(self, rate: float, scale: float, t: int | NDArray[np.uint32], decay: bool) -> Values | None:
        settings = self._settings if decay else self._settings_without_decay
        return self._rule.values({**settings, "learning_rate": rate, "scale": scale, "t": t})

    def warm_up(self, vector: Callable[[], Any] = lambda: np.empty(0, np.float32)) -> None:
        """Load or compile the kernel, so that no push waits for it; `vector` makes a vector on the kernels' device."""
        weights, gradient, *slots = (vector() for _ in range(2 + len(self.slots)))
        named = dict(zip(self.slots, slots, strict=True))
        t = RowTimes(1, np.empty(0, np.uint32)) if self.by_row else 1
        self.update(weights, gradient, named, t=t, scale=1.0, variable=Variable("warm_up", (1,)))
