"""The core is reached under its lock alone, by every thread of a coordinator, from its start to its report."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.request import urlopen

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard.job.load import job_from_toml
from parashard.process.run_files import REPORT_FILE
from parashard.process.shell import Stop
from parashard.store.claims import claim_incarnation
from parashard_coordinator.core.calls import JobState
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.supervision import LocalLauncher, ProcessName
from parashard_coordinator.exclusive_core import ExclusiveCore
from parashard_coordinator.run import coordination as module
from parashard_coordinator.run.coordination import Coordination
from parashard_coordinator.run.store import RunStore
from parashard_coordinator.shards import ShardChannels
from support.checkpoint_cases import PLAN, RUN, STEPS, write_drained
from support.coordinator_cases import Caller, core_of
from support.fake_shards import FakeShards
from support.owned_core import owned_core
from support.resolved_job import resolved_here
from support.served_core import lease_request, worker_request
from support.small_job import SMALL_JOB
from support.store_fakes import MemoryStore
from support.waiting import DEADLINE_S


def coordination_of(core: ExclusiveCore, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Coordination:
    """Return a coordination whose shards do not answer, and have saved already."""
    store = MemoryStore()
    resolved = resolved_here(job_from_toml(SMALL_JOB))
    parts = write_drained(store, job_digest=resolved.digest).parts
    shards = FakeShards(lambda request: (parts[request.shard], [(0, STEPS)]))
    run_store = RunStore(store, claim_incarnation(store, "coordinator"))
    job = pb.GetJobReply(run_id=RUN, job_digest=resolved.digest)
    channels = cast(ShardChannels, shards)
    coordination = Coordination(core, resolved, PLAN, job, run_dir, run_store, channels)
    monkeypatch.setattr(module, "TICK_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "SAVE_S", 0.0)
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    return coordination


def working(coordination: Coordination, name: str) -> None:
    """Take steps and report them until the job is over."""
    service = coordination.service
    service.RegisterWorker(worker_request(name), None)
    done: list[pb.CompletedStep] = []
    for sequence in range(1, 100_000):
        reply = service.Lease(lease_request(name, sequence, want=2, wait_s=0.01, completed=done), None)
        if reply.state == pb.JOB_STATE_DONE:
            return
        done = [pb.CompletedStep(step=grant.step, incarnations=[1, 1]) for grant in reply.granted]
    pytest.fail("the job does not end")


def test_no_thread_touches_the_core_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, trespasses = owned_core(steps_total=STEPS)
    coordination = coordination_of(core, tmp_path, monkeypatch)
    http = coordination.http_port("127.0.0.1", 0, {})
    http.start()
    over = threading.Event()

    def asking(ask: Callable[[], object]) -> int:
        asked = 0
        while not over.is_set() or not asked:
            ask()
            asked += 1
        return asked

    def shown(page: str) -> bytes:
        with urlopen(f"http://{http.address}/{page}", timeout=DEADLINE_S) as answer:  # our own port
            return bytes(answer.read())

    service = coordination.service
    with ThreadPoolExecutor(8) as threads:
        workers = [threads.submit(working, coordination, f"worker-{i}") for i in range(2)]
        others = [threads.submit(asking, lambda page=page: shown(page)) for page in ("metrics", "readyz", "")]
        others.append(threads.submit(asking, lambda: service.GetStatus(pb.GetStatusRequest(), None)))
        others.append(threads.submit(asking, lambda: service.GetView(pb.GetViewRequest(run_id=RUN), None)))
        state = coordination.run(Stop())
        for worker in workers:
            worker.result(DEADLINE_S)
        over.set()
        assert all(other.result(DEADLINE_S) for other in others)
    http.stop()
    assert (trespasses, state) == ([], JobState.DONE)
    assert json.loads((tmp_path / REPORT_FILE).read_text())["state"] == "done"


def test_who_touches_it_without_the_lock_is_seen() -> None:
    core, trespasses = owned_core()
    leaked = core.run_exclusive(lambda core, _: core)
    leaked_job = core.run_exclusive(lambda core, _: core.job)
    assert trespasses == []
    assert leaked.job is leaked_job
    assert leaked_job.state is JobState.RUNNING
    assert [where.partition(":")[0] for where in trespasses] == ["job", "state"]


def test_a_waiter_sees_what_changed_before_the_wait_began() -> None:
    core, _ = owned_core()
    core.run_exclusive(lambda core, _: core.scale(5))
    assert core.run_until(lambda core, _: core.job.workers_wanted, lambda wanted: wanted == 5, DEADLINE_S) == 5
    assert core.run_until(lambda core, _: core.job.workers_wanted, lambda wanted: wanted == 6, 0.0) == 5


def test_a_decision_of_a_call_that_waited_is_stored_before_it_is_told() -> None:  # P7, P37
    core, stored = ExclusiveCore(core_of()), list[int]()
    core.on_decision = lambda core: stored.append(core.job.decisions)

    def decide(core: Core, now_s: float) -> int:
        core.job.decisions += 1
        return core.job.decisions

    assert core.run_until(decide, bool, DEADLINE_S) == 1
    assert stored == [1]


def test_a_coordinator_does_not_count_its_own_pause_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:  # P22, P26
    clock = SimpleNamespace(monotonic=lambda: now_s)
    now_s = 100.0
    monkeypatch.setattr("parashard_coordinator.exclusive_core.time", clock)
    core = ExclusiveCore(core_of(launcher=LocalLauncher(2, 1.0, 9), silence_s=30.0, lease_ttl_s=10.0))
    running = [ProcessName("shard", 0), ProcessName("shard", 1), ProcessName("worker", 0)]

    def looked(core: Core, now_s: float) -> tuple[int, int, bool]:
        core.tick(now_s)
        killed = core.supervise([], running, now_s).kill
        return (
            core.job.leases.leased,
            len(killed),
            any("silent" in event or "ended" in event for event in core.job.events),
        )

    def joined(core: Core, now_s: float) -> None:
        worker = Caller(core, "worker-0", now_s=now_s)
        worker.lease(2, now_s)
        worker.call(now_s, computing=[0])

    core.run_exclusive(joined)
    now_s += 1.0
    assert core.run_exclusive(looked) == (2, 0, False)
    now_s += 3600.0
    assert core.run_exclusive(looked) == (2, 0, False), "it could hear no process while suspended"
    for _ in range(6):
        now_s += 1.9
        found = core.run_exclusive(looked)
    assert (found[0], found[2]) == (0, True), "the processes are silent, and it runs"
