"""Methods against staleness, each in a few lines from its paper: the laboratory compares them, the product ships none.

theta are the weights, g a gradient, eta the rate of an update with its schedule, gamma the optimizer's momentum, N the
number of workers. An update subtracts eta times what `update` returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.statistics.schedule import Method, Vector


class Momentum:
    """Plain momentum, one velocity for all workers: v = gamma v + g, theta = theta - eta v (Polyak 1964)."""

    def __init__(self, spec: Any, workers: int) -> None:
        self.gamma, self.workers = getattr(spec, "momentum", 0.0), workers
        self.velocity: Any = 0.0
        self.decay = spec.weight_decay
        self.factor = 1.0  # of the rate

    def look(self, worker: int, weights: Vector, eta: float) -> Vector:
        return weights

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        self.velocity = self.gamma * self.velocity + gradient + self.decay * weights
        return self.factor * np.asarray(self.velocity)


class LoweredMomentum(Momentum):
    """Momentum lowered by asynchrony's implicit momentum, 1 - 1/N of N workers (Mitliagkas 2016, arXiv:1605.09774).

    gamma' = max(0, gamma - (1 - 1/N)); eta' = eta (1 - gamma') / (1 - gamma), so that a gradient moves the weights as
    far in the end.
    """

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        lowered = max(0.0, self.gamma - (1 - 1 / workers))
        self.factor = (1 - lowered) / (1 - self.gamma)
        self.gamma = lowered


class NoMomentum(Momentum):
    """No momentum, at the equivalent rate: theta = theta - eta / (1 - gamma) g."""

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.factor = 1 / (1 - self.gamma)
        self.gamma = 0.0


class Dana(Momentum):
    """DANA-Zero: a velocity for each worker, and workers look ahead by all of them (Hakimi 2019, arXiv:1907.11612).

    v_i = gamma v_i + g; theta = theta - eta v_i; a worker computes at theta - eta gamma sum_j v_j.
    """

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.velocities: defaultdict[int, Any] = defaultdict(float)

    def look(self, worker: int, weights: Vector, eta: float) -> Vector:
        return weights - eta * self.gamma * np.asarray(sum(self.velocities.values(), np.zeros(len(weights))))

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        self.velocities[worker] = self.gamma * self.velocities[worker] + gradient + self.decay * weights
        return np.asarray(self.velocities[worker])


class DanaSlim(Momentum):
    """DANA-Slim: the velocity is the worker's, the shard runs plain SGD (Hakimi 2019).

    v_i = gamma v_i + g; theta = theta - eta (gamma v_i + g).
    """

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.velocities: defaultdict[int, Any] = defaultdict(float)

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        gradient = gradient + self.decay * weights
        self.velocities[worker] = self.gamma * self.velocities[worker] + gradient
        return self.gamma * np.asarray(self.velocities[worker]) + gradient


class RateByStaleness(Momentum):
    """The rate divided by 1 + staleness: theta = theta - eta / (1 + staleness) v (Zhang 2016, arXiv:1511.05950)."""

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.updates = 0
        self.pulled_at: defaultdict[int, int] = defaultdict(int)

    def look(self, worker: int, weights: Vector, eta: float) -> Vector:
        self.pulled_at[worker] = self.updates
        return weights

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        staleness = self.updates - self.pulled_at[worker]
        self.updates += 1
        return super().update(worker, gradient, weights, pulled, eta) / (1 + staleness)


class WarmUp(Momentum):
    """A warm-up that grows with the workers, so with staleness: from eta / N to eta in 20 N updates.

    eta' = eta (1/N + (1 - 1/N) min(1, t / (20 N))): gradual warm-up (Goyal 2017, arXiv:1706.02677), whose length by N
    is ours.
    """

    updates = 0

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        least = 1 / self.workers
        rate = least + (1 - least) * min(1.0, self.updates / (20 * self.workers))
        self.updates += 1
        return rate * super().update(worker, gradient, weights, pulled, eta)


class DelayCompensation(Momentum):
    """g becomes g + lambda g^2 (theta - theta_pulled), lambda = 0.04 (Zheng 2017, arXiv:1609.08326)."""

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        gradient = gradient + 0.04 * gradient**2 * (weights - pulled)
        return super().update(worker, gradient, weights, pulled, eta)


class GapAware(Momentum):
    """Gap-Aware: a gradient is divided by how far the weights have gone since (Barkai 2020, arXiv:1909.10802).

    v = gamma v + g / G, with G = 1 + |theta - theta_pulled| / C for each weight; as C we take the mean |step| so far.
    """

    steps: Any = 0.0
    count = 0

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        mean = np.asarray(self.steps) / max(1, self.count)
        gap = 1 + np.abs(weights - pulled) / np.maximum(mean, 1e-12) if self.count else 1.0
        direction = super().update(worker, gradient / gap, weights, pulled, eta)
        self.steps, self.count = self.steps + np.abs(eta * direction), self.count + 1
        return direction


class DanaGapAware(GapAware, Dana):
    """DANA with Gap-Aware gradients (Barkai 2020)."""


class Adam(Momentum):
    """Adam, one pair of moments for all workers (Kingma 2015): m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2.

    theta = theta - eta m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon).
    """

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.beta1, self.beta2, self.epsilon = spec.beta1, spec.beta2, spec.epsilon
        self.decoupled = spec.kind == "adamw"
        self.square: Any = 0.0
        self.t = 0

    def moment(self, worker: int, gradient: Vector) -> Vector:
        """Return the first moment, corrected for its beginning."""
        self.velocity = self.beta1 * self.velocity + (1 - self.beta1) * gradient
        return np.asarray(self.velocity / (1 - self.beta1**self.t))

    def update(self, worker: int, gradient: Vector, weights: Vector, pulled: Vector, eta: float) -> Vector:
        self.t += 1
        if not self.decoupled:
            gradient = gradient + self.decay * weights
        self.square = self.beta2 * self.square + (1 - self.beta2) * gradient**2
        step = self.moment(worker, gradient) / (np.sqrt(self.square / (1 - self.beta2**self.t)) + self.epsilon)
        return np.asarray(step + self.decay * weights if self.decoupled else step)


class LoweredAdam(Adam):
    """Adam with beta1 lowered by asynchrony's implicit momentum: b1' = max(0, b1 - (1 - 1/N)) (Mitliagkas 2016)."""

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.beta1 = max(0.0, self.beta1 - (1 - 1 / workers))


class DanaAdam(Adam):
    """Adam with a first moment for each worker, and DANA's look-ahead in its form for adaptive rates.

    m_i = b1 m_i + (1-b1) g; a worker computes at theta - eta b1 sum_j m_j / (sqrt(v) + epsilon): our adaptation of
    Hakimi 2019, which has momentum alone.
    """

    def __init__(self, spec: Any, workers: int) -> None:
        super().__init__(spec, workers)
        self.moments: defaultdict[int, Any] = defaultdict(float)
        self.pushes: defaultdict[int, int] = defaultdict(int)

    def look(self, worker: int, weights: Vector, eta: float) -> Vector:
        if not self.moments:
            return weights
        root = np.sqrt(self.square / (1 - self.beta2**self.t)) + self.epsilon
        return weights - eta * self.beta1 * np.asarray(sum(self.moments.values()) / root)

    def moment(self, worker: int, gradient: Vector) -> Vector:
        self.pushes[worker] += 1
        self.moments[worker] = self.beta1 * self.moments[worker] + (1 - self.beta1) * gradient
        return np.asarray(self.moments[worker] / (1 - self.beta1 ** self.pushes[worker]))


class WarmUpAdam(WarmUp, Adam):
    """Adam with a warm-up that grows with the workers."""


MOMENTUM: dict[str, Callable[[Any, int], Method]] = {
    "momentum (reference)": Momentum,
    "lowered momentum": LoweredMomentum,
    "no momentum": NoMomentum,
    "DANA": Dana,
    "DANA-Slim": DanaSlim,
    "rate by staleness": RateByStaleness,
    "longer warm-up": WarmUp,
    "delay compensation": DelayCompensation,
    "Gap-Aware": GapAware,
    "DANA + Gap-Aware": DanaGapAware,
}
ADAM: dict[str, Callable[[Any, int], Method]] = {
    "Adam (reference)": Adam,
    "lowered beta1": LoweredAdam,
    "DANA for Adam": DanaAdam,
    "longer warm-up, Adam": WarmUpAdam,
}
