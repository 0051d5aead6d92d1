"""Cells of the laboratory's table: each is one training, named by task, scenario, number of workers and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.statistics.methods import ADAM, MOMENTUM
from benchmarks.statistics.schedule import PLAIN, Outcome, Schedule
from benchmarks.statistics.tasks import digest, make
from benchmarks.statistics.trial import Trial
from benchmarks.statistics.virtual import simulate
from parashard.api.trained_state import tables_of_model

PLAIN_NAME = "plain"
OLD_DEFAULT = "async, depth 1"
LAG_PARTS = 4
POINTS = 8
DRIFTS = 50  # approximate number of measurements in one machine's training
KILLS_S = 2.0

SCENARIOS: dict[str, Callable[[int], Schedule]] = {
    PLAIN_NAME: lambda workers: PLAIN,
    "auto": lambda workers: Schedule("auto", workers),
    "auto, one slow": lambda workers: Schedule("auto", workers, slowest=0.1),
    "auto, kills": lambda workers: Schedule("auto", workers, kill_every_s=KILLS_S, shard_kill_every_s=2 * KILLS_S),
    "auto, transfers": lambda workers: Schedule("auto", workers, transfer=0.1),
    OLD_DEFAULT: lambda workers: Schedule("async", workers, depth=1),
    "async": lambda workers: Schedule("async", workers),
    "ssp:1": lambda workers: Schedule("ssp:1", workers),
    "ssp:3": lambda workers: Schedule("ssp:3", workers),
    "sync:1": lambda workers: Schedule("sync:1", workers),
    "sync:N": lambda workers: Schedule(f"sync:{workers}", workers),
    "lag 1": lambda workers: Schedule(f"sync:{LAG_PARTS}", lag=1),
    "lag 2": lambda workers: Schedule(f"sync:{LAG_PARTS}", lag=2),
    "lag 4": lambda workers: Schedule(f"sync:{LAG_PARTS}", lag=4),
}
"""Policies and faults by name; a lag holds for every update, the most that `auto` with this lag can have."""

METHODS = (*list(MOMENTUM)[1:], *list(ADAM)[1:])
"""Run in `async` at depth 0, so at a staleness of N - 1."""


class Cell(NamedTuple):
    """One training. `scenario` names a scenario or a method."""

    task: str
    scenario: str
    workers: int
    seed: int


def fits(scenario: str, trial: Trial) -> bool:
    """Tell whether a task has the optimizer of a method, and no tables where a lag holds: other batches, other rows."""
    if SCENARIOS.get(scenario, lambda workers: PLAIN)(1).lag and tables_of_model(trial.model):
        return False
    kinds = {"momentum": MOMENTUM, "nesterov": MOMENTUM, "adam": ADAM, "adamw": ADAM}
    others = (MOMENTUM.keys() | ADAM.keys()) - kinds.get(trial.optimizer.kind, {}).keys()
    return scenario not in others


def run(cell: Cell, data: Path | None) -> dict[str, Any] | None:
    """Train a cell, and return its figures for the table and the plots; None: it does not fit."""
    trial = make(cell.task, cell.seed, data)
    if not fits(cell.scenario, trial):
        return None
    outcome = _simulated(cell, trial)
    pushes = outcome.staleness.total()
    return {
        **cell._asdict(),
        "task_sha256": digest(cell.task),
        "metric": trial.metric,
        "value": outcome.metrics[trial.metric],
        "higher_is_better": trial.higher_is_better,
        "tolerance": trial.tolerance,
        "curve": [(round(epochs, 3), value) for epochs, value in outcome.curve],
        "staleness_mean": round(sum(k * n for k, n in outcome.staleness.items()) / max(1, pushes), 3),
        "staleness_max": max(outcome.staleness, default=0),
        "drift": [round(drift, 4) for drift in outcome.drift],
        "lags": outcome.lags,
        "kills": outcome.kills,
        "virtual_s": round(outcome.virtual_s, 2),
        "sha256": outcome.sha256,
    }


def _simulated(cell: Cell, trial: Trial) -> Outcome:
    scenario, workers, seed = cell.scenario, cell.workers, cell.seed
    schedule = SCENARIOS.get(scenario, lambda workers: Schedule("async", workers))(workers)
    if schedule.lag:
        trial = replace(trial, batch_size=trial.batch_size // LAG_PARTS)
    made = {**MOMENTUM, **ADAM}.get(scenario)
    method = None if made is None else made(trial.optimizer, workers)
    steps = trial.epochs * -(-len(_first(trial.train)) // trial.batch_size)
    drift_every = max(1, steps // DRIFTS) if scenario == PLAIN_NAME else 0
    return simulate(trial, schedule, seed, method=method, points=POINTS, drift_every=drift_every)


def _first(arrays: Any) -> Any:
    """Return one of the arrays of a trial's data: all are of one length."""
    while isinstance(arrays, dict | tuple | list):
        arrays = next(iter(arrays.values() if isinstance(arrays, dict) else arrays))
    return arrays


class Verdict(NamedTuple):
    """A scenario compared with one machine, over the seeds that both have."""

    mean: float
    plain: float
    # By how much the mean is worse than one machine's; below 0: better. NaN or infinite of a loss that diverged.
    worse: float
    error: float  # standard error of this difference, of the pairs of one seed; infinite of a single pair
    tolerance: float  # the larger of this and two standard errors is allowed
    seeds: int

    @property
    def passes(self) -> bool:
        """Whether the mean is not worse than one machine's by more than is allowed."""
        return self.worse <= max(2 * self.error, self.tolerance)

    @property
    def needs_seeds(self) -> bool:
        """Whether it passes only because the spread is large."""
        return self.passes and self.worse > self.tolerance


def verdict(found: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], tolerances: float = 1.0) -> Verdict:
    """Compare cells of a scenario with one machine's of the same task; `tolerances` multiplies the task's."""
    by_seed = {cell["seed"]: cell for cell in plain}
    pairs = [(cell["value"], by_seed[cell["seed"]]["value"]) for cell in found if cell["seed"] in by_seed]
    mean, alone = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    first = plain[0]
    sign = 1 if first["higher_is_better"] else -1
    differences = [sign * (of_plain - value) for value, of_plain in pairs]
    error = math.inf if len(pairs) == 1 else 0.0
    if len(pairs) > 1 and all(map(math.isfinite, differences)):
        error = statistics.stdev(differences) / math.sqrt(len(pairs))
    tolerance = tolerances * first["tolerance"] * (1.0 if first["higher_is_better"] else abs(alone))
    return Verdict(mean, alone, statistics.fmean(differences), error, tolerance, len(pairs))


def cells_of(part: str, tasks: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of a part of the table, the most informative first."""
    for task in tasks:
        for scenario, workers, seeds in PARTS[part]:
            yield from (Cell(task, scenario, number, seed) for number in workers for seed in range(seeds))


Rows = list[tuple[str, Sequence[int], int]]
"""Scenarios, for which numbers of workers, with how many seeds."""

QUICK: Rows = [(PLAIN_NAME, [1], 3), ("auto", [4], 3), (OLD_DEFAULT, [4], 3)]
TWO_HOURS: Rows = [
    (PLAIN_NAME, [1], 5),
    ("auto", [2, 4, 8], 5),
    ("auto, transfers", [4], 3),
    (OLD_DEFAULT, [2, 4, 8], 5),
    ("async", [2, 4, 8], 2),
    ("ssp:1", [4], 2),
    ("ssp:3", [4], 2),
    ("auto", [16], 3),
    ("auto, one slow", [4], 3),
    ("auto, kills", [4], 3),
    *((f"lag {lag}", [1], 2) for lag in (1, 2, 4)),
]
NIGHT: Rows = [
    *TWO_HOURS,
    (OLD_DEFAULT, [1, 2, 4, 8, 16], 5),
    ("async", [2, 4, 8, 16], 5),
    ("ssp:1", [2, 4, 8, 16], 5),
    ("ssp:3", [2, 4, 8, 16], 5),
    ("sync:1", [4], 2),
    ("sync:N", [2, 4, 8, 16], 2),
    ("auto", [16], 5),
    ("auto, one slow", [2, 4, 8, 16], 5),
    ("auto, kills", [2, 4, 8, 16], 5),
    ("auto, transfers", [2, 4, 8], 5),
    *((f"lag {lag}", [1], 5) for lag in (1, 2, 4)),
    *((method, [2, 4, 8], 3) for method in METHODS),
]
PARTS = {"quick": QUICK, "two-hours": TWO_HOURS, "night": NIGHT}
