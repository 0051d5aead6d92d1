"""What a worker or a shard says is kept within bounds, so that it cannot end the job nor draw on a terminal.

Texts, counts, and whole messages: over a real socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2
from parashard.errors import ConfigurationError, LimitExceeded, MalformedFrame, ParashardError
from parashard_coordinator.core.core import WORKERS_MAX
from parashard_coordinator.core.input_limits import (
    ADDRESS_BYTES_MAX,
    DEVICE_BYTES_MAX,
    EVENT_BYTES_MAX,
    METRICS_MAX,
    NAME_BYTES_MAX,
)
from parashard_coordinator.core.job_record import EVENTS_KEPT
from parashard_coordinator.endpoints.service import REPORTS_MAX, REQUEST_BYTES_MAX
from parashard_coordinator.shards import INTERVALS_MAX, ROUNDS_MAX
from support.coordinator_cases import core_of
from support.served_core import Served, lease_request, served, shard_request, worker_request
from support.shard_records import largest_record

EVIL = "x\x1b[2J\nlevel=critical event=fake"
LONG = "x" * (1 << 19)
SHARDS_MAX = 1024  # as the job file allows


@pytest.fixture
def it() -> Iterator[Served]:
    with served(core_of(registered=False, evaluate_after=[1, 40])) as it:
        yield it


def start(it: Served) -> None:
    for shard in range(2):
        it.client.register_shard(shard_request(shard))
    it.client.register_worker(worker_request())


@pytest.mark.parametrize("field", ["http_address", "fingerprint"])
@pytest.mark.parametrize(("text", "error"), [(LONG, LimitExceeded), (EVIL, MalformedFrame)], ids=["long", "evil"])
def test_a_worker_s_texts_that_must_stay_as_they_are_are_refused(
    it: Served, field: str, text: str, error: type[ParashardError]
) -> None:
    with pytest.raises(error, match=field):
        it.client.register_worker(worker_request(**{field: text}))
    assert not it.core.job.workers.by_name


def test_a_name_that_would_begin_a_line_is_refused(it: Served) -> None:
    with pytest.raises(ConfigurationError, match="letters, digits"):
        it.client.register_worker(worker_request(EVIL))
    assert not it.core.job.workers.by_name


@pytest.mark.parametrize("field", ["address", "http_address", "data_address", "local_path"])
@pytest.mark.parametrize(("text", "error"), [(LONG, LimitExceeded), (EVIL, MalformedFrame)], ids=["long", "evil"])
def test_a_shard_s_texts_are_refused(it: Served, field: str, text: str, error: type[ParashardError]) -> None:
    with pytest.raises(error, match=field):
        it.client.register_shard(shard_request(0, **{field: text}))
    assert it.core.job.shards.registration(0) is None


@pytest.mark.parametrize("text", [LONG, EVIL], ids=["long", "evil"])
def test_what_is_for_people_is_cut_and_made_readable(it: Served, text: str) -> None:
    it.client.register_shard(shard_request(0, restored=text))
    it.client.register_shard(shard_request(1))
    it.client.register_worker(worker_request(device=text))
    it.client.lease(lease_request(want=1))
    it.client.lease(lease_request(sequence=2, failed=[pb.FailedStep(step=0, reason=text)], want=1))
    failed = pb.EvaluationResult(evaluation=1, incarnations=[1, 1], error=text)
    it.client.lease(lease_request(sequence=3, evaluated=[failed]))
    it.core.shard_silent(0, 100.0, text)
    it.core.job.fail(text)
    status = it.client.get_status()
    assert len(status.workers[0].device.encode()) <= DEVICE_BYTES_MAX
    assert len(status.reason.encode()) <= EVENT_BYTES_MAX
    told = [*status.events, status.reason, status.workers[0].device]
    assert all(text.isprintable() and len(text.encode()) <= EVENT_BYTES_MAX for text in told)
    assert sum(text[:20].encode("unicode_escape").decode() in event for event in status.events) == 6, "each was told"


@pytest.mark.parametrize(
    "metrics", [{str(i): 0.0 for i in range(METRICS_MAX + 1)}, {EVIL: 0.0}, {LONG: 0.0}], ids=["many", "evil", "long"]
)
def test_metrics_that_cannot_be_displayed_are_a_failed_evaluation(it: Served, metrics: dict[str, float]) -> None:
    start(it)
    it.client.lease(lease_request(evaluated=[pb.EvaluationResult(evaluation=1, incarnations=[1, 1], metrics=metrics)]))
    assert it.core.job.evaluations.latest is None
    assert any(
        event.startswith("the evaluation after step 1 failed: ") and event.isprintable() for event in it.core.job.events
    )


def test_a_message_over_the_bound_is_refused(it: Served) -> None:
    with pytest.raises(LimitExceeded, match=f"larger than max .* vs. {REQUEST_BYTES_MAX}"):
        it.client.register_worker(worker_request(device="x" * REQUEST_BYTES_MAX))


def scattered(first: int) -> list[shard_pb2.Interval]:
    """Return as many intervals as a shard may tell of."""
    return [shard_pb2.Interval(start=step, stop=step + 1) for step in range(first, first + 2 * INTERVALS_MAX, 2)]


def test_the_most_intervals_fit_into_a_message() -> None:
    intervals = scattered(1 << 34)
    assert shard_request(0, applied=intervals, held=intervals).ByteSize() <= REQUEST_BYTES_MAX


def test_more_intervals_or_rounds_than_a_shard_may_tell_of_are_refused() -> None:
    with served(core_of(registered=False, steps_total=2 * INTERVALS_MAX)) as it:
        intervals = scattered(0)
        it.client.register_shard(shard_request(0, applied=intervals, held=intervals))
        for field in ("applied", "held"):
            with pytest.raises(LimitExceeded, match=f"{field} has {INTERVALS_MAX + 1} entries; allowed are"):
                it.client.register_shard(shard_request(1, **{field: [*intervals, intervals[0]]}))
        for field in ("checkpoint_rounds", "chain_rounds"):
            with pytest.raises(LimitExceeded, match=f"{field} has .* allowed are {ROUNDS_MAX}"):
                it.client.register_shard(shard_request(1, **{field: range(ROUNDS_MAX + 1)}))
        assert it.core.job.shards.registration(1) is None


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("held", 1),
        ("held_evaluations", 1),
        ("completed", pb.CompletedStep()),
        ("failed", pb.FailedStep()),
        ("evaluated", pb.EvaluationResult()),
    ],
)
def test_a_call_reports_so_much_and_no_more(it: Served, field: str, entry: object) -> None:
    start(it)
    it.client.lease(lease_request(**{field: [entry] * REPORTS_MAX}))
    events = it.core.job.events_total
    with pytest.raises(LimitExceeded, match=f"{field} has {REPORTS_MAX + 1} entries; allowed are {REPORTS_MAX}"):
        it.client.lease(lease_request(sequence=2, **{field: [entry] * (REPORTS_MAX + 1)}))
    assert it.core.job.events_total == events


@pytest.mark.full("4,096 workers; the bound of each text is tested here, 1,000 workers in test_core_growth.py")
def test_the_largest_status_passes() -> None:
    """As many workers as there may be, and shards, each with all that it may say, and as many events."""
    with served(core_of(registered=False, shards=SHARDS_MAX)) as it:
        announced: Callable[..., object] = it.service.RegisterShard
        for shard in range(SHARDS_MAX):
            where = {key: "h" * ADDRESS_BYTES_MAX for key in ("address", "http_address", "data_address")}
            announced(shard_request(shard, (1 << 63) - 1, **where), None)
            it.service._status.saw(shard, largest_record(shard))
        for index in range(WORKERS_MAX):
            name = f"{index:0{NAME_BYTES_MAX}}"
            it.service.RegisterWorker(
                worker_request(name, device="x" * 1000, http_address="h" * ADDRESS_BYTES_MAX), None
            )
            worker = it.core.job.workers.by_name[name]
            worker.steps_complete, worker.restarts, worker.incarnation = (1 << 64) - 1, (1 << 32) - 1, (1 << 64) - 1
            worker.phases_s = dict.fromkeys(worker.phases_s, 1e300)
        for _ in range(EVENTS_KEPT):
            it.core.job.add_event(LONG)
        it.core.job.fail(LONG)
        status = it.client.get_status()
    assert len(status.workers) == WORKERS_MAX
    assert {len(worker.device) for worker in status.workers} == {DEVICE_BYTES_MAX}
    assert len(status.shards) == SHARDS_MAX
