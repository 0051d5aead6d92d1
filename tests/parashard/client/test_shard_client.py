"""ShardClient over real shards: what is cut over shards is joined again, and every request says whom it means."""

import numpy as np
import pytest

from parashard.client.shard_client import ShardClient
from parashard.errors import (
    NonFiniteGradient,
    ShapeMismatch,
    StaleIncarnation,
    StalePlan,
    StaleRound,
    UnknownVariable,
    WrongRun,
)
from parashard.plan.partition import Partition, Plan, fixed_shards
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import MESSAGE_BYTES, PullRun, PushResult, Target
from parashard.transports.base import Greeting, ShardAddress, View
from support.in_process import DIGEST, RUN, WEIGHT_AND_BIAS, Cluster, plan_of, use_small_messages, variables_of

GRADIENTS = {"bias": np.array([1, 2], np.float32), "weight": np.arange(12, dtype=np.float32).reshape(4, 3)}


def cluster_of(shards: int = 2, **of_shard: object) -> Cluster:
    return Cluster(plan_of(WEIGHT_AND_BIAS, shards, fixed_shards(2)), **of_shard)


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let messages have 16 bytes: four elements."""
    use_small_messages(monkeypatch, 16)
    return 16


# --- pull ---


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_a_pull_gives_every_variable_in_its_shape_whatever_the_number_of_shards(shards):
    pulled = cluster_of(shards).client().pull()
    alone = cluster_of(1).client().pull()
    assert {name: value.shape for name, value in pulled.variables.items()} == {"bias": (2,), "weight": (4, 3)}
    assert all(value.tobytes() == alone.variables[name].tobytes() for name, value in pulled.variables.items())
    assert all(value.dtype == np.float32 and value.flags.writeable for value in pulled.variables.values())
    assert (pulled.versions, pulled.incarnations) == ((0,) * shards, (1,) * shards)


def test_a_pull_in_many_runs_is_the_same(small_messages):
    cluster = cluster_of(1)
    runs: list[PullRun] = []
    cluster.before = lambda address, request: runs.append(request)
    pulled = cluster.client().pull()
    assert [(run.offset_bytes, run.length_bytes) for run in runs] == [(0, 16), (16, 16), (32, 16), (48, 8)]
    assert np.concatenate([pulled.variables["bias"], pulled.variables["weight"].ravel()]).tobytes() == (
        cluster.shards[0].storage.weights.tobytes()
    )


def test_the_version_of_a_pull_is_the_lowest_of_its_runs(small_messages):
    cluster = cluster_of(1)
    pusher, step = cluster.client(), iter(range(40))

    def push_in_between(address: str, request: object) -> None:
        if isinstance(request, PullRun):
            cluster.before = lambda *_: None
            cluster._turn.release()
            pusher.push(next(step), {}, None)
            cluster._turn.acquire()
            cluster.before = push_in_between

    cluster.before = push_in_between
    assert cluster.client().pull().versions == (1,)  # its four runs were of versions 1 to 4: staleness is not hidden


def test_a_shard_that_holds_nothing_is_asked_all_the_same():
    cluster = Cluster(plan_of(WEIGHT_AND_BIAS, shards=3))
    pulled = cluster.client().pull()
    assert sorted(pulled.variables) == ["bias", "weight"]
    assert len(pulled.versions) == 3


def test_a_pull_hands_on_its_step_and_its_round():
    cluster = cluster_of(1, round_steps=2)
    seen: list[PullRun] = []
    cluster.before = lambda address, request: seen.append(request)
    cluster.client().pull(step=1, round_=0)
    assert (seen[0].step, seen[0].round) == (1, 0)
    with pytest.raises(StaleRound):  # P11
        cluster.client().pull(step=7, round_=3)


# --- push ---


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_a_push_moves_every_row_by_its_own_gradient(shards):
    cluster = cluster_of(shards)
    client = cluster.client()
    before = client.pull()
    pushed = client.push(0, GRADIENTS, before)
    assert [ack.result for ack in pushed.acks] == [PushResult.APPLIED] * shards
    assert [ack.staleness for ack in pushed.acks] == [0] * shards
    assert pushed.incarnations == (1,) * shards
    after = client.pull()
    for name, gradient in GRADIENTS.items():
        assert np.array_equal(after.variables[name], before.variables[name] + gradient)
    assert after.versions == (1,) * shards


def test_a_push_that_was_sent_already_changes_nothing():  # P1
    cluster = cluster_of()
    client = cluster.client()
    client.push(0, GRADIENTS, None)
    before = cluster.weights()
    again = client.push(0, {name: 9 * value for name, value in GRADIENTS.items()}, None)
    assert [ack.result for ack in again.acks] == [PushResult.DUPLICATE] * 2
    assert all(np.array_equal(value, before[name]) for name, value in cluster.weights().items())


def test_a_push_in_many_messages_is_one_push(small_messages):  # P4
    cluster = cluster_of(1)
    before = cluster.weights()
    acks = cluster.client().push(0, GRADIENTS, None).acks
    assert [ack.result for ack in acks] == [PushResult.APPLIED]
    assert [push.payload.nbytes for push in cluster.pushes] == [56]
    assert np.array_equal(cluster.weights()["weight"], before["weight"] + GRADIENTS["weight"])


def test_a_push_larger_than_a_message_goes_in_messages_of_one_size():
    rows = MESSAGE_BYTES // 4 + 3
    cluster = Cluster(plan_of(variables_of(Variable("w", (rows,)))))
    gradient = np.arange(rows, dtype=np.float32)
    cluster.client().push(0, {"w": gradient}, None)
    assert [push.payload.nbytes for push in cluster.pushes] == [MESSAGE_BYTES + 12]
    assert np.array_equal(cluster.weights()["w"], gradient)


def test_a_step_of_which_a_shard_has_nothing_is_pushed_empty():  # P15: and its shard counts it
    cluster = cluster_of(3)
    client = cluster.client()
    client.push(0, {}, None)
    assert [push.payload.nbytes for push in cluster.pushes] == [0, 0, 0]
    assert [0 in shard.updates.applied for shard in cluster.shards] == [True] * 3
    client.push(1, {"bias": GRADIENTS["bias"]}, None)  # a variable that is left out has a zero gradient
    assert [shard.updates.version for shard in cluster.shards] == [2] * 3


def test_a_skipped_step_is_marked_and_counted():  # P6
    cluster = cluster_of()
    cluster.client().push(4, {}, None, skipped=True)
    assert all(push.skipped for push in cluster.pushes)
    assert [shard.record.skipped_steps for shard in cluster.shards] == [1, 1]


def test_a_frozen_variable_is_pulled_and_never_pushed():
    variables = variables_of(Variable("fixed", (4,), Initializer("constant", 5.0), frozen=True), Variable("w", (4,)))
    cluster = Cluster(plan_of(variables, 2, fixed_shards(2)))
    ones = {"fixed": np.ones(4, np.float32), "w": np.ones(4, np.float32)}
    cluster.client().push(0, ones, None)
    assert {piece.partition.variable for push in cluster.pushes for piece in push.slices} == {"w"}
    weights = cluster.weights()
    assert (weights["fixed"].tolist(), weights["w"].tolist()) == ([5.0] * 4, [1.0] * 4)


def test_a_gradient_in_any_memory_order_and_number_type_is_sent_as_float32_rows():
    cluster = cluster_of()
    before = cluster.weights()
    cluster.client().push(0, {"weight": np.asfortranarray(GRADIENTS["weight"].astype(np.float64))}, None)
    assert np.array_equal(cluster.weights()["weight"], before["weight"] + GRADIENTS["weight"])


def test_a_gradient_that_is_not_finite_is_the_callers_to_fix():  # P6
    cluster = cluster_of(1)
    before = cluster.weights()
    with pytest.raises(NonFiniteGradient):
        cluster.client().push(0, {"bias": np.array([np.nan, 0], np.float32)}, None)
    assert all(np.array_equal(value, before[name]) for name, value in cluster.weights().items())


@pytest.mark.parametrize("shape", [(4, 2), (8, 3), (3, 3), (12,), (4, 3, 1)], ids=str)
def test_a_gradient_of_another_shape_is_refused_before_anything_is_sent(shape):
    cluster = cluster_of()
    with pytest.raises(ShapeMismatch, match="'weight'"):
        cluster.client().push(0, {"weight": np.zeros(shape, np.float32)}, None)
    assert cluster.pushes == []


def test_a_gradient_of_no_variable_is_refused_before_anything_is_sent():
    cluster = cluster_of()
    with pytest.raises(UnknownVariable, match="'wieght'"):
        cluster.client().push(0, {"wieght": np.zeros((4, 3), np.float32)}, None)
    assert cluster.pushes == []


# --- staleness ---


def test_staleness_counts_the_pushes_between_pull_and_push():
    cluster = cluster_of()
    client = cluster.client()
    pulled = client.pull()
    client.push(0, GRADIENTS, None)
    client.push(1, GRADIENTS, None)
    assert [ack.staleness for ack in client.push(2, GRADIENTS, pulled).acks] == [2, 2]


def test_staleness_is_unknown_without_a_pull():
    acks = cluster_of().client().push(0, GRADIENTS, None).acks
    assert [ack.staleness for ack in acks] == [None, None]


def test_versions_of_another_incarnation_are_not_compared():  # P16
    cluster = cluster_of()
    client = cluster.client()
    for step in range(3):
        client.push(step, GRADIENTS, None)
    pulled = client.pull()  # at version 3 of both
    restarted = cluster_of(incarnation=2)
    cluster.shards[1] = restarted.shards[1]  # back at version 0: compared with 3 it would be from the future
    client.use(cluster.view(2))
    acks = client.push(3, GRADIENTS, pulled).acks
    assert [ack.staleness for ack in acks] == [0, None]
    assert [ack.result for ack in acks] == [PushResult.APPLIED] * 2


# --- whom a request is meant for ---


def test_an_old_view_is_told_to_refresh():  # P3
    cluster = cluster_of()
    client = cluster.client()
    cluster.shards[1] = cluster_of(incarnation=2).shards[1]
    with pytest.raises(StaleIncarnation):
        client.pull()
    with pytest.raises(StaleIncarnation):
        client.push(0, GRADIENTS, None)
    client.use(cluster.view(2))
    # The failed push may have reached the other shard: sending it again is what makes it whole.
    results = [ack.result for ack in client.push(0, GRADIENTS, None).acks]
    assert results == [PushResult.DUPLICATE, PushResult.APPLIED]


def test_a_round_that_is_over_is_refused():  # P11
    cluster = cluster_of(1, round_steps=1)
    client = cluster.client()
    client.push(0, GRADIENTS, None)
    client.push(1, GRADIENTS, None)  # the next round's push commits the first (P10)
    with pytest.raises(StaleRound):
        client.pull(round_=0)


@pytest.mark.parametrize(
    ("run", "digest", "version", "error"),
    [("run-2", DIGEST, 5, WrongRun), (RUN, "e" * 64, 5, WrongRun), (RUN, DIGEST, 6, StalePlan)],
)
def test_another_run_job_or_plan_is_refused(run, digest, version, error):  # P2
    cluster = cluster_of(1)
    plan = Plan(version, cluster.plan.variables, cluster.plan.shards)
    foreign = ShardClient(run, digest, plan, "w", connect=cluster.connect)
    foreign.use(cluster.view())
    with pytest.raises(error):
        foreign.pull()
    with pytest.raises(error):
        foreign.push(0, GRADIENTS, None)


# --- connections ---


class _Recorded:
    def __init__(self, where: ShardAddress, greeting: Greeting, log: list[str]) -> None:
        self._address, self._log = where.address, log
        log.append(f"open {where.address} as {greeting.worker} for {greeting.target.shard}.{where.incarnation}")
        assert greeting.target == Target(RUN, DIGEST, 1, greeting.target.shard, where.incarnation)

    def close(self) -> None:
        self._log.append(f"close {self._address}")


def test_connections_follow_the_view():
    log: list[str] = []
    plan = Plan(1, {"w": Variable("w", (2,))}, ((Partition("w", 0, 1),), (Partition("w", 1, 2),)))
    a, b, moved = ShardAddress("a:1", 1), ShardAddress("b:1", 1), ShardAddress("b:2", 2)
    client = ShardClient(RUN, DIGEST, plan, "w", connect=lambda *seam: _Recorded(*seam, log))  # type: ignore[arg-type]
    client.use(View(1, (a, b)))
    client.use(View(2, (a, moved)))  # only what moved is connected again
    assert log == ["open a:1 as w for 0.1", "open b:1 as w for 1.1", "close b:1", "open b:2 as w for 1.2"]
    client.use(View(1, (a, b)))  # an older view comes late
    client.close()
    client.close()
    assert sorted(log[4:]) == ["close a:1", "close b:2"]


def test_another_incarnation_at_the_same_address_is_connected_again():  # P3: what was agreed before is void
    log: list[str] = []
    plan = plan_of({"w": Variable("w", (2,))})
    plan = Plan(1, plan.variables, plan.shards)
    client = ShardClient(RUN, DIGEST, plan, "w", connect=lambda *seam: _Recorded(*seam, log))  # type: ignore[arg-type]
    for incarnation in (1, 2):
        client.use(View(incarnation, (ShardAddress("a:1", incarnation),)))
    assert log == ["open a:1 as w for 0.1", "close a:1", "open a:1 as w for 0.2"]
