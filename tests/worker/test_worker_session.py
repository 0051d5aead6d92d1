"""A session: a program computes a job's steps in a loop of its own, and each is in once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.data import open_source
from parashard.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch, UnknownVariable, WrongRun
from parashard.job.load import job_from_toml
from parashard.models.networks import SoftmaxRegression
from parashard.process.shell import Stop
from parashard_worker.program import ProgramSession, Step
from parashard_worker.worker import Worker
from support.resolved_job import resolved_here
from support.small_cluster import SmallCluster, small_cluster
from support.small_job import SMALL_JOB

EXAMPLES, STEPS = 64, 16
CLUSTER = '[cluster]\nshards = 1\ntransport = "grpc"\npipeline_depth = 0\n'


def resolved(policy: str = "async", batch_size: int = 8) -> Any:
    text = SMALL_JOB.replace('source = "synthetic"', f'source = "synthetic"\nexamples = {EXAMPLES}')
    text = text.replace("batch_size = 8", f"batch_size = {batch_size}")
    return resolved_here(job_from_toml(f'{text}{CLUSTER}[consistency]\npolicy = "{policy}"\n'))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    with small_cluster(resolved(), tmp_path / "store") as running:
        yield running


def session_of(cluster: SmallCluster, **more: Any) -> ProgramSession:
    return ProgramSession(cluster.client.address, **more)


SPEC = open_source(resolved().job.data).spec


def computed(weights: Mapping[str, Any], step: Step) -> tuple[float, Mapping[str, Any]]:
    assert step.batch is not None
    return SoftmaxRegression(SPEC).loss_and_gradients(weights, step.batch, np)


def weights_of(cluster: SmallCluster) -> Any:
    return cluster.shard.shard.storage.weights


@pytest.mark.parametrize(("policy", "parts"), [("async", 1), ("auto:2", 2)])
def test_a_loop_of_one_s_own_gives_the_weights_of_the_job_s_worker(tmp_path: Path, policy: str, parts: int) -> None:
    job, numbers = resolved(policy, batch_size=12), []
    with small_cluster(job, tmp_path / "one") as one, small_cluster(job, tmp_path / "other") as other:
        with session_of(one) as session:
            for step in session.steps():
                loss, gradients = computed(session.pull(), step)
                assert session.push(step, gradients, loss=loss)
                numbers.append((step.number, step.epoch))
        due = [(number, number // (6 * parts)) for number in range(12 * parts)]
        empty = [(number, epoch) for number, epoch in due if number % (6 * parts) == 11]  # of four examples
        assert sorted(numbers) == [step for step in due if step not in empty]
        assert one.steps_applied() == 12 * parts
        Worker(other.client).run(Stop())
        np.testing.assert_array_equal(weights_of(one), weights_of(other))


def test_a_session_is_refused_where_workers_share_batches_that_it_does_not_see(tmp_path: Path) -> None:
    with small_cluster(resolved("auto:2"), tmp_path / "store") as cluster:
        cluster.told.batched = True
        with pytest.raises(ConfigurationError, match="the data of this run are whole batches"), session_of(cluster):
            pass


def test_a_session_and_a_worker_weigh_a_short_step_of_a_round_the_same(tmp_path: Path) -> None:
    job = resolved("sync:4", batch_size=7)  # the last step of an epoch has one example
    with small_cluster(job, tmp_path / "one") as one, small_cluster(job, tmp_path / "other") as other:
        with session_of(one) as session:
            for step in session.steps():
                session.push(step, computed(session.pull(), step)[1])
        Worker(other.client).run(Stop())
        np.testing.assert_array_equal(weights_of(one), weights_of(other))


@pytest.mark.parametrize("policy", ["auto:1", "async", "ssp:2", "sync:4"])
def test_a_step_that_is_not_pushed_comes_again(tmp_path: Path, policy: str) -> None:
    with small_cluster(resolved(policy), tmp_path / "store") as cluster:
        seen: list[int] = []
        with session_of(cluster) as session:
            for step in session.steps():
                seen.append(step.number)
                if seen.count(step.number) == 2 or step.number % 3:
                    session.push(step, {})
        assert sorted(set(seen)) == list(range(STEPS))
        assert len(seen) > STEPS
        assert cluster.steps_applied() >= STEPS - (4 if policy == "sync:4" else 0), (
            "the last round waits for its commit"
        )


def test_what_a_session_holds_is_given_back_when_it_ends(cluster: SmallCluster) -> None:
    session = session_of(cluster, name="mine")
    with pytest.raises(ZeroDivisionError), session:  # noqa: PT012  # the loop is what raises
        for step in session.steps():
            session.push(step, {}, loss=1 / step.number)  # of step 0 there is none
    assert cluster.core.run_exclusive(lambda core, _: core.job.leases.leased) == 0
    events = cluster.core.run_exclusive(lambda core, _: list(core.job.events))
    assert any("mine failed at step 0" in event and "ZeroDivisionError" in event for event in events)
    with session_of(cluster) as other:
        done = [other.push(step, {}) for step in other.steps()]
    assert done == [True] * STEPS


@pytest.mark.parametrize("examples", [-1, 3.5, "x", True, 2**32])
def test_a_bad_number_of_examples_leaves_the_step_to_be_pushed(cluster: SmallCluster, examples: Any) -> None:
    with session_of(cluster) as session:
        for step in session.steps():
            if step.number == 0:
                with pytest.raises(ConfigurationError, match="examples="):
                    session.push(step, {}, examples=examples)
            assert session.push(step, {}, examples=np.int64(8))
    assert cluster.steps_applied() == STEPS


def test_no_push_moves_nothing_and_is_in(cluster: SmallCluster) -> None:
    before = weights_of(cluster).copy()
    with session_of(cluster, data=False) as session:
        for step in session.steps():
            assert step.batch is None
            assert len(step.indices) == 8
            session.push(step, None)
    assert cluster.steps_applied() == STEPS
    np.testing.assert_array_equal(weights_of(cluster), before)


def test_the_weights_are_the_session_s(cluster: SmallCluster) -> None:
    with session_of(cluster) as session:
        with pytest.raises(ConfigurationError, match="of a step"):
            session.pull()
        steps = session.steps()
        first = next(steps)
        assert session.push(first, {})
        with pytest.raises(ConfigurationError, match="of a step"):
            session.pull()
        with pytest.raises(ConfigurationError, match="step 0 is not the session's present one"):
            session.push(first, {})
        next(steps)
        (weights, *_) = session.pull().values()
        with pytest.raises(ValueError, match="read-only"):
            weights += 1.0


MISTAKES = {
    "another variable": (
        {"weights": np.zeros(3, np.float32)},
        UnknownVariable,
        "which is none of dense_0.bias, dense_0.weight",
    ),
    "another shape": ({"dense_0.bias": np.zeros(3, np.float32)}, ShapeMismatch, "'dense_0.bias' is float32 [(]3,[)]"),
    "whole numbers": ({"dense_0.bias": np.zeros(2, np.int64)}, ShapeMismatch, "'dense_0.bias' is int64"),
    "not finite": (
        {"dense_0.bias": np.full(2, np.nan)},
        NonFiniteGradient,
        "gradient of 'dense_0.bias' became NaN at step 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_gradient_that_is_none_reaches_no_shard(cluster: SmallCluster, mistake: str) -> None:
    gradients, kind, says = MISTAKES[mistake]
    with session_of(cluster) as session:
        steps = session.steps()
        with pytest.raises(kind, match=says):
            session.push(next(steps), gradients)
        assert session.push(next(steps), {}), "the next one"
    assert cluster.steps_applied() == 1
    events = cluster.core.run_exclusive(lambda core, _: list(core.job.events))
    assert sum("failed at step 0" in event for event in events) == 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_push_that_was_refused_may_be_corrected(cluster: SmallCluster, mistake: str) -> None:
    gradients, kind, _ = MISTAKES[mistake]
    with session_of(cluster) as session:
        for step in session.steps():
            if step.number == 0:
                with pytest.raises(kind):
                    session.push(step, gradients)
                assert session.pull(), "the weights are those of the step"
            assert session.push(step, {})
    assert cluster.steps_applied() == STEPS
    events = cluster.core.run_exclusive(lambda core, _: list(core.job.events))
    assert not any("failed at step" in event for event in events)


def test_other_data_are_refused(cluster: SmallCluster) -> None:
    overrides = [("data.examples", 2 * EXAMPLES, "settings")]
    with pytest.raises(WrongRun, match="data differ"), session_of(cluster, overrides=overrides):
        pass
