"""A worker as an object: it works in a program's own process, with the program's model and data."""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.data import open_source
from parashard.data.base import Batch, DataSpec
from parashard.errors import JobFailed, NotReady, Unreachable, WrongRun
from parashard.job.load import job_from_toml
from parashard.job.schema import Job
from parashard.models.networks import SoftmaxRegression
from parashard.process.shell import Stop
from parashard.process.starts import WorkerStart
from parashard.protocol.messages import PushResult
from parashard_worker import leasing
from parashard_worker import worker as worker_module
from parashard_worker.leased import Joined
from parashard_worker.loading import OwnTask
from parashard_worker.worker import (
    TEXT_MAX,
    TOLD_MAX,
    Membership,
    Worker,
    WorkerEnd,
    gpu_memory_message,
    gpu_memory_of,
    warnings_told,
    worker_families,
)
from support.in_process import DIGEST, RUN, WEIGHT_AND_BIAS, Cluster, plan_of
from support.loop_cases import Job as LoopJob
from support.resolved_job import resolved_here
from support.shown_metrics import shown_families
from support.small_cluster import SmallCluster, small_cluster
from support.small_job import SMALL_JOB
from support.waiting import DEADLINE_S, eventually

EXAMPLES = 64
STEPS = 2 * EXAMPLES // 4  # a batch of 8 has two parts
TABLES = """
[cluster]
shards = 1
transport = "grpc"
pipeline_depth = 0
grace_s = 2.0
"""


def job(examples: int = EXAMPLES, cluster: str = "") -> Job:
    text = SMALL_JOB.replace('source = "synthetic"', f'source = "synthetic"\nexamples = {examples}')
    return job_from_toml(text + TABLES + cluster)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SmallCluster]:
    with small_cluster(resolved_here(job()), tmp_path / "store") as running:
        yield running


class Watched(SoftmaxRegression):
    """The job's own model, in the hands of a program; `before` is called with each batch."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__(spec)
        self.steps: list[int] = []
        self.before: Callable[[Batch], object] = lambda batch: None

    def loss_and_gradients(self, variables: Mapping[str, Any], batch: Batch, xp: Any) -> Any:
        self.steps.append(batch.step)
        self.before(batch)
        return super().loss_and_gradients(variables, batch, xp)


SOURCE = open_source(job().data)


def test_a_program_s_own_model_and_data_give_the_weights_of_the_job_s(cluster: SmallCluster, tmp_path: Path) -> None:
    model = Watched(SOURCE.spec)
    end = Worker(cluster.client, OwnTask(model, SOURCE)).run(Stop())
    assert end == WorkerEnd(STEPS, job_failed=False, reason="every step is in")
    assert sorted(model.steps) == list(range(STEPS))
    assert cluster.steps_applied() == STEPS
    with small_cluster(resolved_here(job()), tmp_path / "other") as other:
        assert Worker(other.client).run(Stop()).steps == STEPS  # it asks for the job, and loads what that names
        np.testing.assert_array_equal(other.shard.shard.storage.weights, cluster.shard.shard.storage.weights)


def test_other_data_than_the_job_s_are_refused_before_it_joins(cluster: SmallCluster) -> None:  # P2
    other = open_source(job(65).data)
    with pytest.raises(WrongRun, match="this machine's data differ from the job's"):
        Worker(cluster.client, OwnTask(Watched(other.spec), other)).run(Stop())
    assert not cluster.core.run_exclusive(lambda core, _: dict(core.job.workers.by_name))


def test_a_model_that_is_declared_in_another_way_is_refused(cluster: SmallCluster) -> None:  # P2
    worker = Worker(cluster.client, OwnTask(Watched(SOURCE.spec), SOURCE, model_sha256="f" * 64))
    with pytest.raises(WrongRun, match="this worker would compute another job than the coordinator's"):
        worker.run(Stop())


def test_an_override_that_changes_the_steps_is_refused(cluster: SmallCluster) -> None:  # P2
    start = WorkerStart(connect="", set=("job.batch_size=4",))
    with pytest.raises(WrongRun, match=r"job\.batch_size"):
        Worker(cluster.client, start=start).run(Stop())


def test_a_stop_ends_it_and_gives_its_leases_back(cluster: SmallCluster) -> None:
    model, stop, environment = Watched(SOURCE.spec), Stop(), dict(os.environ)
    model.before = lambda batch: stop.ask("enough") if len(model.steps) == 3 else None
    end = Worker(cluster.client, OwnTask(model, SOURCE), WorkerStart(connect="", name="worker-7")).run(stop)
    assert end == WorkerEnd(3, job_failed=False, reason="enough")
    assert not cluster.core.run_exclusive(lambda core, _: core.job.leases.held_by("worker-7"))
    assert not cluster.core.run_exclusive(lambda core, _: core.job.workers.by_name["worker-7"].live)
    assert os.environ == environment, "which is the program's"


def test_a_job_that_has_failed_is_reported(cluster: SmallCluster) -> None:
    model = Watched(SOURCE.spec)
    model.before = lambda batch: cluster.core.run_exclusive(lambda core, _: core.job.fail("a test"))
    end = Worker(cluster.client, OwnTask(model, SOURCE)).run(Stop())
    assert (end.job_failed, end.reason) == (True, "a test")
    with pytest.raises(JobFailed, match="a test"):
        Worker(cluster.client, OwnTask(model, SOURCE)).run(Stop())


class TestAStepThatIsStuckInTheModel:
    """A process of a program's own goes on; its worker ends when the model has returned."""

    def run(self, worker: Worker, stop: Stop) -> tuple[threading.Thread, list[WorkerEnd]]:
        ends: list[WorkerEnd] = []
        thread = threading.Thread(target=lambda: ends.append(worker.run(stop)), daemon=True)
        thread.start()
        return thread, ends

    @pytest.fixture
    def stuck(self) -> Iterator[tuple[Watched, threading.Event, threading.Event]]:
        model, entered, going_on = Watched(SOURCE.spec), threading.Event(), threading.Event()

        def wait(batch: Batch) -> None:
            entered.set()
            assert going_on.wait(DEADLINE_S)

        model.before = wait
        yield model, entered, going_on
        going_on.set()

    def test_that_hangs_is_reported(self, tmp_path: Path, stuck: Any) -> None:
        model, _, going_on = stuck
        hanging = job(cluster="step_timeout_s = 1.0")
        with small_cluster(resolved_here(hanging), tmp_path) as cluster:
            thread, ends = self.run(Worker(cluster.client, OwnTask(model, SOURCE)), Stop())
            eventually(
                lambda: any(
                    "taken over" in event for event in cluster.core.run_exclusive(lambda c, _: list(c.job.events))
                ),
                "the coordinator hears of it while the model is still at it",
            )
            assert not ends
            going_on.set()
            thread.join(DEADLINE_S)
        assert [end.reason for end in ends] == ["step 0 has taken over 1 s"]

    def test_is_given_back_soon_after_a_stop(self, cluster: SmallCluster, stuck: Any) -> None:
        model, entered, going_on = stuck
        stop = Stop()
        thread, ends = self.run(
            Worker(cluster.client, OwnTask(model, SOURCE), WorkerStart(connect="", name="worker-0")), stop
        )
        assert entered.wait(DEADLINE_S)
        assert cluster.core.run_exclusive(lambda core, _: core.job.leases.held_by("worker-0"))
        stop.ask("enough")
        eventually(
            lambda: not cluster.core.run_exclusive(lambda core, _: core.job.leases.held_by("worker-0")),
            "its leases are free while the model is still at it",
        )
        assert not ends
        going_on.set()
        thread.join(DEADLINE_S)
        assert [end.reason for end in ends] == ["enough"]


def test_a_worker_that_was_suspended_while_a_shard_was_away_has_its_retry_budget_left(
    monkeypatch: pytest.MonkeyPatch, virtual_time: Any
) -> None:  # P22
    plan = plan_of(WEIGHT_AND_BIAS)
    shards, answers = Cluster(plan), iter([0.0, 1000.0, 0.0])

    def away(address: str, request: object) -> None:
        for suspended_s in answers:
            virtual_time.now_s += suspended_s
            raise Unreachable("the shard is away")

    def no_view(run_id: str) -> pb.GetViewReply:
        raise NotReady("the shard is away")

    shards.before = away
    monkeypatch.setattr(leasing, "time", SimpleNamespace(monotonic=lambda: virtual_time.now_s))
    monkeypatch.setattr(worker_module, "connect_by", lambda kind, credentials: shards.connect)
    coordinator: Any = SimpleNamespace(get_view=no_view)
    told = pb.GetJobReply(run_id=RUN, job_digest=DIGEST)
    joined = Joined(RUN, "worker-0", 1, 10.0)
    member = Membership(coordinator, told, job(), plan)
    _, client = member.connected(joined, Stop(), leasing.end_process)
    client.use(shards.view())
    assert client.push(0, {}, None).acks[0].result is PushResult.APPLIED
    assert next(answers, None) is None, "it was away, and the worker suspended meanwhile"


def test_a_warning_is_told_once_with_the_user_s_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    warnings.simplefilter("always")
    before, told = warnings.showwarning, list[str]()
    with warnings_told(told.append):
        for _ in range(2):
            warnings.warn("too\n  few", stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)
    warnings.warn("later", stacklevel=1)
    assert warnings.showwarning is before
    assert [re.sub(r"\(.*test_worker.py:\d+\)", "(here)", text) for text in told] == [
        "UserWarning: too few (here)",
        "FutureWarning: old (here)",
    ]
    assert shown == ["too\n  few", "too\n  few", "old", "later"], "the log has all"


def test_their_number_and_length_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: None)
    warnings.simplefilter("always")
    told: list[str] = []
    with warnings_told(told.append):
        for number in range(TOLD_MAX + 5):
            warnings.warn(f"{number}{'x' * 10 * TEXT_MAX}", stacklevel=1)
    assert len(told) == TOLD_MAX
    assert max(map(len, told)) < TEXT_MAX + 100


def test_the_loops_counters_are_reported() -> None:
    loop = LoopJob(*range(3)).run().loop
    session = loop.session
    session.phases_s.update(pull=1.5)
    session.transfers.transfer_s = 2.5
    session.transfers.staleness_pushes = 5
    session.computed = 4
    families = shown_families(worker_families(loop, "worker-7"))
    samples = {(s.name, s.labels.get("phase")): s for family in families for s in family.samples}
    assert all(family.type == "counter" and family.documentation for family in families)
    assert {s.labels["worker"] for s in samples.values()} == {"worker-7"}
    assert samples["parashard_worker_steps_total", None].value == 3
    assert samples["parashard_worker_examples_total", None].value == 12
    assert samples["parashard_worker_phase_seconds_total", "pull"].value == 1.5
    assert samples["parashard_worker_transfer_seconds_total", None].value == 2.5
    assert samples["parashard_worker_computed_steps_total", None].value == 4
    assert samples["parashard_worker_staleness_pushes_total", None].value == 5
    phases = {phase for _, phase in samples if phase}
    assert phases == {"lease", "pull", "compute", "push"}


def test_the_memory_of_its_gpu_is_a_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(mem_info=(5 << 30, 8 << 30))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda index: device)))
    asked = gpu_memory_of("cuda:0 any")
    assert gpu_memory_message(asked) == pb.GpuMemory(used_bytes=3 << 30, total_bytes=8 << 30)
    *_, memory = shown_families(worker_families(LoopJob(0).run().loop, "worker-7", asked))
    assert (memory.name, memory.type) == ("parashard_worker_gpu_memory_bytes", "gauge")
    assert {s.labels["memory"]: s.value for s in memory.samples} == {"used": 3 << 30, "total": 8 << 30}
    assert gpu_memory_message(gpu_memory_of("cpu")) is None
