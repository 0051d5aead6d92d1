"""The status: the core and the shards' records in one message."""

from __future__ import annotations

import math

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.telemetry.transfer import Overlap
from parashard_coordinator.core.controller import MEASURED
from parashard_coordinator.core.core import Core
from parashard_coordinator.core.membership import GpuMemory
from parashard_coordinator.core.policies import Auto
from parashard_coordinator.endpoints.status import StatusView
from support.coordinator_cases import Caller, announce, core_of, done, judged
from support.shard_records import record_of


def view() -> StatusView:
    return StatusView("digits", "ssp:8")


def test_a_job_that_waits_for_its_shards() -> None:
    core = core_of(registered=False)
    announce(core, 1)
    status = view().message(core.job, 5.0)
    assert (status.run_id, status.job, status.consistency) == ("run-1", "digits", "ssp:8")
    assert (status.state, status.reason) == (pb.JOB_STATE_STARTING, "waiting for the shards")
    assert [(s.shard, s.registered, s.live, s.address) for s in status.shards] == [
        (0, False, False, ""),
        (1, True, True, "shard-1:1"),
    ]
    assert (status.steps_total, status.steps_complete, status.steps_leased) == (40, 0, 0)
    assert (status.training_loss, status.elapsed_s, dict(status.held_out)) == (0.0, 0.0, {})
    assert (status.staleness_p50, status.staleness_max, status.step_lag_max) == (0, 0, 0)


def test_an_auto_job_says_its_lag_and_who_gets_no_parts() -> None:
    core = core_of(Auto(2))
    _, slow = Caller(core), Caller(core)
    auto = StatusView("digits", "auto: batches of 64 in 2 parts")
    assert auto.message(core.job, 0.0).consistency == "auto: batches of 64 in 2 parts, lag 0 (nothing is measured yet)"
    assert core.job.controller is not None
    core.job.controller.judge_worker(slow.name, [1.0] * MEASURED, 0.1, 0.0)
    text = f"{slow.name} gets no parts (a part takes it 1 s, the others 0.1 s)"
    assert auto.message(core.job, 1.0).consistency.endswith(f"; {text}")


def test_a_job_on_its_way() -> None:
    core = core_of(evaluate_after=[1, 40])
    caller, other = Caller(core), Caller(core)
    caller.lease(1)
    caller.call(2.0, completed=done(0, loss=0.25), want=1, phases_s={"pull": 1.5})
    caller.call(2.0, evaluated=judged(1, accuracy=0.5), want=1)
    core.tick(11.0)
    seen = view()
    seen.saw(0, record_of(0, 1, {0: 3, 2: 1}, step_lag_max=4))
    seen.saw(1, record_of(1, 1, {7: 1}, step_lag_max=2))
    seen.http_address = "host:8"
    status = seen.message(core.job, 4.0)
    assert status.state == pb.JOB_STATE_RUNNING
    assert (status.steps_complete, status.steps_leased, status.training_loss) == (1, 1, 0.25)
    assert dict(status.held_out) == {"accuracy": 0.5}
    assert (status.elapsed_s, status.examples_per_s) == (4.0, 4.0)
    assert (status.staleness_p50, status.staleness_p95, status.staleness_max, status.step_lag_max) == (0, 7, 7, 4)
    assert [shard.record.version for shard in status.shards] == [1, 1]
    assert (status.workers_wanted, status.http_address) == (2, "host:8")
    assert list(status.events) == list(core.job.events)
    assert status.events_total == core.job.events_total
    first, second = status.workers
    assert (first.name, first.live, first.steps_complete, first.steps_held) == (caller.name, True, 1, 1)
    assert (first.examples_per_s, first.phases.pull, first.http_address) == (4.0, 1.5, "host:9")
    assert (second.name, second.live, second.steps_held) == (other.name, False, 0)


def test_workers_are_in_the_order_of_their_numbers() -> None:
    core = core_of(workers=12)
    for number in (10, 2, 0, 11, 1):
        Caller(core, f"worker-{number}")
    names = [worker.name for worker in view().message(core.job, 0.0).workers]
    assert names == ["worker-0", "worker-1", "worker-2", "worker-10", "worker-11"]


def test_what_is_wrong_now_is_listed() -> None:
    core, seen = core_of(), view()
    core.shard_silent(1, 4.0, "no answer")
    core.job.warn("checkpoint-0", "shard-0: checkpoint failed: no space left on device")
    status = seen.message(core.job, 0.0)
    assert list(status.problems) == [
        "shard-1 does not answer; training is paused until it does (no answer)",
        "shard-0: checkpoint failed: no space left on device",
    ]
    assert [shard.live for shard in status.shards] == [True, False]
    core.shard_answered(1)
    core.job.resolve("checkpoint-0")
    assert list(seen.message(core.job, 0.0).problems) == []


def test_a_later_record_replaces_an_earlier_one() -> None:
    seen = view()
    seen.saw(0, record_of(0, 1, {5: 1}))
    seen.saw(0, record_of(0, 2, {1: 2}))
    assert seen.staleness() == {1: 2}
    assert seen.records()[0].figures.version == 2


def test_a_loss_that_is_not_finite_is_not_shown() -> None:
    core = core_of()
    core.job.learning.loss = math.inf
    assert view().message(core.job, 0.0).training_loss == 0.0


def test_embedding_tables_are_summed_over_shards_and_the_fullest_is_told() -> None:
    seen = view()
    user = [
        shard_pb2.TableFigures(table="user", rows=rows, rows_max=10, memory_bytes=100, pulled_keys=5) for rows in (2, 7)
    ]
    item = shard_pb2.TableFigures(table="item", rows=1, rows_max=(1 << 64) - 1, candidates=(1 << 64) - 1)
    for table, hot in zip(user, ([(5, 9), (6, 3)], [(7, 9), (8, 4)]), strict=True):
        table.hottest_keys.extend(shard_pb2.HotKey(key=key, pushes=pushes) for key, pushes in hot)
    seen.saw(0, record_of(0)._replace(tables=(user[0], item)))
    seen.saw(1, record_of(1)._replace(tables=(item, user[1])))
    of_item, of_user = seen.message(core_of().job, 0.0).tables
    hottest = [(hot.key, hot.pushes) for hot in of_user.total.hottest_keys]
    assert hottest == [(5, 9), (7, 9), (8, 4), (6, 3)], "the most first"
    of_user.total.ClearField("hottest_keys")
    assert of_user.total == shard_pb2.TableFigures(table="user", rows=9, rows_max=20, memory_bytes=200, pulled_keys=10)
    assert of_user.fullest == 0.7
    assert (of_item.total.rows, of_item.total.candidates) == (2, (1 << 64) - 1)
    assert not view().message(core_of().job, 0.0).tables


def test_what_transfers_take_is_of_the_worker_s_present_process_also_for_a_later_coordinator() -> None:
    def share(core: Core) -> float | None:
        [worker] = StatusView("digits", "async").message(core.job, 0.0).workers
        return Overlap.of([worker.phases]).step_share

    core, later = core_of(), core_of()
    caller = Caller(core, "worker-0", token=5)
    caller.call(phases_s={"transfer": 3.0, "compute": 1.0})
    assert share(core) == 0.75
    caller.join(later, "worker-0")
    assert share(later) is None, "it has not reported yet"
    caller.call(phases_s={"transfer": 5.0, "compute": 3.0})
    assert share(later) == 0.625, "a worker says its seconds since its own start"
    Caller(later, "worker-0", token=6)
    assert share(later) is None, "another process"


def test_the_memory_of_a_workers_gpu_is_as_it_last_told() -> None:
    core, view = core_of(), StatusView("digits", "async")
    callers = [Caller(core, f"worker-{number}") for number in range(2)]
    callers[0].call(gpu_memory=GpuMemory(3, 8))
    callers[0].call(gpu_memory=GpuMemory(5, 8))
    callers[1].call()
    first, second = view.message(core.job, 0.0).workers
    assert (first.gpu_memory.used_bytes, first.gpu_memory.total_bytes) == (5, 8)
    assert not second.HasField("gpu_memory")
    callers[0].call()
    assert not view.message(core.job, 0.0).workers[0].HasField("gpu_memory"), "its driver does not answer any more"
