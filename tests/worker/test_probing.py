"""A probe measures how much an update changes a gradient, and leaves every step as it is without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.data.base import Batch
from parashard_worker.loop import drift_of
from support.loop_cases import Counting, Job

PROBED = pb.Grant(step=2, probe=True)


class Moving(Counting):
    """A model whose gradient is its weight and 1: an update by 1 changes it as far as can be reckoned."""

    def loss_and_gradients(self, variables: Any, batch: Batch, xp: Any) -> Any:
        loss, gradients = super().loss_and_gradients(variables, batch, xp)
        return loss, {name: np.array(variables[name]) + 1 for name in gradients}


def test_the_drift_is_the_share_by_which_the_next_weights_change_the_gradient() -> None:
    job = Job(0, 1, PROBED, 3, model=Moving()).run()
    (found,) = job.leasing.drifts
    # Each step adds its gradient w + 1 to w, from 0: gradients are 1, 2, 4, 8.
    assert (found.step, found.updates) == (2, 1)
    assert found.drift == pytest.approx(1.0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_probe_changes_no_weight_and_no_report(depth: int) -> None:
    probed = Job(0, 1, PROBED, *range(3, 10), depth=depth).run()
    plain = Job(*range(10), depth=depth).run()
    assert probed.applied == plain.applied
    assert probed.leasing.completions == plain.leasing.completions
    for name, values in plain.weights().items():
        assert (probed.weights()[name] == values).all()
    assert [found.step for found in probed.leasing.drifts] == [2]
    assert probed.model.computed.count(2) == 2
    assert (probed.loop.session.computed, plain.loop.session.computed) == (10, 10)


def test_a_probe_that_fails_is_no_failure_of_a_step() -> None:
    job = Job(0, 1, PROBED, 3, 4)

    def fail(batch: Batch) -> None:
        if batch.step == 2 and 2 in job.model.computed:
            raise SystemExit("a model's own error")

    job.model.before = fail
    job.run()
    assert (job.completed, job.leasing.failures, job.leasing.drifts) == ([0, 1, 2, 3, 4], {}, [])


def test_a_gradient_that_is_not_finite_again_is_not_known() -> None:
    job = Job(0, PROBED, 3)

    def spoil(batch: Batch, gradients: dict[str, Any]) -> None:
        if batch.step == 2 and job.model.computed.count(2) == 2:
            gradients["bias"][0] = np.nan

    job.model.spoil = spoil
    job.run()
    assert (job.completed, job.leasing.drifts) == ([0, 2, 3], [])


def test_the_last_step_s_probe_stays_unknown() -> None:
    job = Job(0, PROBED).run()
    assert (job.completed, job.leasing.drifts) == ([0, 2], [])


@pytest.mark.parametrize(
    ("versions", "incarnations", "drifts"), [((3, 4), (1, 1), 0), ((4, 4), (1, 1), 1), ((4, 4), (1, 2), 0)]
)
def test_only_newer_weights_of_the_same_shards_tell(
    versions: tuple[int, int], incarnations: tuple[int, int], drifts: int
) -> None:
    job = Job()
    probe = job.loop._probe
    variables = {name: values.copy() for name, values in job.weights().items()}
    batch = job.task.batch_of(2)
    before: Any = SimpleNamespace(versions=(3, 3), incarnations=(1, 1))
    after: Any = SimpleNamespace(versions=versions, incarnations=incarnations, variables=variables)
    probe.keep(PROBED, batch, {"bias": np.ones(2, np.float32)}, before)
    probe.measure(pb.Grant(step=3), after)
    assert len(job.leasing.drifts) == drifts


def test_a_gradient_of_zeros_has_no_drift() -> None:
    zero = {"w": np.zeros(3, np.float32)}
    assert np.isnan(drift_of(zero, zero))
    assert drift_of({"w": np.ones(4, np.float32)}, {"w": np.full(4, 1.5, np.float32)}) == 0.5
