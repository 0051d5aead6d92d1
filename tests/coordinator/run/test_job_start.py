"""What the state of a job takes over from its job file, for the warnings of its training loss."""

from __future__ import annotations

import pytest

from parashard.job.load import job_from_toml
from parashard_coordinator.core.job_record import JobRecord
from parashard_coordinator.run.job_start import new_job_record
from support.resolved_job import resolved_here

JOB = """
[job]
name = "digits"
epochs = 2
batch_size = 144
{job}
[data]
source = "digits"
[model]
kind = "mlp"
hidden = []
[optimizer]
kind = "sgd"
learning_rate = 0.5
schedule = {{ kind = "step", every_steps = 4, factor = 0.1, warmup_steps = 2 }}
[consistency]
policy = "{policy}"
[cluster]
workers = 2
"""


def started(policy: str, job: str = "") -> JobRecord:
    return new_job_record(resolved_here(job_from_toml(JOB.format(policy=policy, job=job))), "run-1", 1)


@pytest.mark.parametrize("policy", ["async", "ssp:3", "sync:2", "auto"])
def test_the_learning_rate_in_force_is_that_of_the_step_s_update(policy: str) -> None:
    job = started(policy)
    together = 2 if policy in ("sync:2", "auto") else 1
    rates = [job.options.learning_rate_at(update * together, 0.0) for update in range(8)]
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.05, 0.05])
    assert job.options.learning_rate_at(0, 0.2) == pytest.approx(0.1), "one that callbacks have set is scheduled, too"


def test_schedules_go_on_from_the_updates_before_the_job() -> None:
    assert started("async", "updates_before = 6").options.learning_rate_at(0, 0.0) == pytest.approx(0.05)
    later = started("async", "first_epoch = 1")  # of ten steps each
    assert later.options.learning_rate_at(0, 0.0) == pytest.approx(0.005)


def test_weights_are_trained_before_where_epochs_or_updates_are() -> None:
    assert [started("async", job).options.continued for job in ("", "first_epoch = 1", "updates_before = 6")] == [
        False,
        True,
        True,
    ]


def test_classes_and_advice_are_the_job_s() -> None:
    options = started("async").options
    assert options.classes == 10
    assert options.advice.against_rise.startswith('use consistency.policy = "auto", or lower ')
