"""Differences: whatever a subscriber holds, it gets what a reader of the newest manifest finds, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard._proto import serving_pb2 as pb
from parashard.checkpoints.catalogue import Catalogue, CheckpointId
from parashard.checkpoints.row_files import iterate_rows
from parashard.errors import MalformedFrame
from parashard.plan.partition import fixed_shards, place, split
from parashard.serving import messages
from parashard.serving.checkpoint_watcher import CheckpointWatcher, Published
from parashard.serving.differences import Replica, difference, lacks
from parashard.serving.versions import variable_of
from support.checkpoint_cases import VARIABLES, write_plan
from support.serving_cases import (
    ROW_ELEMENTS,
    TABLE,
    Committer,
    ShardLife,
    keys_of_shard,
    rows_of,
    served_rows,
    watcher_of,
)
from support.store_fakes import MemoryStore

KEYS = [[int(key) for key in keys_of_shard(shard, 12)] for shard in range(2)]


def parts_for(replica: Replica, published: Published, part_bytes: int = 40) -> list[pb.SubscribeReply]:
    """Return what a server sends to a subscriber."""
    held = replica.held()
    return [
        part
        for shard in lacks(published.shards, held)
        for part in difference(shard, len(published.shards), ROW_ELEMENTS, VARIABLES, held, part_bytes)
    ]


def feed(replica: Replica, parts: Iterable[pb.SubscribeReply]) -> bool:
    return any([replica.feed(part) for part in parts])


def replica() -> Replica:
    return Replica(ROW_ELEMENTS, VARIABLES)


def held_rows(replica: Replica) -> dict:
    return {key: row for held in replica.shards for key, row in rows_of(held.tables[TABLE].rows).items()}


def assert_same(replica: Replica, watcher: CheckpointWatcher) -> None:
    assert watcher.published is not None
    assert held_rows(replica) == served_rows(watcher)
    assert replica.versions == watcher.published.versions
    for name in VARIABLES:
        due = variable_of(VARIABLES, watcher.published.shards, name)
        assert variable_of(VARIABLES, replica.shards, name).tobytes() == due.tobytes()


class Job:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.committer = Committer(self.store)
        self.committer.write_plan()
        self.lives = [ShardLife(0), ShardLife(1)]
        self.step = 0
        self.watcher = watcher_of(self.store)
        for life in self.lives:
            self.commit(life.shard, {KEYS[life.shard][0]: (1.0, 1.0)})
        self.watcher.look()

    def commit(self, shard: int, rows: dict, gone: Iterable[int] = (), *, anew: bool = False) -> None:
        self.step += 1
        self.committer.commit(self.lives[shard], [self.step], rows, gone, anew=anew)

    def restart(self) -> None:
        """Begin another server's life: it knows nothing but the store."""
        self.watcher = watcher_of(self.store)
        self.watcher.look()


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("commit"),
            st.integers(0, 1),
            st.dictionaries(st.integers(0, 11), st.integers(0, 9), max_size=5),
            st.sets(st.integers(0, 11), max_size=5),
            st.booleans(),
        ),
        st.tuples(st.just("look")),
        st.tuples(st.just("ask"), st.integers(0, 1)),
        st.tuples(st.just("torn"), st.integers(0, 1), st.integers(0, 20)),
        st.tuples(st.just("restart")),
    ),
    max_size=20,
)


@given(events)
def test_differences_end_where_the_newest_manifests_do(made: list) -> None:
    """Two subscribers ask when they like, some answers are cut, and servers die; versions only grow."""
    job, replicas = Job(), [replica(), replica()]
    for kind, *what in made:
        before = [one.versions for one in replicas]
        if kind == "commit":
            shard, rows, gone, anew = what
            keys = KEYS[shard]
            job.commit(
                shard, {keys[n]: (float(v), float(n)) for n, v in rows.items()}, {keys[n] for n in gone}, anew=anew
            )
        elif kind == "look":
            job.watcher.look()
        elif kind == "ask":
            feed(replicas[what[0]], parts_for(replicas[what[0]], job.watcher.published))
            assert_same(replicas[what[0]], job.watcher)
        elif kind == "torn":
            feed(replicas[what[0]], parts_for(replicas[what[0]], job.watcher.published)[: what[1]])
        else:
            job.restart()
        for one, earlier in zip(replicas, before, strict=True):
            assert len(one.versions) >= len(earlier)
            assert all(now.id >= was.id for now, was in zip(one.versions, earlier, strict=False))
            assert all(held in committed(job) for held in versions_of(one))
    job.watcher.look()
    for one in replicas:
        feed(one, parts_for(one, job.watcher.published))
        assert_same(one, job.watcher)
    fresh = watcher_of(job.store)
    fresh.look()
    assert served_rows(fresh) == served_rows(job.watcher)
    assert served_rows(fresh) == {key: row for life in job.lives for key, row in life.rows.items()}


def versions_of(one: Replica) -> list:
    return [(held.version.id, rows_of(held.tables[TABLE].rows)) for held in one.shards]


def committed(job: Job) -> list:
    """Return each checkpoint that there is with its rows, as its manifest alone has them."""
    return [(id_, rows_at(job.store, id_)) for id_ in Catalogue(job.store).checkpoints()]


def rows_at(store: MemoryStore, id_: CheckpointId) -> dict:
    return {
        int(key): tuple(row)
        for _, rows in iterate_rows(store, Catalogue(store).manifest(id_))
        for key, row in zip(rows.keys, rows.values.tolist(), strict=True)
    }


def test_of_a_shard_that_did_not_change_nothing_is_sent() -> None:
    job, one = Job(), replica()
    feed(one, parts_for(one, job.watcher.published))
    assert parts_for(one, job.watcher.published) == []
    job.commit(1, {KEYS[1][1]: (2.0, 2.0)})
    job.watcher.look()
    begins = [part.begin for part in parts_for(one, job.watcher.published) if part.HasField("begin")]
    assert [str(messages.id_of(begin.version)) for begin in begins] == ["p1/s1/i1/c2"]
    assert [(ahead.whole, ahead.rows, ahead.gone) for ahead in begins[0].tables] == [(False, 1, 0)]


def test_a_partition_whose_values_did_not_change_is_not_sent_by_another_server_either() -> None:
    job, one = Job(), replica()
    feed(one, parts_for(one, job.watcher.published))
    job.step += 1
    job.committer.commit(job.lives[0], [job.step], {KEYS[0][1]: (2.0, 2.0)}, seed=1)
    job.restart()
    parts = parts_for(one, job.watcher.published)
    begin = begin_of(parts)
    assert (begin.elements, {ahead.follows for ahead in begin.partitions}) == (0, {False})
    assert not any(part.HasField("variable") for part in parts)
    feed(one, parts)
    assert_same(one, job.watcher)
    job.commit(0, {})
    job.watcher.look()
    parts = parts_for(one, job.watcher.published)
    assert begin_of(parts).elements == sum(elements_in(part) for part in parts) > 0
    feed(one, parts)
    assert_same(one, job.watcher)


def begin_of(parts: list[pb.SubscribeReply]) -> pb.ShardBegin:
    assert parts[0].HasField("begin")
    return parts[0].begin


def elements_in(part: pb.SubscribeReply) -> int:
    return len(part.variable.values) // 4


def with_partitions(begin: pb.ShardBegin, partitions: Iterable[pb.PartitionBegin]) -> pb.SubscribeReply:
    """Return a beginning that tells of these partitions."""
    changed = pb.ShardBegin()
    changed.CopyFrom(begin)
    del changed.partitions[:]
    changed.partitions.extend(partitions)
    return pb.SubscribeReply(begin=changed)


@pytest.mark.parametrize(
    ("follows", "twice", "told"),
    [
        (False, False, "is to stay as it is held, and is not held"),
        (True, True, "a partition is named twice"),
    ],
)
def test_partitions_that_cannot_be_right_are_refused(follows: bool, twice: bool, told: str) -> None:
    job, one = Job(), replica()
    begin = begin_of(parts_for(one, job.watcher.published))
    for ahead in begin.partitions:
        ahead.follows = follows
    with pytest.raises(MalformedFrame, match=told):
        feed(one, [with_partitions(begin, [*begin.partitions] * (2 if twice else 1))])


def test_values_that_were_not_told_of_are_refused() -> None:
    job, one = Job(), replica()
    parts = parts_for(one, job.watcher.published)
    some = next(part for part in parts if part.HasField("variable"))
    with pytest.raises(MalformedFrame, match="was not told to follow"):
        feed(one, [with_partitions(begin_of(parts), ()), some])


def test_a_server_that_was_started_again_sends_only_what_changed() -> None:
    job, one = Job(), replica()
    feed(one, parts_for(one, job.watcher.published))
    job.commit(0, {KEYS[0][1]: (2.0, 2.0)}, gone=[KEYS[0][0]])
    job.restart()
    begins = [part.begin for part in parts_for(one, job.watcher.published) if part.HasField("begin")]
    assert [(ahead.whole, ahead.rows, ahead.gone) for ahead in begins[0].tables] == [(False, 1, 1)]
    feed(one, parts_for(one, job.watcher.published))
    assert_same(one, job.watcher)


def test_a_subscriber_of_a_server_whose_files_go_another_way_gets_all_rows() -> None:
    """What it holds was made by an increment that the shard's next life does not have."""
    job, one = Job(), replica()
    restored = job.lives[0].copy()
    job.commit(0, {KEYS[0][1]: (2.0, 2.0)})
    job.watcher.look()
    feed(one, parts_for(one, job.watcher.published))
    restored.incarnation, restored.number = 2, 5
    job.committer.commit(restored, [job.step, job.step + 1], {KEYS[0][2]: (3.0, 3.0)})
    job.restart()
    begins = [part.begin for part in parts_for(one, job.watcher.published) if part.HasField("begin")]
    assert [begin.tables[0].whole for begin in begins] == [True]
    feed(one, parts_for(one, job.watcher.published))
    assert_same(one, job.watcher)


def test_a_server_that_was_started_on_an_older_version_sends_nothing() -> None:
    job, one = Job(), replica()
    older = job.watcher.published
    job.commit(0, {KEYS[0][1]: (2.0, 2.0)})
    job.watcher.look()
    feed(one, parts_for(one, job.watcher.published))
    assert parts_for(one, older) == []


def test_a_version_that_lacks_steps_of_what_is_held_is_refused_and_told() -> None:
    job, one = Job(), replica()
    restored = job.lives[0].copy()
    job.commit(0, {KEYS[0][1]: (2.0, 2.0)})
    job.watcher.look()
    feed(one, parts_for(one, job.watcher.published))
    held = one.versions
    restored.incarnation, restored.number = 2, 5
    job.committer.commit(restored, [77], {})
    job.restart()
    assert not feed(one, parts_for(one, job.watcher.published))
    assert one.versions == held
    assert one.problem == "the server has p1/s0/i2/c6, which lacks steps of p1/s0/i1/c2: that one is kept"


def test_another_plan_counts_only_with_all_its_shards() -> None:
    job, one = Job(), replica()
    feed(one, parts_for(one, job.watcher.published))
    plan = place(VARIABLES, split(VARIABLES, fixed_shards(3)), 3, version=2)
    write_plan(job.store, plan)
    committer = Committer(job.store, plan)
    for shard in range(3):
        committer.commit(ShardLife(shard), range(9), {int(keys_of_shard(shard, 1, 3)[0]): (float(shard), 0.0)})
    assert job.watcher.look()
    parts = parts_for(one, job.watcher.published)
    ends = [place for place, part in enumerate(parts) if part.HasField("end")]
    assert len(ends) == 3
    assert not feed(one, parts[: ends[1] + 1])
    assert [str(version.id) for version in one.versions] == ["p1/s0/i1/c1", "p1/s1/i1/c1"]
    assert feed(one, parts_for(one, job.watcher.published))  # of the last shard alone
    assert_same(one, job.watcher)


@pytest.mark.parametrize("lost", range(1, 10))
def test_a_part_that_is_missing_is_found(lost: int) -> None:
    job, one = Job(), replica()
    job.commit(0, {key: (1.0, 2.0) for key in KEYS[0]})
    job.watcher.look()
    parts = parts_for(one, job.watcher.published, part_bytes=32)
    kinds = [part.WhichOneof("part") for part in parts]
    assert lost < kinds.index("end")
    assert {"rows", "variable"} < set(kinds[: kinds.index("end")])
    with pytest.raises(MalformedFrame):
        feed(one, parts[:lost] + parts[lost + 1 :])
    assert one.shards == ()


def test_a_part_that_comes_twice_is_found() -> None:
    job, one = Job(), replica()
    parts = parts_for(one, job.watcher.published)
    with pytest.raises(MalformedFrame):
        feed(one, [*parts[:2], *parts[1:]])
    assert one.shards == ()


@pytest.mark.parametrize("length", [1, 7, 9])
def test_bytes_that_are_no_keys_are_refused(length: int) -> None:
    with pytest.raises(MalformedFrame, match=f"{length} bytes of keys; a key has 8"):
        messages.keys_of(b"x" * length)


def test_variables_that_the_shards_have_not_all_of_are_refused() -> None:
    job, one = Job(), replica()
    parts = parts_for(one, job.watcher.published)
    first = next(part.variable for part in parts if part.HasField("variable"))
    partition = first.variable, first.row_start, first.row_stop

    def of_it(message: pb.VariablePart | pb.PartitionBegin) -> bool:
        return (message.variable, message.row_start, message.row_stop) == partition

    left = [part for part in parts[1:] if not (part.HasField("variable") and of_it(part.variable))]
    cut = with_partitions(begin_of(parts), [ahead for ahead in begin_of(parts).partitions if not of_it(ahead)])
    cut.begin.elements -= sum(elements_in(part) for part in parts if part.HasField("variable") and of_it(part.variable))
    with pytest.raises(MalformedFrame, match=first.variable):
        feed(one, [cut, *left])
    assert one.shards == ()
