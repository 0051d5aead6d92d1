"""Every update kernel with settings of its own, and runs of it: what tests of all its implementations share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from parashard_server.state.kernels.rules import RULES

COMMON: dict[str, Any] = {"learning_rate": 0.05, "weight_decay": 0.01, "clip": 1.5, "scale": 0.25}
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
RMSPROP: dict[str, Any] = {
    "rho": 0.9, "epsilon": 1e-3, "epsilon_in_root": 0.0, "momentum": 0.8, "rate_in_velocity": 0.0
}  # fmt: skip
KERNELS: dict[str, tuple[int, dict[str, Any]]] = {  # kind: (number of slots, settings of its own)
    "sgd": (0, {}),
    "momentum": (1, {"momentum": 0.9, "rate_in_velocity": 0.0}),
    "nesterov": (1, {"momentum": 0.9, "rate_in_velocity": 1.0}),
    "adagrad": (1, {"epsilon": 1e-10}),
    "rmsprop": (1, {"rho": 0.9, "epsilon": 1e-8, "epsilon_in_root": 0.0}),
    "rmsprop_momentum": (2, RMSPROP | {"epsilon_in_root": 1.0, "rate_in_velocity": 1.0}),
    "rmsprop_centered": (3, RMSPROP),
    "adam": (2, ADAM),
    "adamw": (2, ADAM),
    "ftrl": (2, {"beta": 1.0, "l1": 0.05, "l2": 0.1}),
    "lamb": (2, ADAM),
}
COUNTING = ("adam", "adamw", "lamb")
STEPS = 4
MAGNITUDES = 10.0 ** np.arange(-6, 3)


def drawn(seed: int, size: int) -> np.ndarray:
    """Return numbers of many magnitudes, with zeros of both signs among them, in an array of the caller's own."""
    return _drawn(seed, size).copy()


@lru_cache(maxsize=32)
def _drawn(seed: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * MAGNITUDES[rng.integers(0, MAGNITUDES.size, size)]).astype(np.float32)
    values[rng.random(size) < 0.1] = 0.0
    values[rng.random(size) < 0.05] = -0.0
    return values


def update(kernels: Any, kind: str, *vectors: np.ndarray, t: Any = 1, **settings: float) -> None:
    """Apply a rule to weights, with a gradient and slots; to rows of a table if each has its own t."""
    kernels.update(kind, RULES[kind].values(settings | {"t": t}), *vectors)


def run(kernels: Any, kind: str, size: int, cuts: tuple[int, ...] = (), **changed: float) -> list[np.ndarray]:
    """Return [weights, *slots] after some steps, each step applied piece by piece between the cuts."""
    slots, own = KERNELS[kind]
    arrays = [drawn(0, size), *(np.zeros(size, np.float32) for _ in range(slots))]
    bounds = [0, *cuts, size]
    for t in range(1, STEPS + 1):
        gradient = drawn(t, size)
        for i in range(len(bounds) - 1):
            run_of = slice(bounds[i], bounds[i + 1])
            pieces = [a[run_of] for a in arrays]
            update(kernels, kind, pieces[0], gradient[run_of], *pieces[1:], t=t, **COMMON | own | changed)
    return arrays


def assert_same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
