"""The default beside one machine on a task of `benchmarks/statistics/`, shortened, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import parashard as ps
from benchmarks.statistics.cells import OLD_DEFAULT, SCENARIOS, verdict
from benchmarks.statistics.schedule import PLAIN, Schedule
from benchmarks.statistics.tasks import make
from benchmarks.statistics.virtual import simulate
from parashard.job.sections import ClusterOptions

WORKERS = 4


def check_default(task: str, *, epochs: int, seeds: int) -> None:
    """Fail where the default is worse than one machine by the laboratory's rule, or the former default is not."""

    def cells(schedule: Schedule) -> list[dict[str, Any]]:
        found = []
        for seed in range(seeds):
            trial = replace(make(task, seed, None), epochs=epochs)
            value = simulate(trial, schedule, seed).metrics[trial.metric]
            is_higher_better, tolerance = trial.higher_is_better, trial.tolerance
            found.append({"seed": seed, "value": value, "higher_is_better": is_higher_better, "tolerance": tolerance})
        return found

    plain = cells(PLAIN)
    found = verdict(cells(default(WORKERS)), plain)
    assert found.passes, found
    assert not found.needs_seeds, found
    assert not verdict(cells(SCENARIOS[OLD_DEFAULT](WORKERS)), plain).passes


def default(workers: int) -> Schedule:
    """Return the schedule of a script that names neither policy nor depth."""
    depth = ClusterOptions.model_fields["pipeline_depth"].default
    return Schedule(ps.ParameterServerStrategy().consistency, workers, depth)
