"""The default trains as well as one machine: a part of `python -m benchmarks.statistics`, by its rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import parashard as ps
from benchmarks.statistics.cells import OLD_DEFAULT, SCENARIOS, Verdict, verdict
from benchmarks.statistics.schedule import PLAIN, Schedule
from benchmarks.statistics.tasks import make
from benchmarks.statistics.virtual import simulate
from parashard.job.sections import ClusterOptions

WORKERS = 4


@pytest.mark.full("nine trainings; `test_virtual_time` has the bits of each")
def test_the_default_is_as_good_as_one_machine_and_the_former_one_was_not() -> None:
    def cells(schedule: Schedule) -> list[dict[str, Any]]:
        found = []
        for seed in range(3):
            trial = replace(make("mlp", seed, None), epochs=5)
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


@pytest.mark.parametrize(
    ("values", "passes"),
    [
        ([0.95, 0.97], True),  # as good
        ([0.946, 0.966], True),  # within the tolerance
        ([0.944, 0.964], False),
        ([0.95, 0.90], True),  # within two standard errors of the difference
        ([0.90, 0.91], False),
    ],
)
def test_a_mean_may_be_worse_by_two_standard_errors_or_the_tolerance(values: list[float], passes: bool) -> None:
    found = _verdict([0.95, 0.97], values, higher_is_better=True, tolerance=0.005)
    assert found.passes is passes
    assert found.needs_seeds is (values == [0.95, 0.90])


@pytest.mark.parametrize(("values", "passes"), [([1.9, 2.0], True), ([2.018, 2.02], True), ([2.05, 2.06], False)])
def test_the_tolerance_of_a_loss_is_a_fraction_of_one_machine_s(values: list[float], passes: bool) -> None:
    assert _verdict([2.0, 2.01], values, higher_is_better=False, tolerance=0.01).passes is passes


def test_a_loss_that_diverged_is_worse() -> None:
    assert not _verdict([2.0, 2.1], [float("inf"), 2.0], higher_is_better=False, tolerance=0.01).passes


def test_seeds_that_one_machine_lacks_do_not_count() -> None:
    found = _verdict([0.95, 0.97], [0.95, 0.97, 0.1], higher_is_better=True, tolerance=0.005)
    assert found.seeds == 2
    assert found.passes


def _verdict(plain: list[float], found: list[float], **of_task: Any) -> Verdict:
    return verdict(
        *([{"seed": seed, "value": value, **of_task} for seed, value in enumerate(values)] for values in (found, plain))
    )
