"""What has not moved since an earlier pull is not sent again, and a client never misses what has (P16)."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.client.pulled import Pulled
from parashard.errors import MalformedFrame, PeerFailed
from parashard.plan.partition import fixed_shards
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import PullRun, Push
from support.in_process import Cluster, plan_of, use_small_messages, variables_of

VARIABLES = variables_of(
    Variable("fixed", (6,), Initializer("constant", 5.0), frozen=True), Variable("w", (8,), Initializer("normal", 1.0))
)
FIXED_BYTES, ALL_BYTES = 4 * 6, 4 * (6 + 8)
ONES = {"w": np.ones(8, np.float32)}


def cluster_of(shards: int = 1, **of_shard: object) -> Cluster:
    return Cluster(plan_of(VARIABLES, shards, fixed_shards(2)), **of_shard)


def sent_bytes(cluster: Cluster) -> int:
    return sum(shard.record.pull_bytes for shard in cluster.shards)


def known_versions(cluster: Cluster) -> dict[str, list[int | None]]:
    """Return where the versions that pulls name are noted from now on, by address; shards are asked at once."""
    known: dict[str, list[int | None]] = defaultdict(list)

    def note(address: str, request: object) -> None:
        if isinstance(request, PullRun):
            known[address].append(request.known_version)

    cluster.before = note
    return known


def assert_current(cluster: Cluster, pulled: Pulled) -> None:
    fresh = cluster.client().pull()
    assert all(np.array_equal(value, fresh.variables[name]) for name, value in pulled.variables.items())


def test_a_frozen_variable_travels_once_and_the_others_when_they_have_moved():
    cluster = cluster_of(2)
    client = cluster.client()
    client.pull().release()
    assert sent_bytes(cluster) == ALL_BYTES
    for step in range(3):
        client.push(step, ONES, None)
        pulled = client.pull()
        pulled.release()
    assert sent_bytes(cluster) == ALL_BYTES + 3 * (ALL_BYTES - FIXED_BYTES)
    assert sum(shard.record.pull_unmoved_bytes for shard in cluster.shards) == 3 * FIXED_BYTES
    assert_current(cluster, pulled)


def test_a_pull_of_what_has_not_moved_sends_nothing_and_gives_the_same():
    cluster = cluster_of()
    client = cluster.client()
    first = client.pull()
    values = {name: value.copy() for name, value in first.variables.items()}
    first.release()
    again = client.pull()
    assert sent_bytes(cluster) == ALL_BYTES
    assert again.variables["w"] is first.variables["w"]
    assert all(np.array_equal(value, values[name]) for name, value in again.variables.items())


def test_arrays_that_are_not_given_back_stay_as_they_are():
    cluster = cluster_of()
    client = cluster.client()
    kept = client.pull()
    before = kept.variables["w"].copy()
    client.push(0, ONES, kept)
    assert np.array_equal(client.pull().variables["w"], before + 1)
    assert np.array_equal(kept.variables["w"], before)


def test_to_give_arrays_back_twice_does_not_lend_them_to_two():
    client = cluster_of().client()
    pulled = client.pull()
    pulled.release()
    pulled.release()
    assert client.pull().variables["w"] is not client.pull().variables["w"]


def test_another_incarnation_of_a_shard_is_asked_for_everything():  # P16: its versions count from elsewhere
    cluster = cluster_of(2)
    client = cluster.client()
    for step in range(3):
        client.push(step, ONES, None)
    client.pull().release()
    cluster.shards[1] = cluster_of(2, incarnation=2).shards[1]  # a rollback: back at version 0, which is in 3
    client.use(cluster.view(2))
    known = known_versions(cluster)
    pulled = client.pull()
    assert known == {"shard-0": [3], "shard-1": [None]}
    assert pulled.versions == (3, 0)
    assert_current(cluster, pulled)
    pulled.release()
    known.clear()
    client.pull()
    assert known == {"shard-0": [3], "shard-1": [0]}


def test_after_a_failed_pull_nothing_is_believed_of_its_arrays():
    cluster = cluster_of(2)
    client = cluster.client()
    client.pull().release()
    client.push(0, ONES, None)

    def broken(address: str, request: object) -> None:
        if address == "shard-1" and isinstance(request, PullRun):
            raise PeerFailed("half of it is there")

    cluster.before = broken
    with pytest.raises(PeerFailed):
        client.pull()
    known = known_versions(cluster)
    assert_current(cluster, client.pull())
    assert {address: versions[0] for address, versions in known.items()} == {"shard-0": None, "shard-1": None}


def test_each_of_several_sets_remembers_its_own_version():
    cluster = cluster_of()
    client = cluster.client()
    older = client.pull()
    client.push(0, ONES, None)
    newer = client.pull()
    older.release()
    newer.release()
    known = known_versions(cluster)
    both = [client.pull(), client.pull()]
    assert known == {"shard-0": [1, 0]}
    for pulled in both:
        assert_current(cluster, pulled)


def test_a_shard_refuses_a_version_that_never_was():
    shard = cluster_of().shards[0]
    with pytest.raises(MalformedFrame, match="knows version 1; this shard is at 0"):
        shard.pull(PullRun(shard.identity, None, None, 0, 4, known_version=1))


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 3))
def test_no_move_is_missed_however_pushes_fall_between_the_messages_of_pulls(moments, shards):
    with pytest.MonkeyPatch.context() as patch:
        use_small_messages(patch, 16)
        cluster = cluster_of(shards)
        client, pusher = cluster.client(), cluster.client()
        steps, seen = iter(range(100)), 0

        def push_in_between(address: str, request: PullRun | Push) -> None:
            nonlocal seen
            if isinstance(request, PullRun):
                seen += 1
                if seen - 1 in moments:
                    cluster._turn.release()
                    pusher.push(next(steps), ONES, None)
                    cluster._turn.acquire()

        cluster.before = push_in_between
        for _ in range(3):
            client.pull().release()
        cluster.before = lambda *_: None
        assert_current(cluster, client.pull())


def test_a_pull_that_fails_gives_its_arrays_back_and_knows_nothing_of_them():
    cluster = cluster_of()
    client = cluster.client()
    client.pull().release()

    def refuse(address: str, request: PullRun | Push) -> None:
        raise PeerFailed("broken")

    cluster.before = refuse
    for _ in range(3):
        with pytest.raises(PeerFailed):
            client.pull()
    assert [weights.versions for weights in client._sets._free] == [(None,)]
