"""What ShardClient does by itself when a shard asks for patience, and when it gives up."""

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from parashard.client import fan_out as subject
from parashard.client.shard_client import ShardClient
from parashard.errors import (
    MalformedFrame,
    NotReady,
    ParashardError,
    QueueFull,
    StaleIncarnation,
    Unreachable,
    WrongRun,
)
from parashard.plan.partition import fixed_shards
from parashard.plan.variables import Variable
from parashard.protocol import wire
from parashard.protocol.messages import Fetched, PullRun, Push, PushResult, VectorRun, Weights
from parashard.transports.grpc import GrpcTransport
from support.in_process import DIGEST, RUN, Channel, Cluster, plan_of, use_small_messages, variables_of

VARIABLES = variables_of(Variable("w", (20,)))
GRADIENTS = {"w": np.arange(20, dtype=np.float32)}


@pytest.fixture(autouse=True)
def _small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages have 16 bytes: a shard's push is 5 messages, or 3 with two shards."""
    use_small_messages(monkeypatch, 16)


def cluster_of(shards: int = 1) -> Cluster:
    return Cluster(plan_of(VARIABLES, shards, fixed_shards(shards)))


class Fault:
    """Raises an error at chosen requests of one kind, counted from 0; a test asserts that it fired."""

    def __init__(self, error: ParashardError, at: set[int], kind: type = Push) -> None:
        self.fired = 0
        self._error, self._at, self._kind, self._seen = error, at, kind, 0

    def __call__(self, address: str, request: Push | PullRun) -> None:
        if isinstance(request, self._kind):
            self._seen += 1
            if self._seen - 1 in self._at:
                self.fired += 1
                raise self._error


# --- patience ---


@pytest.mark.parametrize("error", [QueueFull, NotReady, Unreachable])
@pytest.mark.parametrize("at", [{0}, {0, 1, 2}], ids=str)
def test_a_push_is_retried_while_its_shard_answers_retry_later(error, at, virtual_time):
    cluster = cluster_of()
    cluster.before = fault = Fault(error("busy"), at)
    acks = cluster.client().push(0, GRADIENTS, None).acks
    assert fault.fired == len(at)
    assert [ack.result for ack in acks] == [PushResult.APPLIED]
    assert np.array_equal(cluster.weights()["w"], GRADIENTS["w"])
    assert [push.payload.nbytes for push in cluster.pushes] == [80] * (1 + len(at))  # each time whole (P4)


@pytest.mark.parametrize("error", [QueueFull, NotReady, Unreachable])
@pytest.mark.parametrize("at", [{0}, {1, 2, 5}], ids=str)
def test_a_pull_is_retried_while_its_shard_answers_retry_later(error, at, virtual_time):
    cluster = cluster_of()
    cluster.client().push(0, GRADIENTS, None)
    cluster.before = fault = Fault(error("busy"), at, PullRun)
    pulled = cluster.client().pull()
    assert fault.fired == len(at)
    assert np.array_equal(pulled.variables["w"], GRADIENTS["w"])


def test_pauses_grow_and_have_a_bound(virtual_time):
    cluster = cluster_of()
    cluster.before = Fault(QueueFull("busy"), set(range(30)))
    cluster.client(retry_budget_s=1e6).push(0, {}, None)
    assert len(virtual_time.pauses_s) >= 25
    assert max(virtual_time.pauses_s) <= subject.RETRY_PAUSE_MAX_S
    assert max(virtual_time.pauses_s[:2]) <= 4 * subject.RETRY_PAUSE_S


def test_retries_make_an_outage_at_most_a_quarter_longer(virtual_time):
    cluster = cluster_of()
    cluster.before = Fault(Unreachable("away"), set(range(30)))
    cluster.client(retry_budget_s=1e6).push(0, {}, None)
    away_s = 0.0
    for pause_s in virtual_time.pauses_s:
        assert pause_s <= max(subject.RETRY_PAUSE_S, subject.RETRY_PAUSE_SHARE * away_s) + 1e-9
        away_s += pause_s


@pytest.mark.parametrize("kind", [Push, PullRun])
def test_after_the_budget_the_error_is_raised_as_it_is(kind, virtual_time):
    cluster = cluster_of()
    cluster.before = Fault(QueueFull("busy", peer="shard-0"), set(range(10_000)), kind)
    client = cluster.client(retry_budget_s=3.0)
    with pytest.raises(QueueFull, match=r"busy \(from shard-0\)"):
        client.push(0, GRADIENTS, None) if kind is Push else client.pull()
    assert 3.0 <= virtual_time.now_s <= 3.0 + subject.RETRY_PAUSE_MAX_S
    cluster.before = lambda *_: None
    assert len(cluster.shards[0].updates.applied) == 0


def test_a_client_that_gives_up_retries_nothing(virtual_time):
    cluster, cancelled = cluster_of(), threading.Event()
    cluster.before = Fault(Unreachable("gone"), set(range(10_000)))
    cancelled.set()
    with pytest.raises(Unreachable):
        cluster.client(cancelled=cancelled).push(0, {}, None)
    assert virtual_time.pauses_s == []


def test_a_shard_that_fails_leaves_the_others_with_the_step_and_the_next_try_makes_it_whole(virtual_time):
    cluster = cluster_of(2)

    def dead(address: str, request: Push | PullRun) -> None:
        if address == "shard-1":
            raise Unreachable("dead", peer=address)

    cluster.before = dead
    client = cluster.client(retry_budget_s=1.0)
    with pytest.raises(Unreachable, match="shard-1"):
        client.push(0, GRADIENTS, None)
    cluster.before = lambda *_: None
    results = [ack.result for ack in client.push(0, GRADIENTS, None).acks]
    assert results[1] is PushResult.APPLIED
    assert [len(shard.updates.applied) for shard in cluster.shards] == [1, 1]
    assert np.array_equal(cluster.weights()["w"], GRADIENTS["w"])  # once everywhere (P1)


def test_a_push_sent_again_after_its_answer_was_lost_counts_once():
    cluster, lost = cluster_of(), []
    take = cluster.answer_push

    def lose_the_first_answer(address: str, messages: Iterable[bytes]) -> bytes:
        answer = take(address, messages)
        if wire.decode_ack(answer).result is PushResult.APPLIED and not lost:
            lost.append(answer)
            raise Unreachable("the answer was lost")
        return answer

    cluster.answer_push = lose_the_first_answer  # type: ignore[method-assign]
    acks = cluster.client().push(0, GRADIENTS, None).acks
    assert len(lost) == 1
    assert [ack.result for ack in acks] == [PushResult.DUPLICATE]
    assert np.array_equal(cluster.weights()["w"], GRADIENTS["w"])


# --- a shard that begins another incarnation ---


def reborn_at(cluster: Cluster, kind: type) -> list[tuple[str, int | None]]:
    """Replace shard 1 at the first request of a kind; return who is asked, and which version it knows."""
    asked: list[tuple[str, int | None]] = []

    def before(address: str, request: Push | PullRun) -> None:
        if isinstance(request, kind):
            asked.append((address, request.pulled_version if isinstance(request, Push) else request.known_version))
            if address == "shard-1":
                shard = cluster.shards[1]
                shard.identity = shard.identity._replace(incarnation=2)

    cluster.before = before
    return asked


def test_a_push_goes_again_to_the_shard_that_has_another_incarnation_and_to_no_other(virtual_time):  # P3, P16
    cluster = cluster_of(2)
    client = cluster.client(look=lambda: cluster.view(2))
    pulled = client.pull()
    asked = reborn_at(cluster, Push)
    pushed = client.push(0, GRADIENTS, pulled)
    assert asked == [("shard-0", 0), ("shard-1", 0), ("shard-1", None)]  # its version was the earlier incarnation's
    assert pushed.incarnations == (1, 2)
    assert [ack.result for ack in pushed.acks] == [PushResult.APPLIED] * 2
    assert np.array_equal(cluster.weights()["w"], GRADIENTS["w"])


def test_a_pull_asks_another_incarnation_for_everything(virtual_time):  # P16
    cluster = cluster_of(2)
    client = cluster.client(look=lambda: cluster.view(2))
    client.pull().release()
    asked = reborn_at(cluster, PullRun)
    pulled = client.pull()
    parts = [known for address, known in asked if address == "shard-1"]
    assert parts == [0, None, None, None]  # refused at once, then three messages
    assert pulled.incarnations == (1, 2)
    pulled.release()
    assert client.pull().incarnations == (1, 2)
    assert [known for address, known in asked if address == "shard-1"][4:] == [0, 0, 0]


def test_without_a_source_of_views_another_incarnation_is_an_error(virtual_time):
    cluster = cluster_of(2)
    client = cluster.client()
    reborn_at(cluster, Push)
    with pytest.raises(StaleIncarnation):
        client.push(0, GRADIENTS, None)
    assert virtual_time.pauses_s == []


@pytest.mark.parametrize(("error", "looks"), [(QueueFull, 0), (NotReady, 2), (Unreachable, 2), (WrongRun, 2)])
def test_where_the_shard_is_is_asked_unless_it_is_only_busy(error, looks, virtual_time):
    cluster, views = cluster_of(), []
    cluster.before = Fault(error("not now"), {0, 1})
    client = cluster.client(look=lambda: views.append(cluster.view()) or views[-1])
    assert client.push(0, GRADIENTS, None).acks[0].result is PushResult.APPLIED
    assert len(views) == looks


# --- a shard that answers nonsense ---


def client_of(answer: bytes) -> ShardClient:
    """Return the client of a shard that always answers the same."""
    channel = Channel(lambda messages: answer, lambda frame: [answer])
    connect = lambda where, greeting: GrpcTransport(where, greeting, connect=lambda address: channel)  # noqa: E731
    cluster = cluster_of()
    client = ShardClient(RUN, DIGEST, cluster.plan, "w", connect=connect)
    client.use(cluster.view())
    return client


@pytest.mark.parametrize("runs", [[], [12], [4, 8]], ids=str)
def test_weights_that_lack_what_was_asked_for_are_malformed(runs):
    starts = np.cumsum([0, *runs]).tolist()
    short = Weights(1, tuple(VectorRun(begin, memoryview(bytes(n))) for begin, n in zip(starts, runs, strict=False)))
    with pytest.raises(MalformedFrame, match=f"80 bytes.*{sum(runs)}"):
        client_of(wire.encode_weights(short)).pull()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request", b"PSF1\x05\0\0\0" + b"\xff" * 8])
def test_an_answer_that_is_no_frame_is_malformed(answer):
    with pytest.raises(MalformedFrame):
        client_of(answer).pull()
    with pytest.raises(MalformedFrame):
        client_of(answer).push(0, GRADIENTS, None)


# --- several shards ---


class _Busy:
    """A transport that notes what is asked of it, and asks for patience at first where it is told to."""

    def __init__(self, shard: int, order: list[str], busy: bool) -> None:
        self._shard, self._order, self._busy = shard, order, busy

    def pull(self, run: PullRun, into: object, deadline_s: float, read: object) -> "_Busy":
        self._order.append(f"begin {self._shard}")
        return self

    def start(self) -> None:
        self._order.append(f"start {self._shard}")

    def result(self) -> Fetched:
        self._order.append(f"result {self._shard}")
        if self._busy:
            self._busy = False
            raise QueueFull("busy")
        return Fetched(7)

    def cancel(self) -> None:
        """It is over."""

    def close(self) -> None:
        """Nothing is open."""


def test_a_shard_is_asked_again_only_once_no_other_owes_an_answer(virtual_time):
    """Else two who each hold what one shard gave them, and wait for what the other holds, would stand still."""
    cluster, order = cluster_of(2), []
    busy = {"shard-0": _Busy(0, order, True), "shard-1": _Busy(1, order, False)}
    client = ShardClient(RUN, DIGEST, cluster.plan, "w", connect=lambda where, _: busy[where.address])
    client.use(cluster.view())
    assert client.pull().versions == (7, 7)
    assert order == ["begin 0", "start 0", "begin 1", "result 1", "result 0", "begin 0", "result 0"]
