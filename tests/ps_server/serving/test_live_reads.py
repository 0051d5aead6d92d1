"""LiveReads: what it refuses, that it changes nothing, and that the lock is held for a piece at a time."""

from __future__ import annotations

from typing import Any

import pytest

from parashard._proto import shard_pb2 as pb
from parashard.errors import (
    MalformedFrame,
    ParashardError,
    PeerFailed,
    QueueFull,
    StaleIncarnation,
    StalePlan,
    UnknownVariable,
    WrongRun,
)
from parashard_server.serving import live_reads
from parashard_server.state.rows import live_rows
from support.in_process import RUN, state_of
from support.live_cases import IDS, LiveShards
from support.waiting import DEADLINE_S

BEGIN = pb.ReadChanges(position=0)


def request(what: Any = BEGIN, **changed: Any) -> pb.ReadRequest:
    kind = {pb.ReadChanges: "changes", pb.ReadBuckets: "buckets", pb.ReadWeights: "weights"}[type(what)]
    fields = {"run_id": RUN, "shard": 0, "plan_version": 1, "incarnation": 1, kind: what, **changed}
    return pb.ReadRequest(**fields)


@pytest.fixture
def job() -> LiveShards:
    job = LiveShards()
    job.push(0, range(IDS))
    return job


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (request(run_id="another"), WrongRun),
        (request(shard=1), WrongRun),
        (request(plan_version=2), StalePlan),
        (request(incarnation=2), StaleIncarnation),
        (pb.ReadRequest(run_id=RUN, plan_version=1, incarnation=1), MalformedFrame),
        (request(pb.ReadBuckets(table="usr", position=1, stop=1)), UnknownVariable),
        (request(pb.ReadBuckets(table="user", position=1, first=0, stop=2049)), MalformedFrame),
        (request(pb.ReadBuckets(table="user", position=1, first=1, stop=1)), MalformedFrame),
        (request(pb.ReadWeights(length_bytes=1 << 20)), MalformedFrame),
        (request(pb.ReadWeights(offset_bytes=2, length_bytes=4)), MalformedFrame),
        (request(pb.ReadWeights(length_bytes=4, known_version=9)), MalformedFrame),
        (request(pb.ReadWeights(offset_bytes=1 << 62, length_bytes=4)), MalformedFrame),
    ],
)
def test_what_is_refused(job: LiveShards, asked: pb.ReadRequest, error: type[ParashardError]) -> None:
    before = state_of(job.shard(0))
    with pytest.raises(error):
        job.reads[0].read(asked, DEADLINE_S)
    assert state_of(job.shard(0)) == before


def test_a_fault_in_reading_is_answered_and_the_shard_goes_on(job: LiveShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_reads, "interval_messages", lambda steps: 1 / 0)
    with pytest.raises(PeerFailed, match="ZeroDivisionError"):
        job.reads[0].read(request(pb.ReadChanges(position=job.shard(0).tables.live.notes.begin())), DEADLINE_S)
    job.push(0, [1])
    assert job.shard(0).updates.version == 2


def test_a_lock_that_is_not_free_in_time_is_said_to_be_busy(job: LiveShards) -> None:
    with job.hosts[0].lock.held(DEADLINE_S), pytest.raises(QueueFull):
        job.reads[0].read(request(), 0.0)


def test_no_turn_at_the_lock_reads_more_than_a_piece(job: LiveShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_rows, "PIECE_BYTES", 60)
    monkeypatch.setattr(live_reads, "PIECE_BYTES", 60)
    live = job.shard(0).tables.live
    sizes: list[int] = []
    right = live._rows

    def rows(*arguments: Any) -> Any:
        found = right(*arguments)
        sizes.append(sum(array.nbytes for array in found))
        return found

    monkeypatch.setattr(live, "_rows", rows)
    watcher = job.watcher()
    watcher.look()
    job.push(0, range(IDS))
    watcher.look()
    assert len(sizes) > 20
    assert max(sizes) <= 60


def test_orders_that_nobody_uses_are_forgotten(job: LiveShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_rows, "IDLE_LOOKS_MAX", 3)
    watcher = job.watcher()
    watcher.look()
    live = job.shard(0).tables.live
    assert live._orders
    for _ in range(3):
        watcher.look()
    assert not live._orders
    job.restore(0, 0)
    watcher.look()
    assert watcher.published.versions[0].pushes == 0
