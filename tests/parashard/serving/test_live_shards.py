"""Live reading: whatever is pushed or killed meanwhile, what is published is what the shard had then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard._proto import serving_pb2 as pb
from parashard.errors import Unreachable, WrongRun
from parashard.serving import live_shards
from parashard.serving.checkpoint_watcher import Published
from parashard.serving.differences import Replica, difference, lacks
from parashard.serving.live_shards import ShardWatcher
from parashard_server.serving import live_reads
from parashard_server.state.rows import live_rows
from support.live_cases import IDS, TABLES, VARIABLES, LiveShards
from support.tiers import by_tier

ROW_ELEMENTS = {table.name: table.row_elements for table in TABLES}


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    """Have every answer be of a few rows, and notes be full soon."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (live_rows, live_reads):
            patch.setattr(module, "PIECE_BYTES", 40)
        patch.setattr(live_reads, "DIGESTED_PIECES_MAX", 2)
        patch.setattr(live_rows, "ITEMS_LEAST", 150)
        patch.setattr(live_rows, "ITEMS_OF_A_NOTE", 1)
        patch.setattr(live_shards, "PENDING_BYTES", 200)
        yield


def replica() -> Replica:
    return Replica(ROW_ELEMENTS, VARIABLES, fresh=True)


def parts_for(one: Replica, published: Published) -> list[pb.SubscribeReply]:
    held = one.held()
    return [
        part
        for shard in lacks(published.shards, held)
        for part in difference(shard, len(published.shards), ROW_ELEMENTS, VARIABLES, held, 40)
    ]


def feed(one: Replica, parts: Iterable[pb.SubscribeReply]) -> None:
    for part in parts:
        one.feed(part)


def assert_had(job: LiveShards, published: Published) -> None:
    """Each shard is published as it was at the version that it is published as."""
    for shard in published.shards:
        id_ = shard.version.id
        assert job.published(shard) == job.had[id_.shard, id_.incarnation, id_.number], id_
        assert len(shard.version.steps) == shard.version.pushes == id_.number


ids = st.lists(st.integers(0, IDS - 1), max_size=6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 1), ids),
        st.tuples(st.just("look"), st.lists(st.tuples(st.integers(0, 1), ids), max_size=8)),
        st.tuples(st.just("ask"), st.integers(0, 40)),
        st.tuples(st.just("restore"), st.integers(0, 1), st.integers(0, 8)),
        st.tuples(st.just("restart")),
    ),
    max_size=16,
)


@given(events)
def test_what_is_published_is_what_the_shard_had_at_that_version(made: list) -> None:
    """Pushes come between the answers of one look; shards come back with fewer pushes, the server with none of it."""
    job = LiveShards()
    watcher, one = job.watcher(), replica()
    for kind, *what in made:
        if kind == "push":
            job.push(*what)
        elif kind == "restore":
            job.restore(*what)
        elif kind == "restart":
            watcher = job.watcher()
        elif kind == "look":
            between = list(what[0])
            job.before_ask = lambda shard, between=between: between and job.push(*between.pop())
            watcher.look()
            job.before_ask = lambda shard: None
            assert_had(job, watcher.published)
        elif watcher.published is not None:
            parts = parts_for(one, watcher.published)
            feed(one, parts[: what[0]])
        for held in one.shards:
            id_ = held.version.id
            assert job.published(held) == job.had[id_.shard, id_.incarnation, id_.number], id_
    watcher.look()
    assert_had(job, watcher.published)
    feed(one, parts_for(one, watcher.published))
    assert [job.published(held) for held in one.shards] == job.of(watcher.published)
    assert [shard.version.id.number for shard in watcher.published.shards] == [len(made) for made in job.pushed]


@pytest.mark.parametrize("looks_every", [1, 3])
def test_rows_that_come_and_go_between_looks(looks_every: int) -> None:
    """Rows that become small at the time that their norm counts, and keys that lost their row and have one again."""
    job, drawn = LiveShards(), np.random.default_rng(1)
    watcher = job.watcher()
    watcher.look()
    for push in range(60):
        job.push(0, drawn.choice(IDS, 6).tolist())
        if push % looks_every == 0:
            watcher.look()
            assert_had(job, watcher.published)


def test_rows_that_change_between_the_answers_of_a_look() -> None:
    """Of a key that comes twice the later row counts; a record that is used anew is no row of its earlier key."""
    job, drawn = LiveShards(), np.random.default_rng(2)
    watcher = job.watcher()
    watcher.look()

    def push(shard: int) -> None:
        if drawn.random() < 0.3:
            job.push(0, drawn.choice(IDS, 4).tolist())

    for number in range(by_tier(quick=8, full=20)):
        job.push(0, range(IDS))
        job.before_ask = push
        watcher.look()
        newcomer = job.watcher()
        if number % 5 == 0:
            newcomer.look()
        job.before_ask = lambda shard: None
        watcher.look()
        assert watcher.sight.problem == ""
        assert_had(job, watcher.published)
        if number % 5 == 0:
            newcomer.look()
            assert newcomer.sight.problem == ""
            assert_had(job, newcomer.published)


def test_a_position_is_of_an_incarnation_although_another_reader_has_notes_made() -> None:
    job = LiveShards()
    one, other = job.watcher(), job.watcher()
    one.look()
    job.push(0, [1, 2, 3])
    one.look()
    job.restore(0, 0)
    other.look()
    for _ in range(3):
        job.push(0, [4])
    one.look()
    assert_had(job, one.published)


class TestAfterAReturn:
    def test_only_the_buckets_that_differ_are_read_and_only_rows_that_differ_are_sent(self) -> None:
        job = LiveShards()
        for _ in range(2):
            job.push(0, range(IDS))
        job.push(1, range(IDS))
        watcher, one = job.watcher(), replica()
        watcher.look()
        feed(one, parts_for(one, watcher.published))
        job.push(0, [3])
        watcher.look()
        feed(one, parts_for(one, watcher.published))
        job.restore(0, 2)
        job.asked.clear()
        assert watcher.look()
        asked = [
            what.buckets for what in job.asked if what.WhichOneof("what") == "buckets" and not what.buckets.digests
        ]
        assert sum(buckets.stop - buckets.first for buckets in asked) == watcher._shards[0].differing_buckets
        assert 1 <= watcher._shards[0].differing_buckets <= len(TABLES)
        assert (watcher.resyncs, str(watcher.published.versions[0].id)) == (1, "p1/s0/i2/c2")
        parts = parts_for(one, watcher.published)
        begin = parts[0].begin
        assert all(not ahead.whole and ahead.rows + ahead.gone <= 1 for ahead in begin.tables)
        feed(one, parts)
        assert one.resyncs == 1
        assert [job.published(held) for held in one.shards] == job.of(watcher.published)

    def test_a_reader_of_committed_versions_does_not_take_fewer_steps(self) -> None:
        job = LiveShards()
        for shard in (0, 0, 1):
            job.push(shard, [1])
        watcher, one = job.watcher(), Replica(ROW_ELEMENTS, VARIABLES)
        watcher.look()
        feed(one, parts_for(one, watcher.published))
        job.restore(0, 1)
        watcher.look()
        feed(one, parts_for(one, watcher.published))
        assert "lacks steps of p1/s0/i1/c2" in one.problem

    def test_a_shard_that_is_away_stays_as_it_was_read_and_the_others_go_on(self) -> None:
        job = LiveShards()
        watcher = job.watcher()
        watcher.look()
        job.down.add(0)
        job.push(0, [1])
        job.push(1, [1])
        assert watcher.look()
        assert [version.pushes for version in watcher.published.versions] == [0, 1]
        assert watcher.sight.problem == "shard 0: no answer (from 0)"
        job.down.clear()
        assert watcher.look()
        assert (watcher.sight.problem, watcher.sight.looked_at) == ("", 60.0)
        assert_had(job, watcher.published)


def test_nothing_is_published_until_every_shard_was_read() -> None:
    job = LiveShards()
    job.down.add(1)
    watcher = job.watcher()
    assert not watcher.look()
    assert watcher.published is None


def test_where_nothing_moved_nothing_is_newer_and_one_question_is_asked() -> None:
    job = LiveShards()
    job.push(0, [1, 2])
    watcher = job.watcher()
    watcher.look()
    job.asked.clear()
    assert not watcher.look()
    assert [what.WhichOneof("what") for what in job.asked] == ["changes", "changes"]


def test_a_reader_that_was_away_while_more_changed_than_is_noted_compares_digests() -> None:
    job = LiveShards()
    watcher = job.watcher()
    watcher.look()
    for _ in range(12):
        job.push(0, range(IDS))
    assert not job.shard(0).tables.live.notes.has(1)
    job.asked.clear()
    assert watcher.look()
    assert any(what.buckets.digests for what in job.asked)
    assert (watcher.resyncs, watcher.published.versions[0].pushes) == (0, 12)
    assert_had(job, watcher.published)


def test_a_shard_that_changes_faster_than_it_is_read_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    job = LiveShards()
    watcher = job.watcher()
    watcher.look()
    monkeypatch.setattr(live_shards, "ANSWERS_MAX", 5)
    monkeypatch.setattr(live_rows, "ITEMS_LEAST", 10_000)
    job.before_ask = lambda shard: shard == 0 and job.push(0, range(IDS))
    watcher.look()
    assert watcher.sight.problem == "shard 0: it changes faster than it is read"
    assert [version.pushes for version in watcher.published.versions] == [0, 0]


def test_weights_that_no_answer_has_room_for_come_in_parts_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_reads, "WEIGHTS_BYTES_MAX", 16)
    monkeypatch.setattr(live_shards, "WEIGHTS_BYTES", 16)
    job = LiveShards()
    job.push(0, [1])
    watcher = job.watcher()
    watcher.look()
    assert [version.parts_from for version in watcher.published.versions] == [0, 0]
    assert_had(job, watcher.published)
    job.push(0, [1])

    def push_between(shard: int) -> None:
        if shard == 0 and job.asked and job.asked[-1].WhichOneof("what") == "weights":
            job.push(0, [2])
            job.before_ask = lambda shard: None

    job.before_ask = push_between
    watcher.look()
    version = watcher.published.versions[0]
    assert (version.pushes, version.parts_from) == (3, 2)
    watcher.look()
    version = watcher.published.versions[0]
    assert (version.pushes, version.parts_from) == (3, 0)
    assert_had(job, watcher.published)


def test_a_variable_that_does_not_move_is_not_sent_again() -> None:
    job = LiveShards()
    watcher, one = job.watcher(), replica()
    watcher.look()
    feed(one, parts_for(one, watcher.published))
    job.push(0, [])
    watcher.look()
    begin = parts_for(one, watcher.published)[0].begin
    assert {ahead.variable for ahead in begin.partitions if not ahead.follows} == {"frozen"}
    assert {ahead.variable for ahead in begin.partitions if ahead.follows} == {"bias", "weight"}


def test_another_run_at_the_same_place_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = LiveShards()
    watcher = job.watcher()
    watcher.look()
    monkeypatch.setattr(job, "job", lambda: ("another", job.plan))
    monkeypatch.setattr(job, "ask", lambda address: _refusing)
    watcher.look()
    assert "no longer" in watcher.sight.problem
    with pytest.raises(WrongRun, match="run another is where run run-1 was"):
        watcher.look()


def _refusing(request: Any) -> Any:
    raise WrongRun("no longer")


def test_the_coordinator_may_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    job = LiveShards()
    watcher = job.watcher()
    watcher.look()

    def gone(run_id: str) -> Any:
        raise Unreachable("no answer")

    monkeypatch.setattr(job, "view", gone)
    job.push(0, [1])
    assert watcher.look()
    assert watcher.sight.problem == "coordinator: no answer"
    assert_had(job, watcher.published)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda reply: reply.rows[0].ClearField("last_use"), "times"),
        (lambda reply: reply.rows[0].__setattr__("table", "usr"), "rows of table 'usr', which is none of the job's"),
        (lambda reply: reply.__setattr__("weights", reply.weights[:-4]), "runs of weights that do not fit"),
        (
            lambda reply: reply.rows[0].__setattr__("keys", reply.rows[0].keys[8:] + reply.rows[0].keys[:8]),
            "order of keys",
        ),
    ],
)
def test_answers_that_cannot_be_right_leave_what_is_published(
    monkeypatch: pytest.MonkeyPatch, change: Any, told: str
) -> None:
    monkeypatch.setattr(live_rows, "PIECE_BYTES", 1 << 20)
    job = LiveShards()
    watcher: ShardWatcher = job.watcher()
    watcher.look()
    job.push(0, [1, 2])
    right = job.ask

    def wrong(address: str) -> Any:
        def ask(request: Any) -> Any:
            reply = right(address)(request)
            if reply.rows:
                change(reply)
            return reply

        return ask

    monkeypatch.setattr(job, "ask", wrong)
    watcher.look()
    assert told in watcher.sight.problem
    assert watcher.published.versions[0].pushes == 0
    monkeypatch.setattr(job, "ask", right)
    watcher.look()
    assert_had(job, watcher.published)
