"""Cases of every update rule, whose results are kept as bits in `tests/fixtures/update_rules.txt`.

`PYTHONPATH=tests python -m support.frozen_rules` adds the cases that the file lacks, by the NumPy reference. It changes
none that the file has: those say what the rules did before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support import reference_rules as reference
from support.kernel_cases import ADAM, KERNELS, RMSPROP, update

FILE = Path(__file__).parents[1] / "fixtures" / "update_rules.txt"
ROW = 6
"""Elements of a row, for rules by row."""
SIZE = 5 * ROW
STEPS = 3
T_OF_ROWS = np.array([1, 2, 3, 5000, 70], np.uint32)

PLAIN: dict[str, float] = {"learning_rate": 0.05, "weight_decay": 0.0, "clip": math.inf, "scale": 1.0}
CASES: dict[str, dict[str, float]] = {
    "plain": PLAIN,
    "scaled, clipped, decayed": {"learning_rate": 0.05, "weight_decay": 0.01, "clip": 1.5, "scale": 0.25},
    "no rate": PLAIN | {"learning_rate": 0.0, "weight_decay": 0.01},
    "large rate": PLAIN | {"learning_rate": 1e10, "weight_decay": 0.5},
    "extremes": PLAIN | {"weight_decay": 0.01},
    "not finite": PLAIN | {"weight_decay": 0.01},
    "not finite, clipped": PLAIN | {"weight_decay": 0.01, "clip": 1.5},
    "denormals": PLAIN,
}
EXTREMES = [0.0, -0.0, 1e-45, -1e-38, 1e38, -3e38, 1e20, -1e-20, 1.0]
AROUND_DENORMALS = 1e-37
"""Multiplies weights, slots and gradients of "denormals"."""
NOT_FINITE = [math.inf, -math.inf, math.nan, 1.0, -0.0]

RULES: dict[str, tuple[int, dict[str, Any]]] = {  # of a rule: (number of slots, settings of its own)
    **KERNELS,
    "momentum, rate in velocity": (1, {"momentum": 0.9, "rate_in_velocity": 1.0}),
    "nesterov, rate outside": (1, {"momentum": 0.9, "rate_in_velocity": 0.0}),
    "rmsprop, epsilon in root": (1, {"rho": 0.9, "epsilon": 1e-3, "epsilon_in_root": 1.0}),
    "rmsprop_momentum, rate outside": (2, RMSPROP),
    "rmsprop_centered, in root and velocity": (3, RMSPROP | {"epsilon_in_root": 1.0, "rate_in_velocity": 1.0}),
    "adam by row": (2, ADAM),
    "adamw by row": (2, ADAM),
    "rowwise_adagrad": (1, {"epsilon": 1e-8}),
}


class Case(NamedTuple):
    """Some updates by one rule, from weights and slots that are given."""

    rule: str
    name: str

    @property
    def key(self) -> str:
        """Names the case in the file."""
        return f"{self.rule}; {self.name}"

    def run(self, kernels: Any) -> list[np.ndarray]:
        """Return [weights, *slots] after the updates."""
        slots, own = RULES[self.rule]
        length = SIZE // ROW if self.rule == "rowwise_adagrad" else SIZE
        arrays = [self._drawn(0, SIZE), *(np.abs(self._drawn(20 + slot, length)) for slot in range(slots))]
        for t in range(1, STEPS + 1):
            counter = T_OF_ROWS + np.uint32(t - 1) if self.rule.endswith("by row") else t
            with np.errstate(all="ignore"):
                update(
                    kernels, self.rule.split(",")[0].removesuffix(" by row"), arrays[0], self._gradient(t), *arrays[1:],
                    t=counter, **CASES[self.name] | own,
                )  # fmt: skip
        return arrays

    def _gradient(self, t: int) -> np.ndarray:
        values = self._drawn(t, SIZE)
        if self.name == "extremes":
            values[: len(EXTREMES)] = EXTREMES
        elif self.name.startswith("not finite") and t == 2:
            values[: len(NOT_FINITE)] = NOT_FINITE
        return values

    def _drawn(self, seed: int, size: int) -> np.ndarray:
        return drawn(seed, size) * np.float32(AROUND_DENORMALS if self.name == "denormals" else 1.0)


def drawn(seed: int, size: int) -> np.ndarray:
    """Return numbers of both signs and several magnitudes, zeros among them; made without a generator."""
    places = np.arange(size)
    values = ((7 * places + 5 * seed) % 17 - 8) / 8 * 10.0 ** ((3 * places + seed) % 7 - 4)
    return values.astype(np.float32)


def cases() -> Iterator[Case]:
    """Return every case."""
    return (Case(rule, name) for rule in RULES for name in CASES)


def kept() -> Mapping[str, list[np.ndarray]]:
    """Return what the file says: arrays by case."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    found: dict[str, list[np.ndarray]] = {}
    for line in lines:
        key, _, words = line.rpartition(": ")
        found.setdefault(key, []).append(np.frombuffer(bytes.fromhex(words), "<f4"))
    return found


def main() -> None:
    """Add what the file lacks."""
    known = kept()
    with FILE.open("a") as file:
        for case in cases():
            if case.key not in known:
                file.writelines(f"{case.key}: {array.astype('<f4').tobytes().hex()}\n" for array in case.run(reference))


if __name__ == "__main__":
    main()
