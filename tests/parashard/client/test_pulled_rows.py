"""Rows of tables through a client: what is cut over shards and messages is joined again, drawn where nobody pushed."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.client import pulled_rows
from parashard.client.pulled import Pulled
from parashard.client.pulled_rows import NO_TABLES, PulledRows, RowPart, TableSet, rows_by_shard
from parashard.client.shard_client import ShardClient
from parashard.errors import MalformedFrame, NonFiniteGradient, ShapeMismatch, StaleRound, UnknownVariable
from parashard.plan.embedding import EmbeddingTable, Keys, RowEncoding, cut_by_shard, first_rows, mixed
from parashard.plan.partition import fixed_shards, whole
from parashard.plan.variables import Float32s, Initializer, Variable
from parashard.protocol.messages import (
    Fetched,
    PullRun,
    Push,
    PushResult,
    RowSlice,
    answer_bytes_of,
)
from parashard.transports.base import Greeting, ShardAddress
from parashard_server.state.rows import embedding_tables as shard_tables
from support.in_process import COUNTING, SEED, WEIGHT_AND_BIAS, Cluster, plan_of, use_small_messages, variables_of

USER = EmbeddingTable("user", 3, COUNTING, Initializer("normal", 0.1))
SEEN = EmbeddingTable("seen", 1, COUNTING)
"""Its rows begin at 0 and add up what is pushed."""
SHARDS = pytest.mark.parametrize("shards", [1, 2, 3, 5])


def cluster_of(shards: int = 2, **of_shard: Any) -> Cluster:
    return Cluster(plan_of(WEIGHT_AND_BIAS, shards, fixed_shards(2)), tables=(USER, SEEN), **of_shard)


def keys_of(*ids: int) -> Keys:
    return np.sort(mixed(np.array(ids, np.int64)))


KEYS = keys_of(*range(50))
PUSHED = KEYS[::3].copy()


def gradients_of(keys: Keys, row_elements: int = 3) -> Float32s:
    return np.arange(1, 1 + len(keys) * row_elements, dtype=np.float32).reshape(len(keys), row_elements)


def push_rows(cluster: Cluster, step: int = 0, keys: Keys = PUSHED) -> None:
    """Push the gradients of rows of `user`, by a client of its own."""
    client = cluster.client()
    client.push(step, {"user": gradients_of(keys)}, client.pull(keys={"user": keys}))


def requests_of(cluster: Cluster) -> list[tuple[str, Push | PullRun]]:
    """Return where requests are noted from now on, with whom they ask."""
    asked: list[tuple[str, Push | PullRun]] = []
    cluster.before = lambda address, request: asked.append((address, request))
    return asked


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let an answer have 200 bytes; the shards refuse a longer one."""
    for module in (pulled_rows, shard_tables):
        monkeypatch.setattr(module, "ROWS_BYTES_MAX", 200)
    return 200


# --- pull ---


@SHARDS
def test_rows_that_nobody_pushed_are_drawn_whatever_the_number_of_shards(shards: int) -> None:  # P27
    cluster = cluster_of(shards)
    pulled = cluster.client().pull(keys={"user": KEYS, "seen": KEYS[:7]})
    assert pulled.rows["user"].dtype == np.float32
    assert pulled.rows["user"].tobytes() == first_rows(USER, SEED)(KEYS).tobytes()
    assert pulled.rows["seen"].tolist() == [[0.0]] * 7
    assert (pulled.versions, pulled.incarnations) == ((0,) * shards, (1,) * shards)
    assert [shard.tables.rows for shard in cluster.shards if shard.tables is not None] == [0] * shards


@SHARDS
def test_pushed_rows_come_back_from_their_shard_among_drawn_ones(shards: int) -> None:  # P28
    cluster = cluster_of(shards)
    push_rows(cluster)
    expected = first_rows(USER, SEED)(KEYS)
    expected[::3] += gradients_of(PUSHED)
    assert cluster.client().pull(keys={"user": KEYS}).rows["user"].tobytes() == expected.tobytes()
    for shard, run in zip(cluster.shards, cut_by_shard(PUSHED, shards), strict=True):
        assert shard.tables is not None
        assert shard.tables.by_name["user"].rows == run.stop - run.start
        assert shard.tables.by_name["user"].pull(PUSHED[run], 1).present.all()


@given(st.lists(st.dictionaries(st.integers(-9, 30), st.integers(1, 9), min_size=1), max_size=6), st.integers(1, 6))
def test_every_push_counts_at_its_own_keys_on_any_number_of_shards(steps: list[dict[int, int]], shards: int) -> None:
    cluster = Cluster(plan_of(WEIGHT_AND_BIAS, shards), tables=(SEEN,))
    client, due = cluster.client(), Counter[int]()
    for step, uses in enumerate(steps):
        by_key = {int(mixed(np.array(key))[0]): times for key, times in uses.items()}
        keys = np.array(sorted(by_key), np.uint64)
        times = np.array([[by_key[key]] for key in keys.tolist()], np.float32)
        client.push(step, {"seen": times}, client.pull(keys={"seen": keys}))
        due.update(by_key)
    everything = keys_of(*range(-12, 33))
    found = client.pull(keys={"seen": everything}).rows["seen"][:, 0]
    assert dict(zip(everything.tolist(), found.tolist(), strict=True)) == {key: due[key] for key in everything.tolist()}


def test_a_shard_is_asked_for_its_own_keys_alone() -> None:
    cluster = cluster_of(3)
    client, asked = cluster.client(), requests_of(cluster)
    first, _, last = cut_by_shard(KEYS, 3)
    client.pull(keys={"user": np.concatenate([KEYS[first], KEYS[last]]), "seen": KEYS[:0]})
    of_rows = {address: request.keys for address, request in asked if isinstance(request, PullRun)}
    assert {address: list(keys) for address, keys in of_rows.items()} == {
        "shard-0": ["user"],
        "shard-1": [],
        "shard-2": ["user"],
    }
    assert of_rows["shard-0"]["user"].tolist() == KEYS[first].tolist()
    assert of_rows["shard-2"]["user"].tolist() == KEYS[last].tolist()
    assert len(asked) == 3


@SHARDS
def test_variables_and_rows_of_all_tables_are_one_request_to_a_shard(shards: int) -> None:
    cluster = cluster_of(shards)
    client, asked = cluster.client(), requests_of(cluster)
    client.pull(keys={"user": KEYS, "seen": KEYS})
    assert [address for address, _ in asked] == [f"shard-{shard}" for shard in range(shards)]
    for _, request in asked:
        assert isinstance(request, PullRun)
        assert list(request.keys) == ["user", "seen"]
        assert request.length_bytes > 0 or shards > 2


def test_a_table_without_keys_has_no_rows() -> None:
    pulled = cluster_of().client().pull(keys={"user": KEYS[:0]})
    assert pulled.rows["user"].shape == (0, 3)


@SHARDS
def test_a_pull_in_many_messages_is_the_same(few_bytes: int, shards: int) -> None:
    cluster, keys = cluster_of(shards), keys_of(*range(200))
    push_rows(cluster)
    expected = first_rows(USER, SEED)(keys)
    expected[np.isin(keys, PUSHED)] += gradients_of(PUSHED)
    client, asked = cluster.client(), requests_of(cluster)
    assert client.pull(keys={"user": keys}).rows["user"].tobytes() == expected.tobytes()
    counts = [len(request.keys["user"]) for _, request in asked if isinstance(request, PullRun) and request.keys]
    assert sum(counts) == len(keys)
    assert all(answer_bytes_of(count, 3) <= few_bytes for count in counts)
    assert len(counts) > shards


def test_rows_are_the_callers_own_after_the_variables_are_given_back() -> None:
    cluster = cluster_of()
    client = cluster.client()
    first = client.pull(keys={"user": KEYS})
    before = first.rows["user"].copy()
    first.release()
    push_rows(cluster, keys=KEYS)
    assert client.pull(keys={"user": KEYS}).rows["user"].tobytes() != before.tobytes()
    assert first.rows["user"].tobytes() == before.tobytes()


def test_a_pull_of_rows_is_of_its_round() -> None:  # P11
    cluster = cluster_of(round_steps=1)
    client = cluster.client()
    client.push(0, {"user": gradients_of(PUSHED)}, client.pull(round_=0, keys={"user": PUSHED}))
    moved = client.pull(round_=1, keys={"user": PUSHED})
    assert moved.rows["user"].tobytes() == (first_rows(USER, SEED)(PUSHED) + gradients_of(PUSHED)).tobytes()
    asked = requests_of(cluster)
    with pytest.raises(StaleRound):
        client.pull(round_=0, keys={"user": PUSHED})
    assert {request.round for _, request in asked if isinstance(request, PullRun) and request.keys} == {0}


@pytest.mark.parametrize("table", ["item", "weight"])
def test_an_unknown_table_is_refused_before_anything_is_sent(table: str) -> None:
    cluster = cluster_of()
    client, asked = cluster.client(), requests_of(cluster)
    with pytest.raises(UnknownVariable, match=rf"table '{table}' is none of the job's: seen, user"):
        client.pull(keys={"user": KEYS, table: KEYS})
    assert asked == []


def test_a_job_without_tables_knows_none() -> None:
    with pytest.raises(UnknownVariable, match="table 'user' is none of the job's: none"):
        NO_TABLES.check({"user": KEYS})


# --- versions and incarnations ---


def test_the_version_of_a_pull_is_the_lowest_of_its_messages(few_bytes: int) -> None:
    cluster = cluster_of(2)
    pusher, steps, seen = cluster.client(), itertools.count(), defaultdict[str, list[int]](list)

    def push_before(address: str, request: Push | PullRun) -> None:
        if isinstance(request, PullRun):
            cluster.before = lambda *_: None
            cluster._turn.release()
            pusher.push(next(steps), {}, None)
            cluster._turn.acquire()
            cluster.before = push_before
            seen[address].append(cluster.shards[int(address[6:])].updates.version)

    cluster.before = push_before
    pulled = cluster.client().pull(keys={"user": KEYS})
    assert all(len(versions) > 1 for versions in seen.values())
    assert pulled.versions == (min(seen["shard-0"]), min(seen["shard-1"]))


class _Noting:
    """A transport that notes when it is asked, and when its answer is waited for."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pull(self, run: PullRun, into: object, deadline_s: float, read: object) -> _Noting:
        self.seen.append("asked")
        return self

    def start(self) -> None:
        """It is under way."""

    def result(self) -> Fetched:
        self.seen.append("answered")
        return Fetched(0)

    def cancel(self) -> None:
        """It is over."""

    def close(self) -> None:
        """Nothing is open."""


def test_a_shard_is_asked_for_one_part_at_a_time(few_bytes: int) -> None:
    """Else a client that has as many connections as there may be would wait for one of its own."""
    cluster, noting = cluster_of(1), _Noting()

    def connect(where: ShardAddress, greeting: Greeting) -> Any:
        return noting

    client = ShardClient("run", "digest", cluster.plan, "w", connect=connect, tables=TableSet((USER,), SEED))
    client.use(cluster.view())
    client.pull(keys={"user": KEYS})
    assert noting.seen == ["asked", "answered"] * 4


def pulled_over_a_change() -> tuple[Cluster, ShardClient, Pulled]:
    """Return what is pulled where shard 1 begins another incarnation after its variables and before its last rows."""
    cluster = cluster_of(2)
    push_rows(cluster)
    client, asked = cluster.client(look=lambda: cluster.view(2)), []

    def before(address: str, request: Push | PullRun) -> None:
        asked.append((address, isinstance(request, PullRun) and not request.length_bytes))
        if asked[-1] == ("shard-1", True):
            shard = cluster.shards[1]
            shard.identity = shard.identity._replace(incarnation=2)

    cluster.before = before
    pulled = client.pull(keys={"user": KEYS})
    assert asked == [
        ("shard-0", False),
        ("shard-1", False),
        ("shard-0", True),
        ("shard-1", True),  # refused
        ("shard-1", True),
    ]
    return cluster, client, pulled


def test_a_shard_that_changed_between_variables_and_rows_has_no_incarnation(few_bytes: int) -> None:
    _, _, pulled = pulled_over_a_change()
    assert pulled.incarnations == (1, 0)
    expected = first_rows(USER, SEED)(KEYS)
    expected[::3] += gradients_of(PUSHED)
    assert pulled.rows["user"].tobytes() == expected.tobytes()


def test_what_was_pulled_of_two_incarnations_has_no_version(few_bytes: int) -> None:  # P16
    cluster, client, pulled = pulled_over_a_change()
    pushed = client.push(1, {"user": gradients_of(KEYS)}, pulled)
    assert [push.pulled_version for push in cluster.pushes if push.step == 1] == [1, None]
    assert [ack.staleness for ack in pushed.acks] == [0, None]
    assert pushed.incarnations == (1, 2)


class _Buffer:
    """What a client puts variables into."""

    variables: Mapping[str, Float32s] = MappingProxyType({})
    versions: tuple[int | None, ...] = (4, 6)
    incarnations: tuple[int | None, ...] = (1, 3)


@pytest.mark.parametrize(
    ("versions", "incarnations", "expected"),
    [
        ([5, 7], [1, 3], ((4, 6), (1, 3))),
        ([2, 9], [1, 3], ((2, 6), (1, 3))),
        ([9, 5], [1, 4], ((4, 5), (1, 0))),
    ],
)
def test_parts_count_for_their_shard(versions: Sequence[int], incarnations: Sequence[int], expected: Any) -> None:
    buffer: Any = _Buffer()
    pulled = Pulled(buffer, buffer, PulledRows(NO_TABLES))
    parts = [RowPart(0, {"user": slice(0, 1)}), RowPart(1, {"user": slice(1, 2)})]
    pulled.include(parts, versions, incarnations)
    assert (pulled.versions, pulled.incarnations) == expected


# --- push ---


def test_a_table_that_is_left_out_pushes_nothing() -> None:
    cluster = cluster_of()
    client = cluster.client()
    pulled = client.pull(keys={"user": KEYS, "seen": KEYS})
    client.push(0, {"seen": gradients_of(KEYS, 1)}, pulled)
    first, last = cut_by_shard(KEYS, 2)
    sizes = [run.stop - run.start for run in (first, last)]
    assert [push.rows for push in cluster.pushes] == [(RowSlice("seen", size, 1),) for size in sizes]
    after = client.pull(keys={"user": KEYS, "seen": KEYS})
    assert after.rows["user"].tobytes() == pulled.rows["user"].tobytes()
    assert after.rows["seen"].tolist() == gradients_of(KEYS, 1).tolist()
    client.push(1, {}, after)
    assert [push.rows for push in cluster.pushes if push.step == 1] == [(), ()]


@pytest.mark.parametrize("about", [{"skipped": True}, {"void": True}])
def test_an_empty_push_has_no_rows(about: dict[str, bool]) -> None:
    cluster = cluster_of()
    client = cluster.client()
    client.push(0, {}, client.pull(keys={"user": KEYS}), **about)
    assert [(push.rows, push.payload.nbytes) for push in cluster.pushes] == [((), 0), ((), 0)]


@pytest.mark.parametrize("shape", [(49, 3), (51, 3), (50, 2), (50,), (150,), (50, 3, 1)], ids=str)
def test_row_gradients_of_another_shape_are_refused_before_anything_is_sent(shape: tuple[int, ...]) -> None:
    cluster = cluster_of()
    client = cluster.client()
    pulled = client.pull(keys={"user": KEYS})
    with pytest.raises(ShapeMismatch, match=r"table 'user' has shape .*, the rows have \(50, 3\)"):
        client.push(0, {"user": np.zeros(shape, np.float32)}, pulled)
    assert cluster.pushes == []


def test_a_gradient_of_a_table_that_was_not_pulled_is_refused_before_anything_is_sent() -> None:
    cluster = cluster_of()
    client = cluster.client()
    for pulled in (None, client.pull(), client.pull(keys={"seen": KEYS})):
        with pytest.raises(UnknownVariable, match="'user'"):
            client.push(0, {"user": gradients_of(KEYS)}, pulled)
    assert cluster.pushes == []


@pytest.mark.parametrize("elements", [1, 2, 3])
@pytest.mark.parametrize("message_bytes", [16, 1 << 20])
def test_rows_may_begin_anywhere_in_a_payload(
    monkeypatch: pytest.MonkeyPatch, elements: int, message_bytes: int
) -> None:
    """Keys have 8 bytes: after an odd number of float32 they lie at no multiple of that."""
    use_small_messages(monkeypatch, message_bytes)
    variables = variables_of(Variable("w", (elements,)))
    cluster = Cluster(plan_of(variables, 1, whole), tables=(USER, SEEN))
    client = cluster.client()
    pulled = client.pull(keys={"user": PUSHED, "seen": KEYS[:3]})
    gradients = {"w": np.ones(elements, np.float32), "user": gradients_of(PUSHED), "seen": gradients_of(KEYS[:3], 1)}
    assert client.push(0, gradients, pulled).acks[0].result is PushResult.APPLIED
    after = client.pull(keys={"user": PUSHED, "seen": KEYS[:3]})
    assert after.variables["w"].tolist() == [1.0] * elements
    assert after.rows["user"].tobytes() == (pulled.rows["user"] + gradients_of(PUSHED)).tobytes()
    assert after.rows["seen"].tolist() == gradients_of(KEYS[:3], 1).tolist()


def test_row_gradients_in_any_memory_order_and_number_type_are_sent_as_float32_rows() -> None:
    cluster = cluster_of()
    client = cluster.client()
    pulled = client.pull(keys={"user": KEYS})
    client.push(0, {"user": np.asfortranarray(gradients_of(KEYS).astype(np.float64))}, pulled)
    found = client.pull(keys={"user": KEYS}).rows["user"]
    assert found.tobytes() == (pulled.rows["user"] + gradients_of(KEYS)).tobytes()


def test_a_push_of_rows_that_comes_again_changes_nothing() -> None:  # P4
    cluster = cluster_of()
    client = cluster.client()
    pulled = client.pull(keys={"user": KEYS})
    for _ in range(2):
        acks = client.push(0, {"user": gradients_of(KEYS)}, pulled).acks
    assert [ack.result for ack in acks] == [PushResult.DUPLICATE] * 2
    found = client.pull(keys={"user": KEYS}).rows["user"]
    assert found.tobytes() == (pulled.rows["user"] + gradients_of(KEYS)).tobytes()


def test_keys_that_are_not_ascending_are_refused_by_their_shard() -> None:
    with pytest.raises(MalformedFrame, match="keys are not ascending"):
        cluster_of(1).client().pull(keys={"user": KEYS[::-1].copy()})


@given(st.sets(st.integers(0, 2**64 - 1)), st.integers(1, 7))
def test_what_is_cut_by_shard_is_joined_again(ids: set[int], shards: int) -> None:
    keys = np.sort(mixed(np.array([*ids], np.uint64)))
    values = gradients_of(keys)
    cut = list(rows_by_shard(TableSet((USER,), SEED), {"user": keys}, {"user": values}, shards))
    assert len(cut) == shards
    pieces = [pieces for slices, pieces in cut if slices]
    assert b"".join(bytes(piece[0]) for piece in pieces) == keys.tobytes()
    assert b"".join(bytes(piece[1]) for piece in pieces) == values.tobytes()
    for (slices, parts), run in zip(cut, cut_by_shard(keys, shards), strict=True):
        assert slices == ((RowSlice("user", run.stop - run.start, 3),) if run.stop > run.start else ())
        assert sum(piece.size_bytes for piece in slices) == sum(part.nbytes for part in parts)


def encoded(encoding: RowEncoding) -> EmbeddingTable:
    return replace(USER, row_elements=5, encoding=encoding)


@given(st.sets(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 7), st.sampled_from(["bfloat16", "int8"]))
def test_an_encoded_row_has_the_same_bytes_whatever_shard_it_goes_to(
    ids: set[int], shards: int, encoding: RowEncoding
) -> None:  # P35
    keys, tables = np.sort(mixed(np.array([*ids], np.uint64))), TableSet((encoded(encoding),), SEED)
    values = np.random.default_rng(len(ids)).standard_normal((len(keys), 5)).astype(np.float32)
    cuts = [rows_by_shard(tables, {"user": keys}, {"user": values}, count) for count in (1, shards)]
    whole_, parts = ([pieces for slices, pieces in cut if slices] for cut in cuts)
    assert [b"".join(map(bytes, piece)) for piece in zip(*parts, strict=True)] == [bytes(one) for one in whole_[0]]


@pytest.mark.parametrize("encoding", ["bfloat16", "float16", "int8"])
def test_rounds_of_encoded_rows_have_the_same_bits_for_any_shards_and_order(encoding: RowEncoding) -> None:
    """The order in which steps arrive is that in which workers compute them."""
    found = set()
    for shards, order in ((1, (0, 1, 2)), (2, (2, 0, 1)), (5, (1, 2, 0))):
        plan = plan_of(WEIGHT_AND_BIAS, shards, fixed_shards(2))
        cluster = Cluster(plan, tables=(encoded(encoding),), round_steps=3, steps=6)
        client = cluster.client()
        for step in order:
            keys = KEYS[step :: step + 1].copy()
            values = np.random.default_rng(step).standard_normal((len(keys), 5)).astype(np.float32)
            pulled = client.pull(round_=0, keys={"user": keys})
            client.push(step, {"user": values * np.float32(10.0) ** step}, pulled)
        found.add(client.pull(round_=1, keys={"user": KEYS}).rows["user"].tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("encoding", ["bfloat16", "float16", "int8"])
def test_a_row_that_is_not_finite_leaves_no_shard_changed(encoding: RowEncoding) -> None:  # P6
    cluster = Cluster(plan_of(WEIGHT_AND_BIAS, 2, fixed_shards(2)), tables=(encoded(encoding),))
    client = cluster.client()
    pulled, asked = client.pull(keys={"user": KEYS}), requests_of(cluster)
    values = np.ones((len(KEYS), 5), np.float32)
    values[-1, 0] = np.inf
    with pytest.raises(NonFiniteGradient, match="table 'user'"):
        client.push(0, {"user": values}, pulled)
    assert asked == []
